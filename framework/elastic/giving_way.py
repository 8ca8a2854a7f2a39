"""Which of its workers a running job could give up for another job of the same service, and which it is asked for."""

from __future__ import annotations

import dataclasses
import math

from dike.task import Role
from framework.elastic.change import Change
from framework.elastic.layout import Layout, without
from framework.job import JobSpec
from framework.job_run import JobRun
from framework.service.tenant import Spare

SOON_S = 60.0
"""How long others can be asked to wait until the job may change its size again."""


class GivingWay:
    """The wish of others for a job's workers; it stands until it is taken back.

    Args:
        spec: the job.
        run: what runs of it.

    Attributes:
        reason: whose wish it is, as a sentence for the user.
    """

    def __init__(self, spec: JobSpec, run: JobRun) -> None:
        self._spec = spec
        self._run = run
        self._task_ids: frozenset[str] = frozenset()
        self._free_s = math.inf
        self.reason = ""

    @property
    def is_asked(self) -> bool:
        """Whether the job is to make way, or has and is not to take that back yet."""
        return bool(self._task_ids)

    def ask(self, task_ids: frozenset[str], reason: str) -> None:
        """Asks for these tasks in place of any others; for none: asks no more."""
        self._task_ids = task_ids
        self.reason = reason

    def rests_until(self, free_s: float) -> None:
        """The job has changed, and is not to change again before that time."""
        self._free_s = free_s

    def spare(self, change: Change | None, now_s: float, *, can_change: bool) -> Spare:
        """What the job could give up, and what it does.

        Args:
            change: the change that is under way; None if none is.
            now_s: the time.
            can_change: whether the job can change its size at all.
        """
        going = frozenset(task.task_id for task in self._run.tasks.values() if task.stop_requested and not task.member)
        if change is not None:
            return Spare(leaving=change.target.surplus | going)
        if not can_change or now_s + SOON_S < self._free_s:
            return Spare(leaving=going)
        return dataclasses.replace(self._spare_workers(), leaving=going)

    def target(self, now_s: float) -> Layout | None:
        """The job without what it is asked for.

        None if that is gone already, or more than it may lose, or the job may not change yet.
        """
        spare = self._spare_workers()
        surplus = self._task_ids & frozenset(spare.task_ids)
        if now_s < self._free_s or not surplus or len(surplus) > spare.most:
            return None
        assert self._run.plan is not None
        return without(self._spec, self._run.plan, self._run.members, surplus)

    def _spare_workers(self) -> Spare:
        """The workers that the job could do without, the last ones first."""
        run, spec = self._run, self._spec
        if spec.elastic is None or run.plan is None:
            return Spare()
        workers = [task for task in run.members if task.planned.role == Role.WORKER]
        free = sorted((task for task in workers if not spec.is_chief(task.planned)), key=lambda t: -t.planned.index)
        most = max(0, min(len(free), len(workers) - spec.elastic[0]))
        return Spare(tuple(task.task_id for task in free) if most else (), most)
