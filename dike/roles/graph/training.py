"""Knows which runs of a session train: what the script gave its optimizers, for each graph."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.ops import gradients_util
from tensorflow.python.training import optimizer as optimizers

_READS = {"ReadVariableOp", "VarHandleOp", "VariableV2", "Variable", "VarIsInitializedOp"}
"""Stateful ops that change nothing."""


@dataclass
class TrainingGraph:
    """What is known of one graph.

    Attributes:
        loss: the tensor given to the first optimizer; None before that.
        differentiated: the first tensor whose gradients with respect to variables were asked for without an optimizer,
            as scripts that clip gradients do.
        updates: ops that optimizers returned; a run that needs one of them is a training step.
        arrivals: of these the synchronous ones -> when this worker's gradients had all arrived, seconds since 1970.
        closures: fetched names -> ops the run needs; filled as runs come.
    """

    loss: Any = None
    differentiated: Any = None
    updates: set[Any] = field(default_factory=set)
    arrivals: dict[Any, Any] = field(default_factory=dict)
    closures: dict[tuple[str, ...], frozenset[Any]] = field(default_factory=dict)

    def observed(self, graph: Any, fetches: Any) -> dict[str, Any] | None:
        """What may be fetched beside `fetches` to report progress: None when the run does not train.

        Keys are `step`, `loss` and, where an update is synchronous, `arrived`: a list, see `arrivals`. The loss is left
        out where it needs an input that the run does not.
        """
        ops = _fetched_ops(graph, fetches)
        if not self.trains(ops):
            return None
        observed: dict[str, Any] = {}
        step = tf.compat.v1.train.get_global_step(graph)
        if step is not None:
            observed["step"] = step
        loss = self.loss_beside(ops)
        if loss is not None:
            observed["loss"] = tf.squeeze(loss) if loss.shape.rank is None else loss
        arrived = [time for update, time in self.arrivals.items() if update in self._closure(ops)]
        if arrived:
            observed["arrived"] = arrived
        return observed

    def trains(self, ops: Iterable[Any]) -> bool:
        """Whether a run that needs `ops` is a training step."""
        return bool(self.updates) and not self.updates.isdisjoint(self._closure(ops))

    def loss_beside(self, ops: Iterable[Any]) -> Any:
        """The loss, if a run that needs `ops` can fetch it too and changes no more by it; else None."""
        loss = self.differentiated if self.loss is None else self.loss
        if loss is None or not loss.graph.is_fetchable(loss):
            return None
        added = self._closure([loss.op]) - self._closure(ops)
        return None if any(_is_input(op) for op in added) else loss

    def _closure(self, ops: Iterable[Any]) -> frozenset[Any]:
        ops = list(ops)
        key = tuple(op.name for op in ops)
        if key not in self.closures:
            self.closures[key] = ancestors(ops)
        return self.closures[key]


def _fetched_ops(graph: Any, fetches: Any) -> list[Any]:
    found = []
    for fetch in tf.nest.flatten(fetches):
        try:
            element = graph.as_graph_element(fetch, allow_tensor=True, allow_operation=True)
        except (TypeError, ValueError, KeyError):
            continue  # the session itself complains of what cannot be fetched
        found.append(element if isinstance(element, tf.Operation) else element.op)
    return found


def _is_input(op: Any) -> bool:
    """Whether it has to be fed, or reads from a queue, a dataset or a random generator."""
    return op.type == "Placeholder" or (op.op_def.is_stateful and op.type not in _READS)


def ancestors(ops: Iterable[Any]) -> frozenset[Any]:
    """The ops and all they depend on."""
    seen = set()
    waiting = list(ops)
    while waiting:
        op = waiting.pop()
        if op not in seen:
            seen.add(op)
            waiting.extend(tensor.op for tensor in op.inputs)
            waiting.extend(op.control_inputs)
    return frozenset(seen)


def samples_in(feed_dict: Any) -> int | None:
    """Samples of one step: the first dimension of the largest array that is fed; None where nothing is."""
    arrays = [np.asarray(value) for value in (feed_dict or {}).values() if np.ndim(value) > 0]
    return int(max(arrays, key=lambda array: array.nbytes).shape[0]) if arrays else None


_graphs: weakref.WeakKeyDictionary[Any, TrainingGraph] = weakref.WeakKeyDictionary()


def of(graph: Any) -> TrainingGraph:
    """What is known of `graph`."""
    return _graphs.setdefault(graph, TrainingGraph())


def install() -> None:
    """Watches `minimize`, `compute_gradients` and `apply_gradients` of all v1 optimizers."""
    base = optimizers.Optimizer
    minimize, compute_gradients, apply_gradients = base.minimize, base.compute_gradients, base.apply_gradients

    gradients = gradients_util._GradientsHelper

    def watched_gradients(ys: Any, xs: Any, *args: Any, **kwargs: Any) -> Any:
        # Others are means to an end, such as a penalty on the gradients of the inputs.
        if all(isinstance(x, tf.Variable) for x in tf.nest.flatten(xs)):
            for loss in tf.nest.flatten(ys):
                if isinstance(loss, tf.Tensor) and not tf.executing_eagerly() and of(loss.graph).differentiated is None:
                    of(loss.graph).differentiated = loss
        return gradients(ys, xs, *args, **kwargs)

    def note_loss(loss: Any) -> None:
        # The outermost call comes first: an optimizer that scales the loss passes another one on.
        if isinstance(loss, tf.Tensor) and not tf.executing_eagerly() and of(loss.graph).loss is None:
            of(loss.graph).loss = loss

    def watched_minimize(self: Any, loss: Any, *args: Any, **kwargs: Any) -> Any:
        note_loss(loss)
        return minimize(self, loss, *args, **kwargs)

    def watched_compute_gradients(self: Any, loss: Any, *args: Any, **kwargs: Any) -> Any:
        note_loss(loss)
        return compute_gradients(self, loss, *args, **kwargs)

    def watched_apply_gradients(self: Any, *args: Any, **kwargs: Any) -> Any:
        update = apply_gradients(self, *args, **kwargs)
        note_update(update)
        return update

    base.minimize = watched_minimize
    base.compute_gradients = watched_compute_gradients
    base.apply_gradients = watched_apply_gradients
    gradients_util._GradientsHelper = watched_gradients


def note_update(update: Any) -> Any:
    """Remembers an op that applies gradients; returns the op, None if nothing is to be remembered."""
    op = update if isinstance(update, tf.Operation) else getattr(update, "op", None)
    if op is None or tf.executing_eagerly():
        return None
    of(op.graph).updates.add(op)
    return op


@contextlib.contextmanager
def opened(graph: Any) -> Iterator[None]:
    """Adds ops to `graph`, even when the script has finalised it; a later run sees them."""
    finalised = graph.finalized
    if finalised:
        graph._unsafe_unfinalize()
    try:
        with graph.as_default():
            yield
    finally:
        if finalised:
            graph.finalize()
