"""A scheduler whose training jobs plan beside the loop, and planners that are held."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from framework.mesos import events
from framework.scheduler.background import Background, Threads
from framework.scheduler.job import JobEntry
from framework.training.controller import TrainingJob
from solver import Plan, PlanRequest, make_plan
from tests.scheduler.scheduler_stage import SchedulerStage
from tests.training.job_stage import FakeObserver, spec
from tests.waiting import DEADLINE_S, wait_until


class FakePlanner:
    """Plans as the real one, but not before it may."""

    def __init__(self) -> None:
        self.may = threading.Event()
        self.asked: list[set[str]] = []
        self.answered = 0
        self.error: Exception | None = None

    def __call__(self, request: PlanRequest) -> Plan:
        self.asked.append({node.name for node in request.cluster.nodes})
        assert self.may.wait(DEADLINE_S)
        try:
            if self.error is not None:
                raise self.error
            return make_plan(request)
        finally:
            self.answered += 1


class FakeBackground:
    """A `Background` that runs its work only when the test asks for it."""

    def __init__(self) -> None:
        self.begun = 0
        self._due: list[Callable[[], None]] = []

    def start(self, work: Callable[[], Any], wait_s: float = 0.0) -> Future[Any]:
        future: Future[Any] = Future()
        self.begun += 1
        self._due.append(lambda: future.set_result(work()))
        return future

    def go(self) -> None:
        due, self._due = self._due, []
        for do in due:
            do()


class FakeLaunchObserver(FakeObserver):
    def __init__(self) -> None:
        super().__init__()
        self.launches: list[set[str]] = []

    def launched(self, tasks: Any) -> None:
        self.launches.append({task.node for task in tasks})


class PlanningStage(SchedulerStage):
    """A scheduler whose training jobs plan in threads; the planner is held."""

    def __init__(self, agents: dict[str, float], background: Background | None = None) -> None:
        self.woken = 0
        super().__init__(agents, background=background or Threads(self._wake))
        self.observers: dict[str, FakeLaunchObserver] = {}

    def _wake(self) -> None:
        self.woken += 1

    def train(self, job_id: str, state: dict[str, Any] | None = None, **changes: Any) -> TrainingJob:
        self.observers.setdefault(job_id, FakeLaunchObserver())

        def make(handle: JobEntry) -> TrainingJob:
            return TrainingJob(
                spec(job_id=job_id, **changes),
                self.observers[job_id],
                lambda: None,
                lambda: self.master.now,
                state=state,
                patient=True,
                background=handle.background,
            )

        job = self.scheduler.admit(job_id, "ada", next(self._numbers), make).job
        assert isinstance(job, TrainingJob)
        return job

    def begin(self, job_id: str) -> TrainingJob:
        """A job that plans."""
        job = self.train(job_id)
        self.run(2.0)
        assert self.plans(job_id)
        return job

    def plans(self, job_id: str) -> bool:
        """Whether a job plans, on offers that are kept for it."""
        handle = self.scheduler.job(job_id)
        return handle is not None and bool(handle.offers.locked)

    def until(self, condition: Callable[[], object], what: str) -> None:
        def go_round(pause_s: float) -> None:
            time.sleep(pause_s)
            self.step(0.25)

        wait_until(condition, what, pause=go_round)

    def rescind(self, agent: str) -> None:
        for one in [one for one, (where, _) in self.master.offered.items() if where == agent]:
            del self.master.offered[one]
            self.scheduler.handle(events.OfferRescinded(one))
