"""Lost workers of a job whose workers do not wait for each other: each comes back alone, under its old address."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from framework.driver import CallRefusedError, MasterUnavailableError
from framework.job import JobSpec, JobTask
from framework.job_run import JobRun
from framework.launching import DoesNotFitError, launch_operation
from framework.mesos_calls import MesosCalls, try_now
from framework.observer import JobObserver
from framework.offer_desk import OfferDesk
from framework.offers import AgentOffer

logger = logging.getLogger(__name__)

REJOIN_S = 20.0
"""How long a lost worker may wait for its agent to offer its place again."""


@dataclass(frozen=True)
class _Lost:
    task: JobTask
    deadline_s: float


class Rejoining:
    """The workers that are to come back.

    Args:
        spec: the job.
        run: what runs of it.
        mesos: where it runs.
        desk: offers in hand.
        observer: is told.
    """

    def __init__(self, spec: JobSpec, run: JobRun, mesos: MesosCalls, desk: OfferDesk, observer: JobObserver) -> None:
        self._spec = spec
        self._run = run
        self._mesos = mesos
        self._desk = desk
        self._observer = observer
        self._lost: dict[str, _Lost] = {}

    @property
    def active(self) -> bool:
        """Whether any worker is waited for."""
        return bool(self._lost)

    def forget(self) -> None:
        """All of the job is being ended."""
        self._lost.clear()

    def start(self, task: JobTask, now_s: float) -> None:
        """Begins to wait for the agent of a lost worker to offer its place again."""
        self._lost[task.name] = _Lost(task, now_s + REJOIN_S)
        try_now(self._mesos.reviveOffers)

    def tick(self, now_s: float) -> str:
        """Brings back whom it can; returns why the job has to start again, or nothing."""
        for name, lost in list(self._lost.items()):
            agent = self._desk.gathering.agent(lost.task.agent_id)
            if agent is not None and self._rejoin(lost.task, agent):
                del self._lost[name]
            elif now_s > lost.deadline_s:
                return f"{lost.task.failure}; its agent did not offer its place again within {REJOIN_S:g} s"
        if not self._lost:
            try_now(self._mesos.suppressOffers)
        self._desk.decline_rest()
        return ""

    def _rejoin(self, lost: JobTask, agent: AgentOffer) -> bool:
        run = self._run
        task = JobTask(
            task_id=f"{self._spec.job_id}.{lost.planned.role}-{lost.planned.index}.{run.serial}",
            planned=lost.planned,
            agent_id=lost.agent_id,
            node=lost.node,
            host=lost.host,
            port=lost.port,
            gpu_devices=lost.gpu_devices,
        )
        assert run.plan is not None
        try:
            operation = launch_operation(self._spec, run.plan, [task], run.cluster, agent, run.attempt)
        except DoesNotFitError:
            return False
        # Noted before the call: what is launched has been written down by then.
        del run.tasks[lost.task_id]
        run.add([task])
        try:
            self._desk.accept(agent, operation)
        except (MasterUnavailableError, CallRefusedError) as error:
            logger.warning("rejoining interrupted: %s", error)
            # Should the master have taken it, it is ended when it reports.
            del run.tasks[task.task_id]
            run.add([lost])
            return False
        self._observer.launched([task])
        return True
