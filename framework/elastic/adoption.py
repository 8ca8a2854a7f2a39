"""An elastic job whose service has ended: what the next one has to know, and whether its slots bear it out.

A change of size may have been under way, and the slots told of it, after the last that was written down. So the slots
are listened to, which say of themselves how they stand: only if each runs its process of the attempt that was written
down does the job go on. Otherwise it starts again from its checkpoint, at either size, after all has been ended.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from framework.elastic.slots import ElasticSlots
from framework.job import JobSpec, JobTask, TaskState
from framework.job_run import JobRun
from framework.launching import task_spec
from solver import NodeClass


@dataclass(frozen=True)
class ElasticMemory:
    """What cannot be measured anew.

    Attributes:
        nodes: the machines that the job was planned for.
        saved_step: the last checkpoint; None before the first.
        total_steps: how long the script trains; None as long as it has not said.
        cost_s: what a change costs, in seconds.
        is_frozen: whether the script cannot resume, so that the size stays as it is.
    """

    nodes: tuple[NodeClass, ...]
    saved_step: int | None
    total_steps: int | None
    cost_s: float
    is_frozen: bool


class Adoption:
    """Waits until all slots of the attempt have said what they run.

    Args:
        spec: the job.
        run: what runs of it, as it was written down.
        slots: hear from the tasks.
    """

    def __init__(self, spec: JobSpec, run: JobRun, slots: ElasticSlots) -> None:
        self._run = run
        self._slots = slots
        assert run.plan is not None
        for task in run.members:
            slots.adopt(task, task_spec(spec, run.plan, task.planned, run.cluster, run.attempt))
        self._open: Sequence[JobTask] = run.members
        for task in run.tasks.values():
            # It was getting ready for a change that is off, or was surplus.
            task.stop_requested = task.stop_requested or not task.member

    @property
    def is_over(self) -> bool:
        """Whether all are as they were written down."""
        return not self._open

    def tick(self) -> str:
        """Returns why the job has to start again; empty if it need not, or that is not known yet."""
        self._open = [task for task in self._open if not task.state.is_terminal()]
        heard = [task for task in self._open if task.state is TaskState.RUNNING and self._slots.has_spoken(task)]
        for task in heard:
            if not self._slots.runs(task, self._run.attempt):
                return f"{task.name} was in the middle of a change of the job's size when the service ended"
        self._open = [task for task in self._open if task not in heard]
        return ""
