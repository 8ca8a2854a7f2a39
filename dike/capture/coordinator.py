"""Captures the model of a script with its own `ClusterCoordinator`, at the first step that it schedules.

The client has no cluster, so the classes of strategy and coordinator are patched to local stubs. A loop over
`tf.GradientTape` without a coordinator is detected before its first step changes a variable.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any, NoReturn

from dike.capture.sink import TF_CONFIG, Sink
from dike.own_distribution import COLLECTIVE_STRATEGY
from dike.profiling.coordinator_profile import StepTrace, coordinator_profile, tensorflow_variable

_state: dict[str, Any] = {
    "collective": False,
    "strategy": None,
    "optimizer": None,
    "trace": None,
    "fits": False,
    "sources": {},
}


def install(sink: Sink) -> None:
    from tensorflow.python.distribute import parameter_server_strategy_v2
    from tensorflow.python.distribute.coordinator import cluster_coordinator
    from tensorflow.python.eager import backprop

    parameter_server_strategy_v2.ParameterServerStrategyV2.__new__ = _local_strategy

    def coordinator(_cls: type, strategy: Any) -> _Coordinator:
        return _Coordinator(sink, strategy)

    cluster_coordinator.ClusterCoordinator.__new__ = coordinator
    _run_collective_training_alone(sink)
    gradient = backprop.GradientTape.gradient

    @functools.wraps(gradient)
    def watched(self: Any, target: Any, sources: Any, *args: Any, **kwargs: Any) -> Any:
        if _state["trace"] is not None:
            _state["trace"].add_gradient(target, sources)
        _add_sources(sources)
        return gradient(self, target, sources, *args, **kwargs)

    backprop.GradientTape.gradient = watched
    from tensorflow.python.ops import resource_variable_ops

    _watch_updates(sink, resource_variable_ops.ResourceVariable)


def fit_begins() -> None:
    """Disables the detection of own loops: `Model.fit` is captured instead, and may use optimizers in any way."""
    _state["fits"] = True


def capture_own_loop(sink: Sink, step: str, trainable: Callable[[], Iterable[Any]] | None = None) -> None:
    """Captures a script with a training loop of its own, before the call `step`. Returns if a step is captured instead.

    `trainable` returns the trained variables, by default those whose gradients a tape has computed.
    """
    from tensorflow.python.framework import ops

    is_captured = _state["fits"] or _state["trace"] is not None or script_has_strategy()
    if not is_captured and ops.executing_eagerly_outside_functions():
        found = _state["sources"].values() if trainable is None else trainable()
        # Keeps one of a Keras variable and the TensorFlow variable inside it.
        inner = {id(tensorflow_variable(one)): one for one in found}
        sink.capture_loop(f"by {step} in a loop of its own", inner.values(), own_distribution())


def own_distribution() -> str:
    """The strategy by which the script distributes itself over equal workers; empty if it has none."""
    return COLLECTIVE_STRATEGY if _state["collective"] else ""


def capture_optimizer(sink: Sink, optimizer: Any) -> None:
    """Does what `capture_own_loop` does, when an optimizer is about to apply gradients.

    Gradients that no tape has computed do not count: scripts pass zeros to make an optimizer create its slots.
    """
    if _state["sources"]:
        capture_own_loop(sink, f"{type(optimizer).__name__}.apply_gradients")


def _add_sources(sources: Any) -> None:
    import tensorflow as tf

    for source in tf.nest.flatten(sources):
        variable = tensorflow_variable(source)
        if variable is not None:
            _state["sources"].update({id(source): source, id(variable): variable})


def _watch_updates(sink: Sink, owner: type) -> None:
    """Detects loops without an optimizer: `variable.assign_sub(rate * gradient)`."""

    def wrap(method: str) -> None:
        original = getattr(owner, method)

        @functools.wraps(original)
        def update(self: Any, *args: Any, **kwargs: Any) -> Any:
            if id(self) in _state["sources"]:
                capture_own_loop(sink, f"Variable.{method}")
            return original(self, *args, **kwargs)

        setattr(owner, method, update)

    for method in ("assign_add", "assign_sub"):
        wrap(method)


def _run_collective_training_alone(sink: Sink) -> None:
    """Makes a `MultiWorkerMirroredStrategy` run as in one plain task; with other workers it would wait for them."""
    from tensorflow.python.distribute import collective_all_reduce_strategy as collective
    from tensorflow.python.distribute.cluster_resolver import tfconfig_cluster_resolver

    def wrap(owner: type) -> None:
        init = vars(owner)["__init__"]

        @functools.wraps(init)
        def alone(self: Any, *args: Any, **kwargs: Any) -> None:
            _state["collective"] = True
            own = os.environ.get("TF_CONFIG")
            if own == TF_CONFIG:
                del os.environ["TF_CONFIG"]  # meant for scripts with a coordinator
            try:
                given = [*args, *kwargs.values()]
                resolver = next((one for one in given if hasattr(one, "cluster_spec")), None)
                resolver = resolver or tfconfig_cluster_resolver.TFConfigClusterResolver()
                tasks = sum(map(len, resolver.cluster_spec().as_dict().values()))
                if tasks > 1:
                    sink.refuse(
                        f"{sink.script} makes a MultiWorkerMirroredStrategy for {tasks} tasks of a cluster of its own, "
                        "which Dike does not start; leave out TF_CONFIG and the strategy's cluster_resolver, and "
                        "Dike starts the workers (--min-workers N)."
                    )
                init(self, *args, **kwargs)
            finally:
                if own == TF_CONFIG:
                    os.environ["TF_CONFIG"] = own

        owner.__init__ = alone  # type: ignore[misc]

    wrap(collective.CollectiveAllReduceStrategy)
    wrap(collective.CollectiveAllReduceStrategyV1)


def watch_optimizers(sink: Sink, keras: ModuleType) -> None:
    """Records the Keras or tf_keras optimizer that a script's own training step uses."""

    def wrap(optimizer: type, method: str) -> None:
        owner = next(base for base in optimizer.__mro__ if method in vars(base))
        original = vars(owner)[method]

        @functools.wraps(original)
        def apply(self: Any, *args: Any, **kwargs: Any) -> Any:
            capture_optimizer(sink, self)
            _state["optimizer"] = self
            return original(self, *args, **kwargs)

        setattr(owner, method, apply)

    if keras.__name__ == "keras":
        wrap(keras.optimizers.Optimizer, "apply")
        _watch_updates(sink, keras.Variable)
    else:
        wrap(keras.optimizers.Optimizer, "apply_gradients")
        wrap(keras.optimizers.legacy.Optimizer, "apply_gradients")


def script_has_strategy() -> bool:
    return _state["strategy"] is not None


def _local_strategy(_cls: type, *_: Any, **__: Any) -> Any:
    import tensorflow as tf

    _state["strategy"] = tf.distribute.OneDeviceStrategy("/cpu:0")
    return _state["strategy"]


class _Coordinator:
    """Stub of `ClusterCoordinator`: its first scheduled step is traced and captured, and never run."""

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
        """Does nothing: no step has been scheduled."""

    def done(self) -> bool:
        return True

    def fetch(self, val: Any) -> Any:
        import tensorflow as tf

        return tf.nest.map_structure(lambda value: value.numpy() if hasattr(value, "numpy") else value, val)
