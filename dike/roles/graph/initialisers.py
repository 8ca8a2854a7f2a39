"""Takes apart what a script runs to initialise its variables, because only the chief may do that."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import tensorflow as tf


@dataclass(frozen=True)
class Split:
    """A run's fetches, taken apart.

    Attributes:
        variables: global variables whose initialisers are fetched, alone or in a group.
        others: ops that were grouped with them, such as initialisers of local variables and tables.
        fetches: all that was fetched.
        rest: fetches that have nothing to do with initialising.
        is_rest: for each of the flattened fetches, whether it is in `rest`.
    """

    variables: tuple[Any, ...]
    others: tuple[Any, ...]
    fetches: Any
    rest: tuple[Any, ...]
    is_rest: tuple[bool, ...]

    def run_rest(self, run: Callable[[list[Any]], list[Any]]) -> Any:
        """Runs `rest` and gives the results the form of `fetches`; an op's result is None."""
        results = iter(run(list(self.rest)) if self.rest else [])
        flat = [next(results) if is_rest else None for is_rest in self.is_rest]
        return tf.nest.pack_sequence_as(self.fetches, flat) if tf.nest.is_nested(self.fetches) else flat[0]


def split(graph: Any, fetches: Any) -> Split | None:
    """Takes `fetches` apart; None when they hold no initialiser of a global variable."""
    with graph.as_default():
        initialisers = {variable.initializer: variable for variable in tf.compat.v1.global_variables()}
    variables: dict[Any, None] = {}
    others: dict[Any, None] = {}
    rest = []
    is_rest = []
    for fetch in tf.nest.flatten(fetches):
        leaves = _leaves(_operation(graph, fetch))
        mine = [initialisers[leaf] for leaf in leaves if leaf in initialisers]
        is_rest.append(not mine)
        if mine:
            variables.update(dict.fromkeys(mine))
            others.update(dict.fromkeys(leaf for leaf in leaves if leaf not in initialisers))
        else:
            rest.append(fetch)
    if not variables:
        return None
    return Split(tuple(variables), tuple(others), fetches, tuple(rest), tuple(is_rest))


def _operation(graph: Any, fetch: Any) -> Any:
    """The op that is fetched; None for a tensor or anything else."""
    if isinstance(fetch, tf.Operation):
        return fetch
    if isinstance(fetch, str) and ":" not in fetch:
        return graph.get_operation_by_name(fetch)
    return None


def _leaves(op: Any) -> list[Any]:
    """The ops that a group (`NoOp`) stands for, without the groups in it."""
    if op is None:
        return []
    if op.type != "NoOp":
        return [op]
    found = []
    waiting = list(op.control_inputs)
    seen = set()
    while waiting:
        part = waiting.pop()
        if part in seen:
            continue
        seen.add(part)
        if part.type == "NoOp":
            waiting.extend(part.control_inputs)
        else:
            found.append(part)
    return found
