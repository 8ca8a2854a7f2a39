"""Jobs whose steps a `ClusterCoordinator` outside of Dike hands out: the script's own, or that of tf_keras."""

from __future__ import annotations

import itertools
from typing import Any

from dike.reporting import reporter
from dike.roles.cluster import place_as_planned, placed
from dike.roles.rates import watch_coordinators
from dike.task import TaskSpec


def install(task: TaskSpec, *, reports_steps: bool = True) -> None:
    """Puts variables where the plan says, reports workers' speed. Called when TensorFlow is imported.

    Args:
        task: the chief's task.
        reports_steps: whether to report the steps that are handed out too, because nobody knows more of them.
    """
    place_as_planned(task)
    watch_coordinators()
    if reports_steps:
        _report_steps()


def _report_steps() -> None:
    from tensorflow.python.distribute.coordinator import cluster_coordinator

    coordinator = cluster_coordinator.ClusterCoordinator
    schedule = coordinator.schedule
    steps = itertools.count(1)

    def schedule_and_report(self: Any, *args: Any, **kwargs: Any) -> Any:
        remote = schedule(self, *args, **kwargs)
        step = next(steps)
        if step == 1:
            reporter().placement(placed)
        reporter().progress(step)  # handed out; the script alone knows which of them are done
        return remote

    coordinator.schedule = schedule_and_report
