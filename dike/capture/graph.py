"""Captures the model of a TensorFlow 1 script at its first training session.

Classes and their methods are wrapped, not the names they are exported under, so every spelling is caught.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NoReturn

from dike.capture import coordinator
from dike.capture.sink import Sink
from dike.profiling.graph_profile import graph_profile, needs_first_run
from dike.v1 import training
from dike.v1.graphs import fetched_operations


def install(sink: Sink) -> None:
    """Wraps optimizers, sessions and servers of TensorFlow 1."""
    training.install(synchronous=True, before_update=lambda optimizer: coordinator.capture_optimizer(sink, optimizer))
    capture = _GraphCapture(sink)
    capture.wrap_sessions()
    capture.wrap_monitored_sessions()
    capture.refuse_supervisors()
    capture.wrap_server()


class _GraphCapture:
    def __init__(self, sink: Sink) -> None:
        self._sink = sink

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
                fed = _fed_shapes(self_.graph, feed_dict or {})
                self._capture(self_.graph, fed, fetched_operations(self_.graph, fetches))
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

    def _captures_or_trains(self, graph: Any) -> bool:
        """Captures a finished graph that trains; comes back if it does not, or if its feeds must be seen first.

        Returns:
            Whether the graph trains.
        """
        known = training.of(graph)
        if not known.losses:
            return False
        if not needs_first_run(known, self._sink.batch_size):
            self._capture(graph, {})
        return True

    def _fetches_training(self, graph: Any, fetches: Any) -> bool:
        known = training.of(graph)
        return bool(known.losses) and known.trains(fetched_operations(graph, fetches))

    def _capture(self, graph: Any, fed: dict[str, tuple[int, ...]], fetched: Sequence[Any] = ()) -> NoReturn:
        sink, known = self._sink, training.of(graph)
        sink.capture(lambda: graph_profile(sink.script, graph, known, fed, sink.batch_size, fetched))


def _fed_shapes(graph: Any, feed_dict: Any) -> dict[str, tuple[int, ...]]:
    import numpy as np

    shapes = {}
    for key, value in feed_dict.items():
        if hasattr(key, "op") or isinstance(key, str):
            tensor = graph.as_graph_element(key, allow_operation=False)
            shapes[tensor.op.name] = tuple(np.shape(value))
    return shapes
