"""Jobs whose steps a `ClusterCoordinator` outside of Dike hands out: the script's own, or that of tf_keras."""

from __future__ import annotations

import itertools
from typing import Any

from dike.reporting import reporter
from dike.roles.cluster import place_as_planned, placed
from dike.task import TaskSpec


def install(task: TaskSpec) -> None:
    """Puts variables where the plan says and reports the steps. Called when TensorFlow is imported."""
    place_as_planned(task)
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
