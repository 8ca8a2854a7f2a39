"""Planning beside the loop: other jobs continue meanwhile, and a late result is discarded."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from dike.exceptions import BadInputError, InfeasibleError
from framework.mesos import events
from framework.scheduler import offer_matcher
from framework.scheduler.offer_matcher import NEGATIVE_CACHE_S, PLANNING_LOCK_S
from framework.scheduler.offer_pool import offer_id
from framework.service.requests import read_request
from framework.service.service import Service
from framework.service.store import ServiceStore
from framework.service.submission import Submissions
from framework.training import planning
from framework.training.planning import plan_request
from solver import NodeClass, make_plan
from tests.mesos.fake_mesos import FakeMesos
from tests.scheduler.planning_stage import FakeBackground, FakePlanner, PlanningStage
from tests.scheduler.scheduler_stage import SchedulerStage
from tests.service.api_stage import BUNDLE, training
from tests.service.fake_context import fake_context
from tests.training.job_stage import GIB, spec
from tests.waiting import DEADLINE_S, wait_until


@pytest.fixture
def planner(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakePlanner]:
    held = FakePlanner()
    monkeypatch.setattr(planning, "planned", held)
    yield held
    held.may.set()


def test_while_one_job_plans_another_is_launched_updated_and_ended(planner: FakePlanner) -> None:
    stage = PlanningStage({"agent-0": 4.0})
    stage.begin("slow")
    wait_until(lambda: planner.asked == [{"agent-0"}], "planning")
    quick = stage.submit("quick", lasts_s=2.0)
    stage.master.agents["agent-1"] = 4.0
    stage.run(PLANNING_LOCK_S / 2)
    assert stage.ended == ["quick"]
    assert [event.state for event in quick.seen if isinstance(event, events.StatusUpdate)] == [
        "TASK_RUNNING",
        "TASK_FINISHED",
    ]
    assert len(stage.master.acknowledged) == 2
    assert stage.plans("slow")
    assert stage.woken == 0
    planner.may.set()
    stage.until(lambda: stage.observers["slow"].launches, "the launch")
    assert stage.observers["slow"].launches == [{"agent-0"}]
    assert planner.asked == [{"agent-0"}]
    # The plan is there a moment before the loop is woken for it.
    wait_until(lambda: stage.woken, "being woken")
    assert stage.woken == 1
    assert stage.failed == []
    stage.close()


def test_offers_that_a_job_keeps_are_taken_back() -> None:
    stage = SchedulerStage({"agent-0": 4.0})
    greedy = stage.submit("greedy")
    greedy.keeps_offers = True
    stage.run(2.0)
    (kept,) = greedy.job_handle.offers.locked
    other = stage.submit("other", user="bob")
    stage.run(PLANNING_LOCK_S + 2)
    assert kept not in greedy.job_handle.offers.locked
    assert "other" in stage.started_s
    assert not stage.failed
    assert other.looks == 1
    stage.close()


def test_a_job_that_is_killed_while_it_plans_ends_at_once_and_its_plan_is_dropped(planner: FakePlanner) -> None:
    stage = PlanningStage({"agent-0": 4.0})
    slow = stage.begin("slow")
    # What has not begun would never be planned.
    wait_until(lambda: planner.asked, "planning")
    state = slow.to_state()
    stage.scheduler.cancel_job("slow")
    stage.step()
    assert stage.ended == ["slow"]
    assert not stage.plans("slow")
    stage.submit("next", 1, 4.0)
    stage.run(2.0)
    assert stage.started_s.keys() == {"next"}, "it has the offers that were held"
    planner.may.set()
    stage.until(lambda: planner.answered and stage.woken, "the end of planning")
    stage.run(2.0)
    assert stage.observers["slow"].launches == []
    # What is written down is a job that waits: it is planned anew by the next service.
    assert state["phase"] == "waiting"
    stage.run(20.0)
    stage.train("slow", state)
    stage.until(lambda: stage.observers["slow"].launches, "the next launch")
    assert not stage.plans("slow")
    stage.close()


def test_a_plan_whose_offers_are_gone_is_made_again(planner: FakePlanner) -> None:
    stage = PlanningStage({"agent-0": 4.0, "agent-1": 0.1})
    stage.begin("slow")
    wait_until(lambda: planner.asked == [{"agent-0", "agent-1"}], "planning")
    stage.rescind("agent-0")
    stage.master.agents["agent-0"] = 0.0
    stage.submit("quick")
    planner.may.set()
    stage.until(lambda: len(planner.asked) > 1, "another plan")
    assert planner.asked[1] == {"agent-1"}
    stage.until(lambda: stage.observers["slow"].waits, "why it waits")
    assert "agent-0" not in stage.observers["slow"].waits[0]
    stage.master.agents["agent-0"] = 8.0
    stage.until(lambda: stage.observers["slow"].launches, "the launch")
    assert stage.observers["slow"].launches == [{"agent-0"}]
    assert stage.failed == []
    stage.close()


def test_what_is_left_of_an_agents_offers_when_one_is_rescinded_is_planned_on(planner: FakePlanner) -> None:
    stage = PlanningStage({"agent-0": 4.0})
    stage.train("slow")
    first, second = (stage.master.offer(0, cpus=2.0, mem=4096) for _ in range(2))
    stage.master.offered = {offer_id(offer): ("agent-0", 2.0) for offer in (first, second)}
    stage.scheduler.handle(events.OffersArrived((first, second)))
    stage.run(1.0)
    wait_until(lambda: planner.asked, "planning")
    stage.scheduler.handle(events.OfferRescinded(offer_id(first)))
    stage.run(1.0)
    assert stage.plans("slow"), "the remaining offers are reserved for it"
    planner.may.set()
    stage.until(lambda: planner.asked == [{"agent-0"}] * 2, "planning anew")
    stage.close()


def test_what_a_planned_job_leaves_is_planned_on_at_once_however_many_offers_come(planner: FakePlanner) -> None:
    planner.may.set()
    background = FakeBackground()
    stage = PlanningStage({f"agent-{number}": 4.0 for number in range(8)}, background)
    jobs = [f"job-{number}" for number in range(4)]
    for job_id in jobs:
        stage.train(job_id, max_workers=1)
    stage.run(2.0)
    for number in range(len(jobs)):
        assert [stage.plans(job_id) for job_id in jobs].count(True) == 1
        background.go()
        stage.master.agents[f"agent-{10 + number}"] = 0.1
        stage.step(0.1)
    assert sum(len(observer.launches) for observer in stage.observers.values()) == len(jobs)
    stage.close()


def test_jobs_with_quick_plans_are_launched_in_one_round(planner: FakePlanner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "PLAN_WAIT_S", DEADLINE_S)
    monkeypatch.setattr(offer_matcher, "MATCHING_BUDGET_S", DEADLINE_S)
    planner.may.set()
    stage = PlanningStage({f"agent-{number}": 4.0 for number in range(8)})
    for number in range(3):
        stage.train(f"job-{number}", max_workers=1)
    stage.step()
    assert not planner.asked
    stage.step(2.0)
    assert [len(observer.launches) for observer in stage.observers.values()] == [1, 1, 1]
    stage.close()


@pytest.mark.parametrize("how", ["rescinded", "disconnected", "kept too long"])
def test_without_offers_it_plans_no_more(planner: FakePlanner, how: str) -> None:
    stage = PlanningStage({"agent-0": 4.0})
    stage.begin("slow")
    wait_until(lambda: planner.asked, "planning")
    (one,) = stage.master.offered
    if how == "rescinded":
        stage.rescind("agent-0")
    elif how == "disconnected":
        stage.master.offered.clear()
        stage.scheduler.handle(events.Disconnected())
        stage.scheduler.handle(events.Subscribed("F", "127.0.0.1:5050"))
    else:
        stage.step(PLANNING_LOCK_S)
    stage.step()
    assert not stage.plans("slow")
    assert (one in stage.master.declined) == (how == "kept too long")
    planner.may.set()
    stage.until(lambda: stage.observers["slow"].launches, "the launch")
    assert len(planner.asked) == 2
    stage.close()


def test_that_a_job_has_planned_for_too_long_says_nothing_of_what_its_kind_can_use(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stage = PlanningStage({"agent-0": 4.0}, FakeBackground())
    stage.train("slow")
    stage.submit("large", cpus=8.0)
    handle = stage.scheduler.jobs[0]
    stage.run(2.0)
    with monkeypatch.context() as patched:
        # What is given back stays in hand: there is no time to look at it.
        patched.setattr(offer_matcher, "MATCHING_BUDGET_S", -1.0)
        while handle.offers.locked:
            stage.step()
    assert not stage.master.declined
    until_s = stage.master.now + NEGATIVE_CACHE_S / 2
    while not handle.offers.locked and stage.master.now < until_s:
        stage.step()
    assert handle.offers.locked
    assert stage.plans("slow")
    assert not stage.failed
    stage.close()


@pytest.mark.parametrize(
    ("error", "failure"),
    [
        (InfeasibleError("No option fits."), None),
        (BadInputError("Two nodes are called agent-0; give each its own name."), "Two nodes are called agent-0"),
        (ZeroDivisionError("a bug"), "a bug"),
    ],
)
def test_planning_that_fails_is_told_as_ever_and_others_get_the_offers(
    planner: FakePlanner, error: Exception, failure: str | None
) -> None:
    stage = PlanningStage({"agent-0": 4.0})
    stage.begin("slow")
    stage.submit("next", lasts_s=1e6)
    stage.run(2.0)
    assert not stage.started_s
    planner.error = error
    planner.may.set()
    stage.until(lambda: stage.started_s, "the other's launch")
    assert stage.started_s.keys() == {"next"}
    if failure is None:
        assert stage.failed == []
        assert stage.observers["slow"].waits[0].startswith("No option fits. On offer: agent-0 4 cpus")
    else:
        ((job_id, told),) = stage.failed
        assert job_id == "slow"
        assert told is error
        assert failure in str(told)
    stage.close()


def test_a_job_that_fails_while_it_plans_holds_no_offers_any_more(
    planner: FakePlanner, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = PlanningStage({"agent-0": 4.0})
    slow = stage.begin("slow")
    stage.submit("next", 1, 4.0)
    stage.step()

    def fails() -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(slow, "tick", fails)
    stage.step()
    assert [job_id for job_id, _ in stage.failed] == ["slow"]
    assert not stage.plans("slow")
    assert stage.master.launches == ["next.0"], "immediately, on the same offer"
    assert stage.master.declined == []
    stage.close()


def test_each_kind_of_job_plans_once_on_the_same_offers_and_then_they_are_given_back(planner: FakePlanner) -> None:
    planner.may.set()
    background = FakeBackground()
    stage = PlanningStage({"agent-0": 0.1}, background)
    for number in range(6):
        stage.train(f"job-{number}", max_workers=1 + number % 2)
    for _ in range(20):
        background.go()
        stage.step()
    assert len(planner.asked) == 2
    assert stage.master.declined
    told = [job_id for job_id, observer in stage.observers.items() if observer.waits]
    assert told[:2] == ["job-0", "job-1"]
    stage.close()


def test_jobs_that_follow_plans_do_not_hand_the_same_offers_to_each_other_for_ever() -> None:
    node = NodeClass(name="agent-7", count=1, cpus=4.0, mem_bytes=8 * GIB, gpus=0, gpu_model=None, disk_bytes=10 * GIB)
    plan = make_plan(plan_request(spec(), [node]))
    background = FakeBackground()
    stage = PlanningStage({"agent-0": 1.0}, background)
    for number in range(3):
        stage.train(f"job-{number}", plan=plan)
    for _ in range(10):
        background.go()
        stage.step(0.1)
    assert background.begun == 3
    assert len(stage.master.declined) == 1
    assert all(observer.waits[0].startswith("agent agent-7 offers nothing") for observer in stage.observers.values())
    stage.close()


@pytest.mark.slow
def test_the_training_jobs_of_a_service_plan_in_its_background(tmp_path: Path) -> None:
    background, mesos = FakeBackground(), FakeMesos()
    inbox = events.EventScheduler().events
    with contextlib.closing(ServiceStore(f"sqlite:///{tmp_path}/service.db")) as store:
        service = Service(fake_context(store, "/checkpoints"), mesos, background=background)
        service.handle(events.Subscribed("F-1", "127.0.0.1:5050", 1e6))
        job = Submissions(store, inbox).submit(read_request(training()), BUNDLE, "ann")
        service.handle(inbox.get())
        service.handle(events.OffersArrived((mesos.offer(0, cpus=8.0, mem=65536),)))

        def go_round(pause_s: float) -> None:
            time.sleep(pause_s)
            service.tick()

        wait_until(lambda: background.begun, "planning", pause=go_round)
        service.tick()
        assert store.tasks(job_id=job.id) == []
        background.go()
        service.tick()
        assert store.tasks(job_id=job.id)
