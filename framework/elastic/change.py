"""One change of a job's size, from the launch of further tasks to the first step of the new attempt.

Further tasks get ready while the job trains. Then the chief saves and ends; its process gone, so do all others; none of
the old attempt being left, every slot that stays starts its process of the next one. Attempts are numbered, and slots
start none twice, so no two can ever run side by side.
"""

from __future__ import annotations

import enum
import logging
from collections.abc import Sequence

from framework.elastic.layout import Layout, size_of
from framework.elastic.slots import ElasticSlots
from framework.job import JobSpec, JobTask, Resize, TaskState
from framework.job_run import JobRun
from framework.launching import cluster_spec, task_spec
from framework.mesos_calls import MesosCalls, try_now

logger = logging.getLogger(__name__)

WARM_UP_TIMEOUT_S = 120.0
"""How long further tasks may take to get ready."""
STOP_TIMEOUT_S = 90.0
"""How long a process may take to save and end; its slot kills it sooner."""


class Stage(enum.Enum):
    """How far a change is."""

    WARMING = enum.auto()
    """Further tasks get ready; the job trains."""
    SAVING = enum.auto()
    """The chief saves and ends."""
    CLEARING = enum.auto()
    """All other processes end."""
    STARTING = enum.auto()
    """The next attempt has been started and has not made a step."""


class Change:
    """Carries out one change.

    Args:
        spec: the job.
        run: what runs of it; becomes the next attempt.
        mesos: kills tasks that are given up.
        slots: are told what to run.
        target: the job after the change.
        new: its further tasks, launched already.
        reason: why, for the user.
        now_s: the time.

    Attributes:
        target, new, reason: as given.
        before: the size there was.
        stage: how far it is.
        stopped_s: when the chief was told to stop.
    """

    def __init__(
        self,
        spec: JobSpec,
        run: JobRun,
        mesos: MesosCalls,
        slots: ElasticSlots,
        target: Layout,
        new: Sequence[JobTask],
        reason: str,
        now_s: float,
    ) -> None:
        self._spec = spec
        self._run = run
        self._mesos = mesos
        self._slots = slots
        self._since_s = now_s
        self.target = target
        self.new = new
        self.reason = reason
        assert run.plan is not None
        self.before = size_of(run.plan)
        self.stage = Stage.WARMING
        self.stopped_s = 0.0
        for task in new:
            slots.want(task, None)

    @property
    def has_begun(self) -> bool:
        """Whether the job's processes have been stopped, or are being."""
        return self.stage is not Stage.WARMING

    def failure(self, now_s: float) -> str:
        """What takes too long, or which of the further tasks has died too late to do without; empty if none."""
        if self.stage in (Stage.SAVING, Stage.CLEARING):
            dead = next((task for task in self.new if task.state.is_terminal()), None)
            if dead is not None:
                return f"{dead.failure}{dead.place_of_output}"
        waited_s = now_s - self._since_s
        if self.stage is Stage.WARMING and waited_s > WARM_UP_TIMEOUT_S:
            return f"the further tasks were not ready within {WARM_UP_TIMEOUT_S:g} s"
        if self.stage in (Stage.SAVING, Stage.CLEARING) and waited_s > STOP_TIMEOUT_S:
            return f"the job's processes did not end within {STOP_TIMEOUT_S:g} s"
        return ""

    @property
    def late(self) -> list[JobTask]:
        """The further tasks that are not ready."""
        return [task for task in self.new if not self._is_ready(task)]

    @property
    def script_has_ended(self) -> bool:
        """Whether the chief's script came to its own end just when it was to be stopped."""
        chief = self.chief
        return self.stage is Stage.SAVING and self._slots.exit_code(chief, self._run.attempt) == 0

    def advance(self, now_s: float) -> Stage | None:
        """Does the next step if it can be done; returns the stage that it has come to, None if it is still the same."""
        before = self.stage
        if self.stage is Stage.WARMING and not self.late:
            self.stopped_s = now_s
            self._slots.want(self.chief, None)
            self._enter(Stage.SAVING, now_s)
        elif self.stage is Stage.SAVING and self._slots.is_empty(self.chief):
            # Not before: a synchronous chief needs the others to end its step.
            for task in self._run.members:
                if task is not self.chief:
                    self._slots.want(task, None)
            self._enter(Stage.CLEARING, now_s)
        elif self.stage is Stage.CLEARING and all(self._slots.is_empty(task) for task in self._run.members):
            self._start_next_attempt()
            self._enter(Stage.STARTING, now_s)
        return None if self.stage is before else self.stage

    def complete(self, saved_step: int, now_s: float) -> Resize:
        """What has become of it, now that the next attempt has made a step."""
        before, after = self.before, self.target.size
        cost_s = round(now_s - self.stopped_s, 3)
        return Resize(before.workers, before.ps, after.workers, after.ps, self.reason, saved_step, cost_s)

    def abandon(self) -> None:
        """Gives the change up before it has begun."""
        for task in self.new:
            task.stop_requested = True
            try_now(self._mesos.kill, task.task_id, task.agent_id)

    @property
    def chief(self) -> JobTask:
        """The chief of the attempt that runs."""
        return next(task for task in self._run.members if self._spec.is_chief(task.planned))

    def _is_ready(self, task: JobTask) -> bool:
        return task.state is TaskState.RUNNING and self._slots.is_ready(task)

    def _enter(self, stage: Stage, now_s: float) -> None:
        logger.info("change of size: %s after %.2f s of %s", stage.name, now_s - self._since_s, self.stage.name)
        self.stage = stage
        self._since_s = now_s

    def _start_next_attempt(self) -> None:
        run, target = self._run, self.target
        run.attempt += 1
        run.plan = target.plan
        for task in run.members:
            if task.task_id in target.surplus:
                task.member = False
                task.stop_requested = True
                try_now(self._mesos.kill, task.task_id, task.agent_id)
            else:
                task.planned = target.stays[task.task_id]
        for task in self.new:
            task.member = True
        run.sort()
        run.cluster = cluster_spec(run.members)
        for task in run.members:
            self._slots.want(task, task_spec(self._spec, target.plan, task.planned, run.cluster, run.attempt))
