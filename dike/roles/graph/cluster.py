"""The process' one TensorFlow server, and the settings every session needs to use it."""

from __future__ import annotations

import functools
from typing import Any

import tensorflow as tf
from tensorflow.python.eager import context
from tensorflow.python.training import server_lib

from dike.task import TaskSpec

_Server: Any = server_lib.Server


@functools.cache
def _server(task_json: str) -> Any:
    task = TaskSpec.loads(task_json)
    return _Server(tf.train.ClusterSpec(task.cluster), job_name=str(task.role), task_index=task.index)


def server(task: TaskSpec) -> Any:
    """The server of this process, started at the first call."""
    return _server(task.dumps())


def session_config(task: TaskSpec, given: Any | None) -> Any:
    """The session's configuration: the user's, cut off from the other workers.

    With the filters a session neither waits for other workers to come up nor fails when one goes away.
    """
    config = tf.compat.v1.ConfigProto()
    config.CopyFrom(given if given is not None else context.context().config)
    config.ClearField("device_filters")
    config.device_filters.extend(["/job:ps", f"/job:worker/task:{task.index}"])
    # The plan, not the script, decides whether a worker has a GPU.
    config.allow_soft_placement = True
    return config


def install(task: TaskSpec) -> None:
    """A server the script makes becomes the process' own, whatever cluster the script names."""

    class Server(_Server):
        """Stands for the server of this process."""

        def __init__(self, *_args: Any, **_kwargs: Any) -> None:
            own = server(task)
            self._server_def = own.server_def
            self._server = own._server

        def __del__(self) -> None:
            """The process' server goes on."""

        @staticmethod
        def create_local_server(*_args: Any, **_kwargs: Any) -> Any:
            return server(task)

    Server.__name__ = Server.__qualname__ = _Server.__name__
    for module in (tf.compat.v1.train, tf.compat.v1.distribute, tf.distribute, server_lib):
        module.Server = Server
