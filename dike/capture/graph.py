"""Captures the model of a TensorFlow 1 script at its first training session.

Classes and their methods are wrapped, not the names they are exported under, so every spelling is caught.
"""

from __future__ import annotations

import functools
from typing import Any, NoReturn

from dike.capture.sink import Sink
from dike.profiling.graph_batch import ancestors
from dike.profiling.graph_profile import Training, graph_profile, needs_feeding


def install(sink: Sink) -> None:
    """Wraps optimizers, sessions and servers of TensorFlow 1."""
    capture = _GraphCapture(sink)
    capture.wrap_optimizer()
    capture.wrap_sessions()
    capture.wrap_monitored_sessions()
    capture.refuse_supervisors()
    capture.wrap_server()


class _GraphCapture:
    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._trainings: dict[Any, Training] = {}
        self._differentiated: dict[Any, list[Any]] = {}
        self._trains: dict[tuple[Any, str], bool] = {}

    def wrap_optimizer(self) -> None:
        """Remembers losses and the ops that apply gradients."""
        from tensorflow.python.ops import gradients_util
        from tensorflow.python.training import optimizer, sync_replicas_optimizer

        synchronous = sync_replicas_optimizer.SyncReplicasOptimizer
        compute = optimizer.Optimizer.compute_gradients

        @functools.wraps(compute)
        def compute_gradients(self_: Any, loss: Any, *args: Any, **kwargs: Any) -> Any:
            if hasattr(loss, "op"):
                self._training_of(loss.graph).losses.append(loss)
            return compute(self_, loss, *args, **kwargs)

        optimizer.Optimizer.compute_gradients = compute_gradients

        def wrap_apply(owner: Any) -> None:
            apply = owner.apply_gradients

            @functools.wraps(apply)
            def apply_gradients(self_: Any, *args: Any, **kwargs: Any) -> Any:
                train_op = apply(self_, *args, **kwargs)
                if hasattr(train_op, "graph"):
                    training = self._training_of(train_op.graph)
                    if not training.losses:
                        training.losses.extend(self._differentiated.get(train_op.graph, ()))
                    training.train_ops.append(getattr(train_op, "op", train_op))
                    if isinstance(self_, synchronous):
                        training.synchronous = True
                    else:
                        training.optimizers.append(self_)
                return train_op

            owner.apply_gradients = apply_gradients

        compute_all = gradients_util._GradientsHelper

        @functools.wraps(compute_all)
        def gradients(ys: Any, *args: Any, **kwargs: Any) -> Any:
            # Scripts that clip gradients ask for them here, and hand them to `apply_gradients` later.
            for loss in ys if isinstance(ys, list | tuple) else (ys,):
                if hasattr(loss, "op"):
                    self._differentiated.setdefault(loss.graph, []).append(loss)
            return compute_all(ys, *args, **kwargs)

        gradients_util._GradientsHelper = gradients
        wrap_apply(optimizer.Optimizer)
        wrap_apply(synchronous)

    def wrap_sessions(self) -> None:
        """Plain sessions are local; the first `run` of a training op is where the model is captured."""
        from tensorflow.python.client import session

        base = session.BaseSession
        init, run = base.__init__, base.run

        @functools.wraps(init)
        def __init__(self_: Any, target: str = "", graph: Any = None, config: Any = None) -> None:  # noqa: N807
            init(self_, "", graph, config)

        @functools.wraps(run)
        def run_(self_: Any, fetches: Any, feed_dict: Any = None, options: Any = None, run_metadata: Any = None) -> Any:
            if self._fetches_training(self_.graph, fetches):
                self._capture(self_.graph, _fed_shapes(self_.graph, feed_dict or {}))
            return run(self_, fetches, feed_dict, options, run_metadata)

        make_callable = base.make_callable

        @functools.wraps(make_callable)
        def make_callable_(self_: Any, fetches: Any, feed_list: Any = None, accept_options: bool = False) -> Any:
            if not self._fetches_training(self_.graph, fetches):
                return make_callable(self_, fetches, feed_list, accept_options)
            return lambda *values, **_: self_.run(fetches, dict(zip(feed_list or (), values, strict=True)))

        base.__init__, base.run, base.make_callable = __init__, run_, make_callable_

    def wrap_monitored_sessions(self) -> None:
        """These have a finished graph when they are made; they come to life only if their feeds have to be seen."""
        from tensorflow.python.framework import ops
        from tensorflow.python.training import monitored_session

        monitored = monitored_session._MonitoredSession
        init = monitored.__init__

        @functools.wraps(init)
        def __init__(self_: Any, session_creator: Any, hooks: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
            if self._captures_or_trains(ops.get_default_graph()):
                # No checkpoint is read, no hook writes anything: this session only waits for its first training step.
                scaffold = getattr(session_creator, "_scaffold", None)
                session_creator, hooks = monitored_session.ChiefSessionCreator(scaffold), ()
            init(self_, session_creator, hooks, *args, **kwargs)

        monitored.__init__ = __init__

    def refuse_supervisors(self) -> None:
        """The roles do not do them; better said here than on the cluster."""
        from tensorflow.python.training import supervisor

        sink = self._sink

        def refuse(_self: Any, *_args: Any, **_kwargs: Any) -> NoReturn:
            sink.refuse(
                f"{sink.script} uses tf.compat.v1.train.Supervisor, which is not supported in a distributed job; "
                "use tf.compat.v1.train.MonitoredTrainingSession."
            )

        supervisor.Supervisor.__init__ = refuse

    def wrap_server(self) -> None:
        """The client plays worker 0 alone: it binds no port and waits for nobody."""
        from tensorflow.python.training import server_lib

        sink = self._sink

        class LocalServer:
            """Stands in for `tf.train.Server`."""

            target = ""

            def __init__(self, server_def: Any) -> None:
                self.server_def = server_def

            def start(self) -> None:
                """Does nothing: sessions of the client are local."""

            def join(self) -> NoReturn:
                sink.refuse(
                    f"{sink.script} plays a parameter server (Server.join) and does not train; "
                    "give it the arguments of a worker, Dike starts the parameter servers."
                )

        server_lib.Server.__new__ = lambda _cls, server_or_cluster_def=None, *_, **__: LocalServer(
            server_or_cluster_def
        )

    def _training_of(self, graph: Any) -> Training:
        return self._trainings.setdefault(graph, Training())

    def _captures_or_trains(self, graph: Any) -> bool:
        """Captures a finished graph that trains; comes back if it does not, or if its feeds must be seen first.

        Returns:
            Whether the graph trains.
        """
        training = self._trainings.get(graph)
        if training is None or not training.losses:
            return False
        if self._sink.batch_size or not needs_feeding(training):
            self._capture(graph, {})
        return True

    def _fetches_training(self, graph: Any, fetches: Any) -> bool:
        training = self._trainings.get(graph)
        if training is None or not training.losses or not training.train_ops:
            return False
        for operation in _fetched(graph, fetches):
            key = (graph, operation.name)
            if key not in self._trains:
                needed = set(ancestors([operation], control=True))
                self._trains[key] = not needed.isdisjoint(training.train_ops)
            if self._trains[key]:
                return True
        return False

    def _capture(self, graph: Any, fed: dict[str, tuple[int, ...]]) -> NoReturn:
        sink = self._sink
        training = self._trainings[graph]
        sink.capture(lambda: graph_profile(sink.script, graph, training, fed, sink.batch_size))


def _fetched(graph: Any, fetches: Any) -> list[Any]:
    """Operations behind what a script asks a session for: tensors, ops, names, in any nesting."""
    from tensorflow.python.util import nest

    found = []
    for fetch in nest.flatten(fetches):
        element = graph.as_graph_element(fetch, allow_tensor=True, allow_operation=True) if _is_fetch(fetch) else None
        if element is not None:
            found.append(getattr(element, "op", element))
    return found


def _is_fetch(fetch: Any) -> bool:
    return isinstance(fetch, str | bytes) or hasattr(fetch, "graph") or hasattr(fetch, "_as_graph_element")


def _fed_shapes(graph: Any, feed_dict: Any) -> dict[str, tuple[int, ...]]:
    import numpy as np

    shapes = {}
    for key, value in feed_dict.items():
        if hasattr(key, "op") or isinstance(key, str):
            tensor = graph.as_graph_element(key, allow_operation=False)
            shapes[tensor.op.name] = tuple(np.shape(value))
    return shapes
