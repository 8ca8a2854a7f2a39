"""Captures the model of a TensorFlow 1 script at its first training session.

Classes are patched, not the names they are exported under.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Sequence
from typing import Any, NoReturn

from dike.capture import coordinator
from dike.capture.sink import TF_CONFIG, Sink
from dike.graphs import fetched_operations
from dike.profile import ModelProfile
from dike.profiling.graph_profile import graph_profile, needs_first_run
from dike.v1 import training

_PASS_THROUGH_OPS = frozenset({"ReadVariableOp", "Identity", "Cast", "Add", "AddV2", "Squeeze", "Reshape"})
"""Types of ops between the global step and what a script fetches to read it."""
MAX_VISITED_OPS = 100
"""Maximum number of ops searched for the global step."""


def install(sink: Sink) -> None:
    training.install(synchronous=True, before_update=lambda optimizer: coordinator.capture_optimizer(sink, optimizer))
    capture = _GraphCapture(sink)
    capture.wrap_sessions()
    capture.wrap_monitored_sessions()
    capture.refuse_supervisors()
    capture.wrap_server()


class _GraphCapture:
    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._asks_for_steps = False
        self._needs_servers = False

    def wrap_sessions(self) -> None:
        """Makes plain sessions local, and captures the model at the first `run` of a training op."""
        from tensorflow.python.client import session

        base = session.BaseSession
        init, run = base.__init__, base.run

        @functools.wraps(init)
        def __init__(self_: Any, target: str = "", graph: Any = None, config: Any = None) -> None:  # noqa: N807
            init(self_, "", graph, config)

        @functools.wraps(run)
        def run_(self_: Any, fetches: Any, feed_dict: Any = None, options: Any = None, run_metadata: Any = None) -> Any:
            fetched = fetched_operations(self_.graph, fetches)
            self._asks_for_steps = self._asks_for_steps or _reads_global_step(self_.graph, fetched)
            if self._fetches_training(self_.graph, fetches):
                fed = _fed_shapes(self_.graph, feed_dict or {})
                self._capture(self_.graph, fed, fetched)
            return run(self_, fetches, feed_dict, options, run_metadata)

        make_callable = base.make_callable

        @functools.wraps(make_callable)
        def make_callable_(self_: Any, fetches: Any, feed_list: Any = None, accept_options: bool = False) -> Any:
            if not self._fetches_training(self_.graph, fetches):
                return make_callable(self_, fetches, feed_list, accept_options)
            return lambda *values, **_: self_.run(fetches, dict(zip(feed_list or (), values, strict=True)))

        base.__init__, base.run, base.make_callable = __init__, run_, make_callable_

    def wrap_monitored_sessions(self) -> None:
        """Captures the model when a monitored session is created, unless feeds are needed: its graph is complete."""
        from tensorflow.python.framework import ops
        from tensorflow.python.training import monitored_session

        monitored = monitored_session._MonitoredSession
        init = monitored.__init__

        @functools.wraps(init)
        def __init__(self_: Any, session_creator: Any, hooks: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
            self._asks_for_steps = self._asks_for_steps or any(map(_may_stop, hooks or ()))
            if self._try_capture(ops.get_default_graph()):
                # No checkpoint is read and no hook runs: this session exists only until its first training step.
                scaffold = getattr(session_creator, "_scaffold", None)
                session_creator, hooks = monitored_session.ChiefSessionCreator(scaffold), ()
            init(self_, session_creator, hooks, *args, **kwargs)

        monitored.__init__ = __init__

    def refuse_supervisors(self) -> None:
        """Rejects them here, not only on the cluster."""
        from tensorflow.python.training import supervisor

        sink = self._sink

        def refuse(_self: Any, *_args: Any, **_kwargs: Any) -> NoReturn:
            sink.refuse(
                f"{sink.script} uses tf.compat.v1.train.Supervisor, which is not supported in a distributed job; "
                "use tf.compat.v1.train.MonitoredTrainingSession."
            )

        supervisor.Supervisor.__init__ = refuse

    def wrap_server(self) -> None:
        """Replaces servers: the client acts as worker 0, without a port or other workers."""
        from tensorflow.python.training import server_lib

        sink = self._sink
        cluster_of = server_lib.ClusterSpec

        class LocalServer:
            target = ""

            def __init__(self, server_def: Any) -> None:
                self.server_def = server_def

            def start(self) -> None:
                """Does nothing: sessions of the client are local."""

            def join(self) -> NoReturn:
                sink.refuse(
                    f"{sink.script} runs as a parameter server (Server.join) and does not train; "
                    "give it the arguments of a worker, as Dike starts the parameter servers."
                )

        def server(_cls: type, server_or_cluster_def: Any = None, *_: Any, **__: Any) -> LocalServer:
            cluster = cluster_of(getattr(server_or_cluster_def, "cluster", server_or_cluster_def))
            # A cluster taken from TF_CONFIG does not count: one plain task runs without TF_CONFIG.
            own = cluster.as_dict() != json.loads(TF_CONFIG)["cluster"]
            self._needs_servers = self._needs_servers or (own and sum(map(cluster.num_tasks, cluster.jobs)) > 1)
            return LocalServer(server_or_cluster_def)

        server_lib.Server.__new__ = server

    def _try_capture(self, graph: Any) -> bool:
        """Captures a complete graph that trains, unless feeds are needed. Returns whether the graph trains."""
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

        def read() -> ModelProfile:
            profile = graph_profile(sink.script, graph, known, fed, sink.batch_size, fetched)
            counts = not (self._asks_for_steps or profile.synchronous)
            return dataclasses.replace(profile, counts_own_steps=counts, needs_servers=self._needs_servers)

        sink.capture(read)


def _may_stop(hook: Any) -> bool:
    """Whether a hook may end a loop by the global step: `StopAtStepHook`, or one of the script's own."""
    return type(hook).__name__ == "StopAtStepHook" or not type(hook).__module__.startswith("tensorflow.")


def _reads_global_step(graph: Any, operations: Sequence[Any]) -> bool:
    """Whether the fetched operations include the value of the global step."""
    import tensorflow as tf

    with graph.as_default():
        step = tf.compat.v1.train.get_global_step(graph)
    if step is None:
        return False
    visited = list(operations)
    for operation in visited:  # grows
        if operation is step.op:
            return True
        if operation.type in _PASS_THROUGH_OPS and len(visited) < MAX_VISITED_OPS:
            visited += [tensor.op for tensor in operation.inputs]
    return False


def _fed_shapes(graph: Any, feed_dict: Any) -> dict[str, tuple[int, ...]]:
    import numpy as np

    shapes = {}
    for key, value in feed_dict.items():
        if hasattr(key, "op") or isinstance(key, str):
            tensor = graph.as_graph_element(key, allow_operation=False)
            shapes[tensor.op.name] = tuple(np.shape(value))
    return shapes
