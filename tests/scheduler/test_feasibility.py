"""Where jobs would start: asked seldom, and no job whose answer goes wrong takes the scheduler with it."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from dike.exceptions import BadInputError, InfeasibleError
from framework.scheduler.feasibility import PLANNING_BUDGET_S, PLANNING_COOLDOWN_FACTOR, FitCache, FitResult, Nodes
from framework.scheduler.job import JobEntry, Need
from framework.scheduler.offer_matcher import GANG_KEEP_S, GANG_REFUSE_S
from framework.scheduler.preemption import Preemption, Room, UnknownPlaceError
from framework.scheduler.reservation import (
    PLACEMENT_INTERVAL_S,
    RESERVE_AFTER_S,
    Contender,
    Reservations,
    StartLocation,
)
from framework.training import planning
from framework.training.planning import TrainingSizing
from solver import NodeClass
from solver.milp import SolverError
from tests.scheduler.scheduler_stage import FakeJob, FakePreemptibleJob, SchedulerStage
from tests.training.job_stage import GIB, profile, spec

TWO = {"agent-0": 4.0, "agent-1": 4.0}


class Unsizable(FakeJob):
    """A job that cannot be placed, because its agents are ambiguous."""

    def _fit(self, nodes: Nodes) -> FitResult:
        self.placings += 1
        raise BadInputError("Two nodes of the cluster are called 'host/S0'; give each its own name.")


class Unwilling(FakePreemptibleJob):
    """Fails when it is asked to make way."""

    def preempt(self, agent_ids: frozenset[str]) -> None:
        raise ValueError("no")


class Stateless(FakeJob):
    """Fails when its state is to be written down."""

    def to_state(self) -> dict[str, Any]:
        if any(task.state == "running" for task in self.job_handle.tasks.values()):
            raise ValueError("no state")
        return super().to_state()


NODES = (NodeClass(name="a", count=1, cpus=4.0, mem_bytes=8 * GIB, gpus=0, gpu_model=None, disk_bytes=10 * GIB),)


def test_a_job_that_cannot_be_placed_harms_no_other(caplog: pytest.LogCaptureFixture) -> None:
    stage = SchedulerStage(TWO)
    bad = stage.submit("bad", 9, 4.0, kind=Unsizable)
    with caplog.at_level(logging.WARNING):
        stage.run(RESERVE_AFTER_S + 3)
        stage.submit("good", 2, 4.0)
        stage.run(3.0)
    assert "good" in stage.started_s
    assert bad.placings == 1, "it is not asked again about the same agents"
    assert caplog.text.count("cannot predict where job bad would start") == 1
    assert stage.scheduler.snapshot.reservation is None
    assert stage.failed == []
    stage.close()


@pytest.mark.parametrize("kind", [Unwilling, Stateless])
def test_a_job_that_fails_when_it_is_looked_at_fails_alone(kind: type[FakeJob]) -> None:
    stage = SchedulerStage(TWO)
    stage.submit("odd", 2, 4.0, lasts_s=1e6, kind=kind)
    stage.run(3.0)
    stage.submit("waits", 1, 4.0, user="bob")
    stage.run(RESERVE_AFTER_S + 3)
    assert [job_id for job_id, _ in stage.failed] == ["odd"]
    assert stage.scheduler.job("waits") is not None
    assert any(task_id.startswith("odd") for task_id in stage.master.killed)
    stage.close()


def test_jobs_that_are_alike_are_placed_once() -> None:
    stage = SchedulerStage(TWO)
    jobs = [stage.submit(f"job-{number}", 3, 4.0, key="alike") for number in range(3)]
    stage.run(RESERVE_AFTER_S + 10)
    assert sum(job.placings for job in jobs) == 1
    stage.close()


def test_after_a_long_plan_the_loop_does_something_else() -> None:
    now_s = 100.0
    stage = SchedulerStage(TWO)

    class Slow(FakeJob):
        def _fit(self, nodes: Nodes) -> FitResult:
            nonlocal now_s
            now_s += self.lasts_s
            return super()._fit(nodes)

    quick, slow, other = (
        stage.submit(name, 1, 1.0, lasts_s=seconds, kind=Slow)
        for name, seconds in (("quick", PLANNING_BUDGET_S / 2), ("slow", 5.0), ("other", 5.0))
    )
    cache = FitCache(lambda: now_s)

    def fit(job: FakeJob) -> FitResult | None:
        return cache.fit(job.job_handle.job_id, job, None, NODES)

    found = FitResult(frozenset({"a"}))
    assert fit(quick) == fit(slow) == found
    assert fit(other) is None
    assert fit(slow) == found, "known already"
    now_s += PLANNING_COOLDOWN_FACTOR * 5.0
    assert fit(other) == found
    stage.close()


def test_many_short_plans_take_no_longer_at_once_than_a_long_one() -> None:
    now_s = 100.0
    stage = SchedulerStage(TWO)

    class Short(FakeJob):
        def _fit(self, nodes: Nodes) -> FitResult:
            nonlocal now_s
            now_s += self.lasts_s
            return super()._fit(nodes)

    jobs = [stage.submit(f"job-{number}", 1, 1.0, lasts_s=0.02, kind=Short) for number in range(200)]
    cache = FitCache(lambda: now_s)

    def fit(job: FakeJob) -> FitResult | None:
        return cache.fit(job.job_handle.job_id, job, None, NODES)

    def spent_s() -> float:
        began_s = now_s
        for job in jobs:
            fit(job)
        return now_s - began_s

    first_s = spent_s()
    assert PLANNING_BUDGET_S / 2 < first_s < 2 * PLANNING_BUDGET_S
    now_s += 1.0
    assert 0 < spent_s() < PLANNING_BUDGET_S
    now_s += 60.0
    assert PLANNING_BUDGET_S / 2 < spent_s() < 2 * PLANNING_BUDGET_S
    stage.close()


def test_whose_place_is_not_known_now_is_asked_again_soon() -> None:
    reservations = Reservations()
    answers = [None, StartLocation(frozenset({"S1"})), None]
    waiting = [Contender("job", 0.0, True, lambda _: True, lambda: answers.pop(0))]
    reservations.update(100.0, waiting)
    assert reservations.current is None
    reservations.update(101.0, waiting)
    assert reservations.current is not None
    # Nor is it taken away then.
    reservations.update(200.0 + PLACEMENT_INTERVAL_S, waiting)
    assert reservations.current is not None
    assert answers == []


@pytest.mark.parametrize(("answers", "agents"), [(0, {"S0"}), (1, {"S2"}), (9, {"S3"})])
def test_a_place_is_the_best_that_there_was_time_to_find(answers: int, agents: set[str]) -> None:
    """Of four agents the task on the first has run longest."""
    stage = SchedulerStage({f"agent-{number}": 4.0 for number in range(4)})
    for number in range(4):
        stage.submit(f"holds-{number}", 1, 4.0, lasts_s=1e6, constraints=[f"hostname:IS:agent-{number}"])
        stage.run(3.0)
    left = iter(range(answers))

    def fits(room: Room) -> frozenset[str]:
        if next(left, None) is None:
            raise UnknownPlaceError
        return frozenset(sorted(agent for agent, amounts in room.items() if amounts["cpus"] >= 4.0)[:1])

    known = stage.directory.current()
    assert known is not None
    way = Preemption(
        {handle.job_id: handle for handle in stage.scheduler.jobs}, lambda *call: None, lambda job_id, text: None
    )
    waiting = JobEntry("waiting", "ann", 9)
    assert way.earliest_agents(waiting, known, {}, frozenset({"S0"}), fits) == agents
    stage.close()


def test_offers_are_gathered_on_while_it_is_not_known_whether_that_helps() -> None:
    stage = SchedulerStage(TWO)
    stage.submit("holds", 1, 4.0, lasts_s=1e6)
    stage.run(3.0)
    stage.submit("pair", 2, 4.0)
    stage.run(3.0)
    assert stage.scheduler.pool.offers
    stage.directory.is_known = False
    kept = []
    for _ in range(round(GANG_REFUSE_S + GANG_KEEP_S)):
        stage.run(1.0)
        kept.append(bool(stage.scheduler.pool.offers))
    # Declined together, so that they come again together, and then kept again.
    assert kept.count(True) >= GANG_KEEP_S
    assert stage.jobs["pair"].need is Need.START
    stage.close()


@pytest.mark.parametrize("later_s", [0.5 * step for step in range(1, 20)])
def test_agents_that_became_free_at_different_times_are_offered_together(later_s: float) -> None:
    stage = SchedulerStage(TWO)
    for number, lasts_s in enumerate((20.0, 20.0 + later_s)):
        stage.submit(f"holds-{number}", 1, 4.0, lasts_s=lasts_s, constraints=[f"hostname:IS:agent-{number}"])
    stage.run(3.0)
    assert set(stage.started_s) == {"holds-0", "holds-1"}
    stage.submit("pair", 2, 4.0)
    stage.run(45.0)
    assert stage.started_s["pair"] - stage.started_s["holds-1"] < 20.0 + later_s + 5.0
    stage.close()


@pytest.mark.parametrize(
    ("error", "fit"),
    [
        (SolverError("HiGHS gave up."), FitResult()),
        (InfeasibleError("No shape fits."), FitResult(problem="No shape fits.")),
    ],
)
def test_a_planner_that_fails_leaves_the_place_open(
    monkeypatch: pytest.MonkeyPatch, error: Exception, fit: FitResult
) -> None:
    def fails(request: object) -> None:
        raise error

    monkeypatch.setattr(planning, "smallest_job", fails)
    assert TrainingSizing(spec(max_workers=1, profile=profile())).fit(NODES) == fit
