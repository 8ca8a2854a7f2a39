"""One training step as a function for any worker, and what the chief does with its result."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
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

    Attributes:
        function: the step, which takes the flat tensors of a batch and returns a vector for `add`.
        log_sums: sums over the epoch's samples of the logs that no metric counts.
        samples: samples of the epoch that have been added.
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
        self._updated: list[Any] = []
        self._log_names: list[str] = []
        self.log_sums: dict[str, float] = {}
        self.samples = 0
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
            zeros = [variable._step_value for variable in self._metric_variables]
            logs = self._model.train_step(self._pack(tensors))
            counts = [variable._step_value for variable in self._metric_variables]
        for variable in self._metric_variables:
            del variable._step_value
        updated = {
            id(variable)
            for variable, zero, count in zip(self._metric_variables, zeros, counts, strict=True)
            if count is not zero
        }
        self._updated = [
            metric for metric in self._model.metrics if any(id(variable) in updated for variable in metric.variables)
        ]
        logs = logs if isinstance(logs, dict) else {}
        self._log_names = list(logs)
        parts = counts + [tf.reduce_mean(tf.cast(value, tf.float64)) for value in logs.values()]
        return tf.concat([tf.reshape(tf.cast(part, tf.float64), [-1]) for part in parts] or [tf.zeros([0])], axis=0)

    def begin_epoch(self, log_sums: Mapping[str, float], samples: int) -> None:
        """Forgets the logs of the epoch before; begins with those of an epoch that was interrupted."""
        self.log_sums = dict(log_sums)
        self.samples = samples

    def add(self, result: Any, samples: int) -> dict[str, Any]:
        """Adds a step's counts to the model's metrics; returns the logs up to now, as Keras' `fit` has them.

        What `train_step` returns and no metric counts, such as a loss of its own, is averaged over the samples.

        Args:
            result: the vector that the step returned.
            samples: samples in the step.
        """
        if self._add is None:
            self._add = tf.function(self._add_counts, autograph=False)
        counted = self._add(tf.constant(result, tf.float64))
        self.samples += samples
        logs = {}
        values = result[len(result) - len(self._log_names) :]
        for name, value in zip(self._log_names, values, strict=True):
            self.log_sums[name] = self.log_sums.get(name, 0.0) + float(value) * samples
            logs[name] = counted[name] if name in counted else self.log_sums[name] / self.samples
        return logs

    def _add_counts(self, result: Any) -> dict[str, Any]:
        offset = 0
        for variable in self._metric_variables:
            size = math.prod(variable.shape)
            count = tf.reshape(result[offset : offset + size], variable.shape)
            variable._value.assign_add(tf.cast(count, variable._value.dtype))
            offset += size
        results: dict[str, Any] = {}
        for metric in self._updated:
            value = metric.result()
            results.update(value if isinstance(value, dict) else {metric.name: value})
        return {name: tf.convert_to_tensor(value) for name, value in results.items()}
