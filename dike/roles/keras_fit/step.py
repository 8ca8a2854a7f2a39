"""One training step as a function for any worker, and what the chief does with its result."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf
from keras import Variable

_MetricValues = list[Any]


class _StepValue(Variable):
    """A metric's variable inside a step: it starts at zero and is a plain tensor.

    On a ps the workers' updates would overwrite one another; so each step counts for itself and the chief adds up.
    """

    _step_value: Any

    @property
    def value(self) -> Any:
        return self._maybe_autocast(self._step_value)

    def _direct_assign(self, value: Any) -> None:
        self._step_value = tf.cast(value, self._step_value.dtype)


class _Counter(Variable):
    """The optimizer's count of steps: `assign_add` in Keras is a read and a write, between which others may count."""

    def assign_add(self, value: Any) -> Any:
        return self._value.assign_add(tf.cast(value, self._value.dtype))


@contextlib.contextmanager
def _as(variables: Sequence[Any], kind: type) -> Iterator[None]:
    kinds = [type(variable) for variable in variables]
    for variable in variables:
        variable.__class__ = kind
    try:
        yield
    finally:
        for variable, own in zip(variables, kinds, strict=True):
            variable.__class__ = own


class Step:
    """The training step of one model.

    Args:
        model: a built and compiled Keras model.
        optimizers: its optimizers.
        strategy: the parameter server strategy.
        pack: turns the flat tensors of a batch into the data that `train_step` takes.
        signature: types of those tensors.
    """

    def __init__(
        self,
        model: Any,
        optimizers: Sequence[Any],
        strategy: Any,
        pack: Callable[[Sequence[Any]], Any],
        signature: Sequence[Any],
    ) -> None:
        self._model = model
        self._pack = pack
        self._counters = [optimizer._iterations for optimizer in optimizers]
        self._metric_variables = list(model.metrics_variables)
        self._log_names: list[str] = []
        self._add: Any = None

        @tf.function(input_signature=list(signature), autograph=False)
        def step(*tensors: Any) -> Any:
            return strategy.run(self._train, args=tensors)

        self.function = step

    def _train(self, *tensors: Any) -> Any:
        """Computes one step; returns one vector of the metrics' counts and the logs, so that one message brings all."""
        for variable in self._metric_variables:
            variable._step_value = tf.zeros(variable.shape, variable._value.dtype)
        with _as(self._metric_variables, _StepValue), _as(self._counters, _Counter):
            logs = self._model.train_step(self._pack(tensors))
            counts = [variable._step_value for variable in self._metric_variables]
        for variable in self._metric_variables:
            del variable._step_value
        logs = logs if isinstance(logs, dict) else {}
        self._log_names = list(logs)
        parts = counts + [tf.reduce_mean(tf.cast(value, tf.float64)) for value in logs.values()]
        return tf.concat([tf.reshape(tf.cast(part, tf.float64), [-1]) for part in parts] or [tf.zeros([0])], axis=0)

    def add(self, result: Any) -> dict[str, Any]:
        """Adds a step's counts to the model's metrics; returns the logs up to now, as Keras' `fit` has them."""
        if self._add is None:
            self._add = tf.function(self._add_counts, autograph=False)
        metric_logs = self._add(tf.constant(result, tf.float64))
        step_logs = dict(zip(self._log_names, result[len(result) - len(self._log_names) :], strict=True))
        if set(step_logs) == set(metric_logs):
            return dict(metric_logs)
        return step_logs

    def _add_counts(self, result: Any) -> dict[str, Any]:
        offset = 0
        for variable in self._metric_variables:
            size = math.prod(variable.shape)
            count = tf.reshape(result[offset : offset + size], variable.shape)
            variable._value.assign_add(tf.cast(count, variable._value.dtype))
            offset += size
        return dict(self._model.get_metrics_result())
