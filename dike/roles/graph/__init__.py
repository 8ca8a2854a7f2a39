"""TensorFlow 1 sessions, replicated between graphs: every worker runs the whole script against the shared ps."""

from __future__ import annotations

from types import ModuleType

from dike.task import TaskSpec


def install(task: TaskSpec, _tensorflow: ModuleType) -> None:
    """Makes the script's sessions, devices and optimizers those of the task. Called when TensorFlow is imported."""
    # These modules import TensorFlow at their top, so they cannot be imported before the script has done so.
    from dike.roles.graph import cluster, monitored, placement, plain, refused, steps, synchronous, training

    cluster.install(task)
    placement.install(task)
    training.install()
    synchronous.install(task)
    steps.install(task)
    monitored.install(task)
    plain.install(task)
    refused.install()
