"""Ending what still runs of a training job, or what is left over of it."""

from __future__ import annotations

import math

from framework.job import JobSpec
from framework.job_run import JobRun
from framework.mesos_calls import MesosCalls, try_now
from framework.observer import JobObserver

KILL_AGAIN_S = 5.0
LOGS_S = 3.0
"""How long the end of the output may lag behind the end of the process."""


class Stopping:
    """Asks for the end of all tasks until all have ended.

    Args:
        spec: the job.
        run: what runs of it.
        mesos: where it runs.
        observer: is told.
    """

    def __init__(self, spec: JobSpec, run: JobRun, mesos: MesosCalls, observer: JobObserver) -> None:
        self._spec = spec
        self._run = run
        self._mesos = mesos
        self._observer = observer
        self._since_s = -math.inf
        self._killed_s = -math.inf

    def begin(self, now_s: float) -> None:
        """Asks for the first time."""
        self._since_s = now_s
        self._kill_live(now_s)

    def is_over(self, now_s: float) -> bool:
        """Whether all have ended and the output is here, or will not come any more; asks again now and then."""
        if self._run.live():
            if now_s - self._killed_s >= KILL_AGAIN_S:
                self._kill_live(now_s)
            return False
        chief = next((task for task in self._run.members if self._spec.is_chief(task.planned)), None)
        return chief is None or chief.logs_complete or now_s - self._since_s >= LOGS_S

    def tell_lost_output(self) -> None:
        """Tells where the output is that has not come."""
        for task in self._run.members:
            if not task.logs_complete and self._spec.is_chief(task.planned) and task.outcome is not None:
                lost = f"a part of {task.name}'s output was lost on its way"
                if task.adopted:
                    lost = f"what {task.name} wrote while no service was there has not come here"
                self._observer.note(f"{lost}; the whole is in {task.outcome.sandbox} on agent {task.node}")

    def _kill_live(self, now_s: float) -> None:
        self._killed_s = now_s
        for task_id, agent_id in self._run.live().items():
            self._run.tasks[task_id].stop_requested = True
            try_now(self._mesos.kill, task_id, agent_id)


class LeftOver:
    """Tasks that are no part of the attempt and were asked to end: they are asked again until they have.

    Args:
        run: what runs of the job.
        mesos: where it runs.
    """

    def __init__(self, run: JobRun, mesos: MesosCalls) -> None:
        self._run = run
        self._mesos = mesos
        self._killed_s = -math.inf

    def killed(self, now_s: float) -> None:
        """All have just been asked."""
        self._killed_s = now_s

    def kill(self, now_s: float) -> None:
        """Asks those that are left, now and then."""
        left_over = [task for task in self._run.tasks.values() if task.stop_requested and not task.member]
        if left_over and now_s - self._killed_s >= KILL_AGAIN_S:
            self._killed_s = now_s
            for task in left_over:
                try_now(self._mesos.kill, task.task_id, task.agent_id)
