"""Runs a TensorFlow server: the role of every ps, and of workers whose chief hands out the steps."""

from __future__ import annotations

import os
import signal
from typing import NoReturn

from dike.reporting import reporter
from dike.task import Role, TaskSpec


def is_server(task: TaskSpec) -> bool:
    """Whether the task runs none of the user's code."""
    return task.role is Role.PS or (not task.is_plain and task.role is Role.WORKER and task.api.has_separate_chief)


def serve(task: TaskSpec) -> NoReturn:
    """Serves the task's part of the cluster until the process is killed."""
    import tensorflow as tf

    config = tf.compat.v1.ConfigProto()
    if not os.environ.get("TF_NUM_INTEROP_THREADS"):
        # With the default of one thread per core a server can deadlock, as each worker may block one.
        config.inter_op_parallelism_threads = max(4, task.worker_count + 2)
    server = tf.distribute.Server(
        tf.train.ClusterSpec(task.cluster), job_name=str(task.role), task_index=task.index, config=config
    )
    reporter().started()
    print(f"dike: {task.name} serves at {task.cluster[task.role][task.index]}", flush=True)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    while True:
        server.join()
