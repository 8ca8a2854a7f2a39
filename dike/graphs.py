"""TensorFlow 1 graphs: dependencies of operations, fetches of a run, ops added to a finalised graph."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Iterator
from typing import Any


def ancestors(operations: Iterable[Any], *, control: bool = True, fed: Collection[str] = ()) -> list[Any]:
    """The operations and their dependencies, control dependencies too if `control`; those in `fed` are not followed."""
    found = dict.fromkeys(operations)
    pending = list(found)
    while pending:
        operation = pending.pop()
        if operation.name in fed:
            continue
        needed = [tensor.op for tensor in operation.inputs]
        if control:
            needed += operation.control_inputs
        for other in needed:
            if other not in found:
                found[other] = None
                pending.append(other)
    return list(found)


def fetched_operations(graph: Any, fetches: Any) -> list[Any]:
    """Operations behind the fetches of a session's run: tensors, ops, names, in any nesting."""
    from tensorflow.python.util import nest

    found = []
    for fetch in nest.flatten(fetches):
        try:
            element = graph.as_graph_element(fetch, allow_tensor=True, allow_operation=True)
        except (TypeError, ValueError, KeyError):
            continue  # the session itself raises an error
        found.append(getattr(element, "op", element))
    return found


@contextlib.contextmanager
def unfinalized(graph: Any) -> Iterator[None]:
    """Allows ops to be added to a finalised graph."""
    finalised = graph.finalized
    if finalised:
        graph._unsafe_unfinalize()
    try:
        with graph.as_default():
            yield
    finally:
        if finalised:
            graph.finalize()
