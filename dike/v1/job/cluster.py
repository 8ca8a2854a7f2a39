"""The process in its cluster: one TensorFlow server, settings of all sessions, placement of all ops."""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterable
from typing import Any

import tensorflow as tf
from tensorflow.python.eager import context
from tensorflow.python.framework import ops
from tensorflow.python.ops import variable_v1
from tensorflow.python.training import device_setter, server_lib

from dike.task import Role, TaskSpec

_Server: Any = server_lib.Server
_VARIABLE_OPS = frozenset(device_setter.STANDARD_PS_OPS)


def install(task: TaskSpec) -> None:
    _replace_servers(task)
    _place_all(task)


@functools.cache
def _server(task_json: str) -> Any:
    task = TaskSpec.loads(task_json)
    return _Server(tf.train.ClusterSpec(task.cluster), job_name=str(task.role), task_index=task.index)


def server(task: TaskSpec) -> Any:
    """The server of this process, started at the first call."""
    return _server(task.dumps())


def session_config(task: TaskSpec, given: Any | None) -> Any:
    """The user's session configuration, with filters for the devices of other workers.

    With the filters a session neither waits for other workers to start nor fails when one ends.
    """
    config = tf.compat.v1.ConfigProto()
    config.CopyFrom(given if given is not None else context.context().config)
    config.ClearField("device_filters")
    config.device_filters.extend(["/job:ps", f"/job:worker/task:{task.index}"])
    # The plan, not the script, decides whether a worker has a GPU.
    config.allow_soft_placement = True
    return config


def _replace_servers(task: TaskSpec) -> None:
    """Replaces every server that the script creates by the process' own, for any cluster that the script names."""

    class Server(_Server):
        def __init__(self, *_args: Any, **_kwargs: Any) -> None:
            own = server(task)
            self._server_def = own.server_def
            self._server = own._server

        def __del__(self) -> None:
            """Does nothing: the process' server keeps running."""

        @staticmethod
        def create_local_server(*_args: Any, **_kwargs: Any) -> Any:
            return server(task)

    Server.__name__ = Server.__qualname__ = _Server.__name__
    for module in (tf.compat.v1.train, tf.compat.v1.distribute, tf.distribute, server_lib):
        module.Server = Server


class DevicePlacement:
    """Sets each new op's device, after the script's own device functions, so that the plan takes precedence."""

    def __init__(self, task: TaskSpec) -> None:
        self._task = task
        self._worker_devices: dict[str, str] = {}
        self._creating = threading.local()

    def device_of(self, op: Any) -> str:
        """The planned device for `op`, which may already have one of the script's."""
        if op.type in _VARIABLE_OPS and not getattr(self._creating, "local", False):
            return f"/job:ps/task:{self._task.ps_of(op.name)}/device:CPU:0"
        requested = op.device
        if requested not in self._worker_devices:
            self._worker_devices[requested] = self._on_worker(requested)
        return self._worker_devices[requested]

    def _on_worker(self, requested: str) -> str:
        spec = tf.DeviceSpec.from_string(requested)
        if spec.job == Role.PS:
            return requested  # colocated with a variable by TensorFlow: its initialiser, its gradients' accumulator
        return str(spec.replace(job=str(Role.WORKER), task=self._task.index, replica=None).to_string())

    def create_variable(self, create: Any, **kwargs: Any) -> Any:
        """Creates a variable; a local one (a metric's counter) stays on the worker."""
        collections = kwargs.get("collections") or ()
        local = ops.GraphKeys.LOCAL_VARIABLES in collections and ops.GraphKeys.GLOBAL_VARIABLES not in collections
        before = getattr(self._creating, "local", False)
        self._creating.local = local
        try:
            return create(None, **kwargs)
        finally:
            self._creating.local = before


def _place_all(task: TaskSpec) -> None:
    placement = DevicePlacement(task)
    apply_device_functions = ops.Graph._apply_device_functions
    create_variable = variable_v1.default_variable_creator

    def apply_and_place(graph: Any, op: Any) -> None:
        apply_device_functions(graph, op)
        # The body of a function runs where its caller does.
        if not graph.building_function:
            op._set_device_from_string(placement.device_of(op))

    ops.Graph._apply_device_functions = apply_and_place
    variable_v1.default_variable_creator = lambda _next=None, **kwargs: placement.create_variable(
        create_variable, **kwargs
    )


def actual_devices(variables: Iterable[Any]) -> dict[str, str]:
    """Name, without the `:0`, -> device of each variable."""
    return {variable.name.partition(":")[0]: variable.device for variable in variables}
