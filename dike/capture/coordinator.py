"""Captures the model of a script with its own `ClusterCoordinator`, at the first step it schedules.

The client has no cluster, so the strategy is replaced by a local one and the coordinator by a stand-in. Both are
replaced at the class, so every spelling is caught.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any, NoReturn

from dike.capture.sink import Sink
from dike.profiling.coordinator_profile import StepTrace, coordinator_profile

_state: dict[str, Any] = {"strategy": None, "optimizer": None, "trace": None}


def install(sink: Sink) -> None:
    """Replaces `ParameterServerStrategy` and `ClusterCoordinator`, and watches gradient tapes."""
    from tensorflow.python.distribute import parameter_server_strategy_v2
    from tensorflow.python.distribute.coordinator import cluster_coordinator
    from tensorflow.python.eager import backprop

    parameter_server_strategy_v2.ParameterServerStrategyV2.__new__ = _local_strategy

    def coordinator(_cls: type, strategy: Any) -> _Coordinator:
        return _Coordinator(sink, strategy)

    cluster_coordinator.ClusterCoordinator.__new__ = coordinator
    _refuse_collective_training(sink)
    gradient = backprop.GradientTape.gradient

    @functools.wraps(gradient)
    def watched(self: Any, target: Any, sources: Any, *args: Any, **kwargs: Any) -> Any:
        if _state["trace"] is not None:
            _state["trace"].add_gradient(target, sources)
        return gradient(self, target, sources, *args, **kwargs)

    backprop.GradientTape.gradient = watched


def _refuse_collective_training(sink: Sink) -> None:
    """Such a strategy would wait for its other workers for ever."""
    from tensorflow.python.distribute import collective_all_reduce_strategy as collective

    def refuse(_cls: type, *_: Any, **__: Any) -> NoReturn:
        sink.refuse(
            f"{sink.script} uses MultiWorkerMirroredStrategy, which Dike does not distribute; take the strategy out, "
            "for Dike brings its own."
        )

    for strategy in (collective.CollectiveAllReduceStrategy, collective.CollectiveAllReduceStrategyV1):
        strategy.__new__ = refuse


def watch_optimizers(keras: ModuleType) -> None:
    """Remembers the Keras or tf_keras optimizer that a script's own training step uses."""
    method = "apply" if keras.__name__ == "keras" else "apply_gradients"
    owner = next(base for base in keras.optimizers.Optimizer.__mro__ if method in vars(base))
    original = vars(owner)[method]

    @functools.wraps(original)
    def apply(self: Any, *args: Any, **kwargs: Any) -> Any:
        _state["optimizer"] = self
        return original(self, *args, **kwargs)

    setattr(owner, method, apply)


def script_has_strategy() -> bool:
    """Whether the script has made a `ParameterServerStrategy` of its own."""
    return _state["strategy"] is not None


def _local_strategy(_cls: type, *_: Any, **__: Any) -> Any:
    import tensorflow as tf

    _state["strategy"] = tf.distribute.OneDeviceStrategy("/cpu:0")
    return _state["strategy"]


class _Coordinator:
    """Stands in for `ClusterCoordinator`: its first scheduled step is traced and captured, and never run."""

    def __init__(self, sink: Sink, strategy: Any) -> None:
        self._sink = sink
        self.strategy = strategy
        self._datasets: list[Any] = []

    def schedule(self, fn: Callable[..., Any], args: Any = None, kwargs: Any = None) -> NoReturn:
        trace = StepTrace(fn, tuple(args or ()), dict(kwargs or {}), self._datasets)
        _state["trace"] = trace
        self._sink.capture(
            lambda: coordinator_profile(
                self._sink.script, trace, lambda: _state["optimizer"], batch_size=self._sink.batch_size
            )
        )

    def create_per_worker_dataset(self, dataset_fn: Any) -> Any:
        dataset = dataset_fn() if callable(dataset_fn) else dataset_fn
        self._datasets.append(dataset)
        return dataset

    def create_per_worker_resource(self, resource_fn: Callable[[], Any]) -> Any:
        return resource_fn()

    def join(self) -> None:
        """Nothing has been scheduled yet."""

    def done(self) -> bool:
        return True

    def fetch(self, val: Any) -> Any:
        import tensorflow as tf

        return tf.nest.map_structure(lambda value: value.numpy() if hasattr(value, "numpy") else value, val)
