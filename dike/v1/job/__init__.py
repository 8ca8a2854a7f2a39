"""TensorFlow 1 sessions with between-graph replication: every worker runs the whole script against the shared ps."""

from __future__ import annotations

from typing import Any, NoReturn

from dike.exceptions import BadInputError
from dike.task import TaskSpec


def install(task: TaskSpec) -> None:
    """Called when TensorFlow is imported."""
    # Not at the top: these modules import TensorFlow.
    from dike.v1 import training
    from dike.v1.job import cluster, monitored, plain, progress, synchronous

    cluster.install(task)
    training.install(synchronous=True)
    synchronous.install(task)
    progress.count_from_first_start(task)
    monitored.install(task)
    plain.install(task)
    _refuse_supervisors()


def _refuse_supervisors() -> None:
    from tensorflow.python.training import supervisor

    def refuse(_self: Any, *_args: Any, **_kwargs: Any) -> NoReturn:
        raise BadInputError(
            "tf.compat.v1.train.Supervisor is not supported in a distributed job; "
            "use tf.compat.v1.train.MonitoredTrainingSession."
        )

    supervisor.Supervisor.__init__ = refuse
