"""What a TensorFlow 1 script passes to its optimizers, by graph: losses, updates, and which runs train."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.ops import gradients_util
from tensorflow.python.training import optimizer as optimizers
from tensorflow.python.training import sync_replicas_optimizer

from dike.graphs import ancestors, fetched_operations
from dike.keras3.model import unique_names

_READS = {"ReadVariableOp", "VarHandleOp", "VariableV2", "Variable", "VarIsInitializedOp"}
"""Stateful ops that do not change state."""


@dataclass(frozen=True)
class Gradients:
    """Gradients that an optimizer or the script has computed.

    Attributes:
        operations: the ops that compute them.
        of_variables: whether with respect to variables, as in scripts that clip gradients; others have another purpose,
            such as a penalty on the gradients of the inputs. Optimizers differentiate with respect to tensors.
    """

    loss: Any
    operations: list[Any]
    of_variables: bool


@dataclass(frozen=True)
class Update:
    """An op that applies gradients to variables."""

    optimizer: Any
    variables: list[Any]

    @property
    def is_synchronous(self) -> bool:
        """Whether it waits for other workers' gradients."""
        return isinstance(self.optimizer, sync_replicas_optimizer.SyncReplicasOptimizer)


@dataclass
class TrainingGraph:
    """The training in one graph.

    Attributes:
        optimizer_losses: tensors passed to optimizers, the outermost optimizer's first: a loss-scaling one passes on
            another.
        gradient_losses: tensors differentiated before the first update, if no optimizer had been given one.
        gradients: all gradients computed.
        updates: ops that optimizers returned; a run that needs one of them is a training step.
        arrivals: synchronous update -> when this worker's gradients had all arrived, seconds since 1970.
        closures: cache of fetched names -> ops that the run needs.
    """

    optimizer_losses: list[Any] = field(default_factory=list)
    gradient_losses: list[Any] = field(default_factory=list)
    gradients: list[Gradients] = field(default_factory=list)
    updates: dict[Any, Update] = field(default_factory=dict)
    arrivals: dict[Any, Any] = field(default_factory=dict)
    closures: dict[tuple[str, ...], frozenset[Any]] = field(default_factory=dict)

    @property
    def losses(self) -> list[Any]:
        return [*self.gradient_losses, *self.optimizer_losses]

    @property
    def loss(self) -> Any:
        """The loss to report; None if there is none yet."""
        of_variables = (each.loss for each in self.gradients if each.of_variables)
        return self.optimizer_losses[0] if self.optimizer_losses else next(of_variables, None)

    @property
    def optimizers(self) -> list[Any]:
        return [update.optimizer for update in self.updates.values() if not update.is_synchronous]

    def extra_fetches(self, graph: Any, fetches: Any) -> dict[str, Any] | None:
        """Tensors to fetch beside `fetches` to report progress; None if the run does not train.

        Keys are `step`, `loss` (unless it needs an input that the run does not) and, for synchronous updates,
        `arrived`: a list, see `arrivals`.
        """
        ops = fetched_operations(graph, fetches)
        if not self.trains(ops):
            return None
        extra: dict[str, Any] = {}
        step = tf.compat.v1.train.get_global_step(graph)
        if step is not None:
            extra["step"] = step
        loss = self.fetchable_loss(ops)
        if loss is not None:
            extra["loss"] = tf.squeeze(loss) if loss.shape.rank is None else loss
        arrived = [time for update, time in self.arrivals.items() if update in self._closure(ops)]
        if arrived:
            extra["arrived"] = arrived
        return extra

    def trains(self, ops: Iterable[Any]) -> bool:
        return bool(self.updates) and not self.updates.keys().isdisjoint(self._closure(ops))

    def fetchable_loss(self, ops: Iterable[Any]) -> Any:
        """The loss, if a run that needs `ops` can fetch it without further inputs or side effects; else None."""
        loss = self.loss
        if loss is None or not loss.graph.is_fetchable(loss):
            return None
        added = self._closure([loss.op]) - self._closure(ops)
        return None if any(_is_input(op) for op in added) else loss

    def note_loss(self, loss: Any) -> None:
        """The same loss may be passed to several methods of an optimizer."""
        if all(loss is not known for known in self.optimizer_losses):
            self.optimizer_losses.append(loss)

    def note_update(self, operation: Any, update: Update) -> None:
        if not self.losses:
            self.gradient_losses.extend(each.loss for each in self.gradients)
        self.updates[operation] = update

    def _closure(self, ops: Iterable[Any]) -> frozenset[Any]:
        ops = list(ops)
        key = tuple(op.name for op in ops)
        if key not in self.closures:
            self.closures[key] = frozenset(ancestors(ops))
        return self.closures[key]


