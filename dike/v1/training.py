"""What a TensorFlow 1 script gives its optimizers, for each graph: its losses, its updates, which runs train."""

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
"""Stateful ops that change nothing."""


@dataclass(frozen=True)
class Gradients:
    """Gradients that an optimizer or the script has asked for.

    Attributes:
        loss: of what.
        operations: what computes them.
        of_variables: whether with respect to variables, as scripts do that clip gradients; others are a means to an
            end, such as a penalty on the gradients of the inputs. Optimizers ask with respect to tensors.
    """

    loss: Any
    operations: list[Any]
    of_variables: bool


@dataclass(frozen=True)
class Update:
    """An op that applies gradients.

    Attributes:
        optimizer: the v1 optimizer that made it.
        variables: those that it updates.
    """

    optimizer: Any
    variables: list[Any]

    @property
    def is_synchronous(self) -> bool:
        """Whether it waits for other workers' gradients."""
        return isinstance(self.optimizer, sync_replicas_optimizer.SyncReplicasOptimizer)


@dataclass
class TrainingGraph:
    """What is known of the training in one graph.

    Attributes:
        given: tensors given to optimizers, the outermost optimizer's first: one that scales the loss passes another on.
        unnamed: tensors whose gradients had been asked for at the first update, where no optimizer had been given one.
        gradients: all gradients asked for.
        updates: what optimizers returned; a run that needs one of them is a training step.
        arrivals: of these the synchronous ones -> when this worker's gradients had all arrived, seconds since 1970.
        closures: fetched names -> ops the run needs; filled as runs come.
    """

    given: list[Any] = field(default_factory=list)
    unnamed: list[Any] = field(default_factory=list)
    gradients: list[Gradients] = field(default_factory=list)
    updates: dict[Any, Update] = field(default_factory=dict)
    arrivals: dict[Any, Any] = field(default_factory=dict)
    closures: dict[tuple[str, ...], frozenset[Any]] = field(default_factory=dict)

    @property
    def losses(self) -> list[Any]:
        """All losses."""
        return [*self.unnamed, *self.given]

    @property
    def loss(self) -> Any:
        """The loss that speaks for the training; None as long as there is none."""
        of_variables = (each.loss for each in self.gradients if each.of_variables)
        return self.given[0] if self.given else next(of_variables, None)

    @property
    def optimizers(self) -> list[Any]:
        """Those whose updates change variables."""
        return [update.optimizer for update in self.updates.values() if not update.is_synchronous]

    def observed(self, graph: Any, fetches: Any) -> dict[str, Any] | None:
        """What may be fetched beside `fetches` to report progress: None when the run does not train.

        Keys are `step`, `loss` and, where an update is synchronous, `arrived`: a list, see `arrivals`. The loss is left
        out where it needs an input that the run does not.
        """
        ops = fetched_operations(graph, fetches)
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
        return bool(self.updates) and not self.updates.keys().isdisjoint(self._closure(ops))

    def loss_beside(self, ops: Iterable[Any]) -> Any:
        """The loss, if a run that needs `ops` can fetch it too and changes no more by it; else None."""
        loss = self.loss
        if loss is None or not loss.graph.is_fetchable(loss):
            return None
        added = self._closure([loss.op]) - self._closure(ops)
        return None if any(_is_input(op) for op in added) else loss

    def note_loss(self, loss: Any) -> None:
        """An optimizer has been given a loss; it may be the same as before, in another of its methods."""
        if all(loss is not known for known in self.given):
            self.given.append(loss)

    def note_update(self, operation: Any, update: Update) -> None:
        """An optimizer has made an op that applies gradients."""
        if not self.losses:
            self.unnamed.extend(each.loss for each in self.gradients)
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
    """Samples of one step: the first dimension of the largest array that is fed; None where nothing is."""
    arrays = [np.asarray(value) for value in (feed_dict or {}).values() if np.ndim(value) > 0]
    return int(max(arrays, key=lambda array: array.nbytes).shape[0]) if arrays else None


_graphs: weakref.WeakKeyDictionary[Any, TrainingGraph] = weakref.WeakKeyDictionary()


def of(graph: Any) -> TrainingGraph:
    """What is known of `graph`."""
    return _graphs.setdefault(graph, TrainingGraph())


def install(*, synchronous: bool, before_update: Callable[[Any], object] | None = None) -> None:
    """Watches all v1 optimizers, and gradients that are asked for without one.

    Args:
        synchronous: whether the update that a `SyncReplicasOptimizer` returns counts too. It trains nothing itself: it
            waits until a thread of the chief's has run that of the optimizer inside.
        before_update: is called with each optimizer that is about to apply gradients.
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
    """The operation behind a tensor or an op that sessions can run; None for all else, also for those of functions."""
    if tf.executing_eagerly():
        return None
    operation = value if isinstance(value, tf.Operation) else getattr(value, "op", None)
    return None if operation is None or operation.graph.building_function else operation


def planned_variables(graph: Any, training: TrainingGraph) -> list[tuple[str, Any]]:
    """Global variables with unique names, without those that follow another: the optimizers' own, moving averages."""
    with graph.as_default():
        slots = {id(variable) for optimizer in training.optimizers for variable in optimizer.variables()}
    return unique_names(
        variable
        for variable in graph.get_collection(tf.compat.v1.GraphKeys.GLOBAL_VARIABLES)
        if id(variable) not in slots and not _follows_another(variable)
    )


def _follows_another(variable: Any) -> bool:
    return any(group != f"loc:@{variable.op.name}".encode() for group in variable.op.colocation_groups())