def _is_input(op: Any) -> bool:
    """Whether it has to be fed, or reads from a queue, a dataset or a random generator."""
    return op.type == "Placeholder" or (op.op_def.is_stateful and op.type not in _READS)


def samples_in(feed_dict: Any) -> int | None:
    """Samples of one step: the first dimension of the largest fed array; None if none is fed."""
    arrays = [np.asarray(value) for value in (feed_dict or {}).values() if np.ndim(value) > 0]
    return int(max(arrays, key=lambda array: array.nbytes).shape[0]) if arrays else None


_graphs: weakref.WeakKeyDictionary[Any, TrainingGraph] = weakref.WeakKeyDictionary()


def of(graph: Any) -> TrainingGraph:
    return _graphs.setdefault(graph, TrainingGraph())


def install(*, synchronous: bool, before_update: Callable[[Any], object] | None = None) -> None:
    """Watches all v1 optimizers, and gradients computed without one.

    Args:
        synchronous: whether the update that a `SyncReplicasOptimizer` returns counts too. It does not train by itself:
            it waits until a thread of the chief has run the update of the inner optimizer.
        before_update: called with each optimizer that is about to apply gradients.
    """
    base = optimizers.Optimizer
    minimize, compute_gradients = base.minimize, base.compute_gradients
    gradients = gradients_util._GradientsHelper

    def watched_gradients(ys: Any, xs: Any, *args: Any, **kwargs: Any) -> Any:
        found = gradients(ys, xs, *args, **kwargs)
        losses = [loss for loss in tf.nest.flatten(ys) if _is_loss(loss)]
        if losses:
            operations = [getattr(each, "values", each).op for each in found if each is not None]
            of_variables = all(isinstance(x, tf.Variable) for x in tf.nest.flatten(xs))
            for loss in losses:
                of(loss.graph).gradients.append(Gradients(loss, operations, of_variables))
        return found

    def watched_minimize(self: Any, loss: Any, *args: Any, **kwargs: Any) -> Any:
        _note_loss(loss)
        return minimize(self, loss, *args, **kwargs)

    def watched_compute_gradients(self: Any, loss: Any, *args: Any, **kwargs: Any) -> Any:
        _note_loss(loss)
        return compute_gradients(self, loss, *args, **kwargs)

    base.minimize = watched_minimize
    base.compute_gradients = watched_compute_gradients
    gradients_util._GradientsHelper = watched_gradients
    for owner in (base, sync_replicas_optimizer.SyncReplicasOptimizer) if synchronous else (base,):
        owner.apply_gradients = _watched_apply(owner.apply_gradients, before_update)


def _watched_apply(
    apply_gradients: Callable[..., Any], before_update: Callable[[Any], object] | None
) -> Callable[..., Any]:
    def watched_apply_gradients(self: Any, grads_and_vars: Any, *args: Any, **kwargs: Any) -> Any:
        if before_update is not None:
            before_update(self)
        grads_and_vars = list(grads_and_vars)
        update = apply_gradients(self, grads_and_vars, *args, **kwargs)
        operation = _operation(update)
        if operation is not None:
            variables = [variable for gradient, variable in grads_and_vars if gradient is not None]
            of(operation.graph).note_update(operation, Update(self, variables))
        return update

    return watched_apply_gradients


def _note_loss(loss: Any) -> None:
    if _is_loss(loss):
        of(loss.graph).note_loss(loss)


def _is_loss(value: Any) -> bool:
    return isinstance(value, tf.Tensor) and _operation(value) is not None


def _operation(value: Any) -> Any:
    """The operation behind a tensor or op that sessions can run; None for anything else, including ops in functions."""
    if tf.executing_eagerly():
        return None
    operation = value if isinstance(value, tf.Operation) else getattr(value, "op", None)
    return None if operation is None or operation.graph.building_function else operation


def planned_variables(graph: Any, training: TrainingGraph) -> list[tuple[str, Any]]:
    """Global variables with unique names, without those placed with another: optimizer slots, moving averages."""
    with graph.as_default():
        slots = {id(variable) for optimizer in training.optimizers for variable in optimizer.variables()}
    return unique_names(
        variable
        for variable in graph.get_collection(tf.compat.v1.GraphKeys.GLOBAL_VARIABLES)
        if id(variable) not in slots and not _is_colocated(variable)
    )


def _is_colocated(variable: Any) -> bool:
    return any(group != f"loc:@{variable.op.name}".encode() for group in variable.op.colocation_groups())
