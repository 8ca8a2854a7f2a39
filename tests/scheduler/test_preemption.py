"""Elastic jobs shrink for the job that has a reservation, where it is too little that searches leave."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from framework.mesos.offers import AgentOffer
from framework.scheduler.feasibility import FitCache, FitResult, Nodes
from framework.scheduler.job import Answer, Decline, Reclaimable
from framework.scheduler.pending_queue import PLACEMENT_TIMEOUT_S
from framework.scheduler.preemption import PotentialVictim, Room, select_victims, with_tasks
from framework.scheduler.queue_options import Priority
from framework.scheduler.records import JobKind, JobRecord, TaskRecord
from framework.scheduler.reservation import (
    KEEP_S,
    PLACEMENT_INTERVAL_S,
    RECHECK_S,
    RESERVE_AFTER_S,
    URGENT_AFTER_S,
    USELESS_COOLDOWN_S,
    StartLocation,
)
from framework.service.explain import explain
from framework.service.explanation import Explanation
from tests.scheduler.scheduler_stage import STEP_S, FakeJob, FakePreemptibleJob, SchedulerStage
from tests.scheduler.training_stage import TrainingStage
from tests.training.elastic.elastic_stage import elastic
from tests.training.job_stage import spec


class FakeResizableJob(FakeJob):
    """Gives up tasks for others; no central policy sizes it."""

    is_scalable = has_estimate = waits_for_allocation = False
    asked: frozenset[str] = frozenset()

    def reclaimable(self) -> Reclaimable:
        raise NotImplementedError

    def reclaim(self, task_ids: frozenset[str], reason: str) -> None:
        self.asked = task_ids

    def enter_central_allocation(self, competing_jobs: object, sample_runs: int) -> None: ...

    def scale_view(self) -> None: ...

    def scale_to(self, counts: object) -> None: ...


class ShrinkingJob(FakeResizableJob):
    """Can do with one task, and gives others up when a test says so."""

    leaving: frozenset[str] = frozenset()
    requests = 0

    def reclaimable(self) -> Reclaimable:
        left = [task_id for task_id in self.job_handle.tasks if task_id not in self.leaving]
        return Reclaimable(tuple(reversed(left)), len(left) - 1, self.leaving)

    def reclaim(self, task_ids: frozenset[str], reason: str) -> None:
        self.requests += task_ids != self.asked
        self.asked = task_ids


def explained(stage: SchedulerStage, job_id: str) -> Explanation:
    return explain(JobRecord(job_id, JobKind.TRAINING, "", "train.py", {}), stage.scheduler.snapshot)


class LeavingSearch(FakePreemptibleJob):
    """Holds slots that it can do without."""

    is_gang = False


class StubbornJob(FakeJob):
    """Never starts, whatever it is offered."""

    def match_offers(self, agents: Sequence[AgentOffer]) -> Answer:
        return Decline()


def crowded(
    other: type[FakeJob] = ShrinkingJob, waiting: type[FakeJob] = FakeJob, *, count: int = 1, cpus: float = 2.0
) -> tuple[SchedulerStage, ShrinkingJob, FakeJob]:
    """Two jobs hold an agent each, the user of the first more of it all; a third one has waited for a reservation."""
    stage = SchedulerStage({"agent-0": 4.0, "agent-1": 4.0}, weight={"rich": 0.5})
    first = stage.submit("first", 4, 1.0, user="rich", lasts_s=1e6, kind=ShrinkingJob)
    stage.run(3.0)
    second = stage.submit("second", 4, 1.0, user="poor", lasts_s=1e6, kind=other)
    stage.run(3.0)
    stage.submit("waits", count, cpus, user="late", lasts_s=1e6, kind=waiting)
    stage.run(RESERVE_AFTER_S + 3)
    assert isinstance(first, ShrinkingJob)
    return stage, first, second


def leave(stage: SchedulerStage, job: ShrinkingJob) -> None:
    """The job has done what it was asked for."""
    for task_id in job.asked & job.job_handle.tasks.keys():
        stage.update(task_id, "TASK_KILLED")


def test_the_user_furthest_above_the_fair_share_makes_way_until_the_other_runs() -> None:
    stage, first, second = crowded()
    assert isinstance(second, ShrinkingJob)
    assert (len(first.asked), second.asked) == (2, frozenset())
    assert stage.told == [("waits", "job first of rich ends 2 workers to make room")]
    could_be_freed = explained(stage, "waits").could_be_freed
    assert could_be_freed[0].endswith("holds 4 cpus, 4096 MiB there. It makes room, and ends 2 workers.")
    assert could_be_freed[1].endswith("there.")
    sentence = explained(stage, "first").sentence
    assert "makes room for job waits, which has waited long and fits without 2 workers of this one" in sentence
    assert "makes room" not in explained(stage, "second").sentence
    # While it saves, no other job is asked, and it is not asked for more.
    first.leaving = first.asked
    stage.run(2 * RECHECK_S)
    assert (first.requests, second.requests) == (1, 0)
    leave(stage, first)
    stage.run(3.0)
    assert "waits" in stage.started_s
    assert first.asked == frozenset(), "now it may grow again"
    stage.close()


def test_who_waits_no_more_needs_no_room() -> None:
    stage, first, _ = crowded()
    stage.scheduler.cancel_job("waits")
    stage.run(2.0)
    assert (first.requests, first.asked) == (2, frozenset())
    stage.close()


def test_what_another_job_leaves_meanwhile_need_not_be_given_up() -> None:
    stage, first, second = crowded()
    assert first.asked
    for task_id in list(second.job_handle.tasks)[:2]:
        stage.update(task_id, "TASK_FINISHED", "S1")
    stage.run(3.0)
    assert "waits" in stage.started_s
    assert (len(first.job_handle.tasks), first.asked) == (4, frozenset())
    stage.close()


@pytest.mark.parametrize(("count", "cpus", "asked"), [(1, 4.0, 0), (2, 3.0, 3)])
def test_an_elastic_job_shrinks_only_as_far_as_searches_do_not_leave(count: int, cpus: float, asked: int) -> None:
    stage, first, search = crowded(LeavingSearch, count=count, cpus=cpus)
    assert "S1" in search.vacated
    assert len(first.asked) == asked
    searches = [
        pending for pending in explained(stage, "waits").could_be_freed if pending.startswith("The search second")
    ]
    assert [pending.endswith(" vacate the agents reserved for this job.") for pending in searches] == [True]
    leave(stage, first)
    stage.run(RECHECK_S + 5)
    assert len(first.asked) == asked, "it is not to grow again yet"
    for task_id in list(search.job_handle.tasks):
        stage.update(task_id, "TASK_KILLED", "S1")
    # What is kept is offered to other frameworks meanwhile.
    stage.run(KEEP_S + 3)
    assert "waits" in stage.started_s
    stage.close()


@pytest.mark.slow
def test_who_could_not_use_what_was_given_up_is_not_given_way_to_again() -> None:
    stage, first, _ = crowded(FakeJob, StubbornJob)
    assert len(first.asked) == 2
    leave(stage, first)
    stage.run(3.0)
    assert stage.scheduler.snapshot.reservation is None
    assert first.asked == frozenset()
    stage.submit("again", 2, 1.0, user="again", lasts_s=1e6)
    stage.run(USELESS_COOLDOWN_S + RESERVE_AFTER_S + RECHECK_S)
    assert "again" in stage.started_s
    assert first.requests == 2
    stage.close()


class SlowToPlace(FakeJob):
    """Takes long to say where it would start."""

    plan_s = planned_s = 0.0

    def _fit(self, nodes: Nodes) -> FitResult:
        type(self).planned_s += self.plan_s
        return super()._fit(nodes)


def slowly_placed(monkeypatch: pytest.MonkeyPatch, plan_s: float) -> SchedulerStage:
    """Two jobs hold an agent each, and another waits for most of both, which is planned on the master's clock."""
    monkeypatch.setattr(SlowToPlace, "plan_s", plan_s)
    monkeypatch.setattr(SlowToPlace, "planned_s", 0.0)
    stage = SchedulerStage({"agent-0": 4.0, "agent-1": 4.0})
    stage.scheduler._queue._fit_cache = FitCache(lambda: stage.master.now + SlowToPlace.planned_s)
    for name in ("first", "second"):
        stage.submit(name, 4, 1.0, user=name, lasts_s=1e6, kind=ShrinkingJob)
        stage.run(3.0)
    stage.submit("waits", 2, 3.0, user="late", lasts_s=1e6, kind=SlowToPlace)
    return stage


def test_jobs_make_way_for_one_whose_plans_take_long_too(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = slowly_placed(monkeypatch, 0.3)
    stage.run(RESERVE_AFTER_S)
    reserved = []
    for _ in range(round(PLACEMENT_TIMEOUT_S / STEP_S)):
        stage.step()
        reserved.append(stage.scheduler.snapshot.reservation)
    assert [kept for kept in reserved if kept is not None and kept.awaits_task_ends] == []
    assert sum(len(job.asked) for job in stage.jobs.values() if isinstance(job, ShrinkingJob)) == 6
    assert SlowToPlace.planned_s > 1.0, "planning took time"
    stage.close()


def test_what_is_known_has_to_do_where_plans_take_very_long(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = slowly_placed(monkeypatch, 10.0)
    stage.run(RESERVE_AFTER_S + PLACEMENT_TIMEOUT_S / 2)
    assert stage.scheduler.snapshot.reservation is None
    deadline_s = stage.master.now + 200.0
    while stage.scheduler.snapshot.reservation is None and stage.master.now < deadline_s:
        stage.step()
    kept = stage.scheduler.snapshot.reservation
    assert kept is not None
    assert kept.awaits_task_ends
    stage.close()


def test_a_training_job_starts_once_an_elastic_one_has_shrunk_and_that_does_not_grow_before() -> None:
    cluster = TrainingStage({"agent-0": 4.0, "agent-1": 4.0})
    large = cluster.admit(dataclasses.replace(elastic(1, 6), job_id="large"), 1)
    cluster.run(3.0)
    before = {task.task_id for task in large.tasks if task.planned.role == "worker"}
    small = cluster.admit(spec(job_id="small", max_workers=1), 2)
    cluster.report(large, type="progress", step=100, loss=1.0)
    cluster.report(large, type="checkpoint", path="p", step=100)
    cluster.run(RESERVE_AFTER_S + 10)
    after = {task.task_id for task in large.tasks if task.planned.role == "worker"}
    assert len(after) == len(before) - 1
    assert small.tasks
    assert [reason for reason in cluster.observer.reasons if "job small goes first" in reason]
    assert large.result.resizes == []
    cluster.report(large, type="resumed", step=100)
    cluster.report(large, type="progress", step=101, loss=1.0)
    assert [(one.to_workers, one.step) for one in large.result.resizes] == [(len(after), 100)]
    assert len(cluster.observer.reasons) == 1
    assert not cluster.stage.failed
    cluster.stage.close()


def potential_victim(job_id: str, share: float, cpus: Mapping[str, float], most: int = 9) -> PotentialVictim:
    """A job with tasks on agents; names of tasks are agents' names and a letter."""
    tasks = [
        TaskRecord(
            f"{job_id}-{where}",
            job_id,
            where[:2],
            where[:2],
            "",
            "worker",
            "running",
            {"cpus": amount},
            executor_id=f"{job_id}-{where}",
        )
        for where, amount in cpus.items()
    ]
    return PotentialVictim(job_id, share, tasks, most)


def needing(count: int, cpus: float) -> Callable[[Room], frozenset[str]]:
    """A job of `count` tasks with `cpus` CPUs each."""

    def fits(room: Room) -> frozenset[str]:
        places = [agent for agent, free in room.items() for _ in range(int(free["cpus"] // cpus))]
        return frozenset(places[:count]) if len(places) >= count else frozenset()

    return fits


def given_up(place: StartLocation) -> list[str]:
    return sorted(itertools.chain.from_iterable(place.victim_tasks.values()))


RICH = potential_victim("rich", 0.6, {"S0a": 1.0, "S0b": 1.0, "S1a": 1.0}, most=2)
FAR = potential_victim("far", 0.9, {"S2a": 1.0})
POOR = potential_victim("poor", 0.2, {"S0a": 2.0, "S1a": 2.0})


@pytest.mark.parametrize(
    ("jobs", "free", "waits", "asked"),
    [
        # The one with the larger share, though the other could do with fewer tasks; and no more than it takes.
        ([POOR, RICH], {"S0": 0.0, "S1": 0.0}, needing(1, 2.0), ["rich-S0a", "rich-S0b"]),
        ([POOR, RICH], {"S0": 1.0, "S1": 0.0}, needing(1, 2.0), ["rich-S0a"]),
        ([RICH], {"S0": 0.0, "S1": 1.0}, needing(1, 2.0), ["rich-S1a"]),
        # Not more than it can do without, and the other instead if that is too little.
        ([RICH], {"S0": 0.0, "S1": 0.0}, needing(3, 1.0), []),
        ([POOR, RICH], {"S0": 0.0, "S1": 0.0}, needing(2, 2.0), ["poor-S0a", "rich-S0a", "rich-S0b"]),
        # Whose tasks are where they do not help is left alone.
        ([POOR, FAR], {"S0": 0.0, "S1": 0.0, "S2": 0.0}, needing(1, 2.0), ["poor-S0a"]),
        ([POOR, RICH], {"S0": 0.0, "S1": 0.0}, needing(1, 9.0), []),
        ([potential_victim("firm", 0.9, {"S0a": 4.0}, most=0)], {"S0": 0.0}, needing(1, 4.0), []),
    ],
)  # fmt: skip
def test_who_gives_up_what(
    jobs: Sequence[PotentialVictim],
    free: Mapping[str, float],
    waits: Callable[[Room], frozenset[str]],
    asked: list[str],
) -> None:
    place = select_victims(jobs, {agent: {"cpus": cpus} for agent, cpus in free.items()}, waits)
    assert given_up(place) == asked
    assert bool(place.agents) is bool(asked)
    assert {task.rpartition("-")[2][:2] for task in given_up(place)} <= place.agents


jobs_strategy = st.lists(
    st.tuples(
        st.floats(0.0, 1.0),
        st.dictionaries(st.sampled_from(["S0a", "S0b", "S1a", "S1b", "S2a"]), st.sampled_from([0.5, 1.0, 2.0])),
        st.integers(0, 4),
    ),
    max_size=3,
)


@given(jobs=jobs_strategy, free=st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=3, max_size=3), data=st.data())
def test_what_is_given_up_is_enough_and_none_of_it_is_too_much(
    jobs: list[tuple[float, dict[str, float], int]], free: list[float], data: st.DataObject
) -> None:
    able = [potential_victim(f"job{number}", *job) for number, job in enumerate(jobs)]
    room = {f"S{number}": {"cpus": cpus} for number, cpus in enumerate(free)}
    fits = needing(data.draw(st.integers(1, 3)), data.draw(st.sampled_from([1.0, 2.0, 3.0])))
    if fits(room):
        return
    place = select_victims(able, room, fits)
    tasks = {task.task_id: task for job in able for task in job.tasks}
    asked = [tasks[task_id] for task_id in given_up(place)]
    if not place.agents:
        assert not asked
        assert any(job.max_tasks < len(job.tasks) for job in able) or not fits(with_tasks(room, tasks.values()))
        return
    assert fits(with_tasks(room, asked)) == place.agents
    assert all(len(place.victim_tasks.get(job.job_id, ())) <= job.max_tasks for job in able)
    for task in asked:
        assert not fits(with_tasks(room, [other for other in asked if other is not task]))


@pytest.mark.parametrize(
    ("running", "waiting", "soon"),
    [
        (Priority.LOW, Priority.HIGH, True),
        (Priority.NORMAL, Priority.HIGH, True),
        (Priority.HIGH, Priority.HIGH, True),
        (Priority.NORMAL, Priority.NORMAL, False),
        (Priority.LOW, Priority.NORMAL, False),
    ],
)
def test_a_job_of_high_priority_need_not_wait_for_room(running: Priority, waiting: Priority, soon: bool) -> None:
    stage = SchedulerStage({"agent-0": 4.0})
    search = stage.submit("search", 4, 1.0, lasts_s=1e6, kind=LeavingSearch, priority=running)
    stage.run(3.0)
    stage.submit("waits", 1, 2.0, user="late", lasts_s=1e6, priority=waiting)
    stage.run(URGENT_AFTER_S + PLACEMENT_INTERVAL_S + 3)
    assert bool(search.vacated) == soon
    stage.run(RESERVE_AFTER_S)
    assert search.vacated
    stage.close()


@pytest.mark.parametrize("kind", [LeavingSearch, ShrinkingJob])
@pytest.mark.parametrize(("running", "waiting"), [(Priority.NORMAL, Priority.LOW), (Priority.HIGH, Priority.NORMAL)])
def test_no_job_makes_room_for_one_of_lower_priority(kind: type[FakeJob], running: Priority, waiting: Priority) -> None:
    stage = SchedulerStage({"agent-0": 4.0})
    runs = stage.submit("runs", 4, 1.0, lasts_s=1e6, kind=kind, priority=running)
    stage.run(3.0)
    stage.submit("waits", 1, 2.0, user="late", lasts_s=1e6, priority=waiting)
    stage.run(2 * RESERVE_AFTER_S)
    assert not runs.vacated
    assert not getattr(runs, "asked", ())
    stage.close()


def test_the_job_of_lowest_priority_makes_room() -> None:
    stage = SchedulerStage({"agent-0": 4.0, "agent-1": 4.0}, weight={"rich": 0.5})
    # The user of the first has more than a fair share.
    first = stage.submit("first", 4, 1.0, user="rich", lasts_s=1e6, kind=ShrinkingJob)
    second = stage.submit("second", 4, 1.0, user="poor", lasts_s=1e6, kind=ShrinkingJob, priority=Priority.LOW)
    stage.run(3.0)
    stage.submit("waits", 1, 2.0, user="late", lasts_s=1e6, priority=Priority.HIGH)
    stage.run(URGENT_AFTER_S + PLACEMENT_INTERVAL_S + 3)
    assert isinstance(first, ShrinkingJob)
    assert isinstance(second, ShrinkingJob)
    assert (first.asked, len(second.asked)) == (frozenset(), 2)
    stage.close()


def test_a_job_of_high_priority_takes_the_reservation_of_another() -> None:
    stage = SchedulerStage({"agent-0": 4.0})
    stage.submit("runs", 4, 1.0, lasts_s=1e6, kind=LeavingSearch)
    stage.run(3.0)
    stage.submit("waits", 1, 2.0, user="late", lasts_s=1e6)
    stage.run(RESERVE_AFTER_S + 5)
    assert stage.scheduler.snapshot.reservation is not None
    stage.submit("urgent", 1, 4.0, user="late", lasts_s=1e6, priority=Priority.HIGH)
    stage.run(URGENT_AFTER_S + PLACEMENT_INTERVAL_S + 3)
    assert stage.scheduler.snapshot.reservation.job_id == "urgent"
    stage.close()


class SavedJob(FakeResizableJob):
    """A training job with a checkpoint: it gives up all tasks or none."""

    def reclaimable(self) -> Reclaimable:
        return Reclaimable(tuple(self.job_handle.tasks), len(self.job_handle.tasks), is_whole=True)


@pytest.mark.parametrize(
    ("running", "waiting", "yields"),
    [
        (Priority.NORMAL, Priority.HIGH, True),
        (Priority.LOW, Priority.NORMAL, True),
        (Priority.NORMAL, Priority.NORMAL, False),
        (Priority.HIGH, Priority.HIGH, False),
        (Priority.NORMAL, Priority.LOW, False),
    ],
)
def test_a_training_job_makes_room_for_a_higher_priority_only(
    running: Priority, waiting: Priority, yields: bool
) -> None:
    stage = SchedulerStage({"agent-0": 4.0})
    job = stage.submit("runs", 4, 1.0, lasts_s=1e6, kind=SavedJob, priority=running)
    stage.run(3.0)
    stage.submit("waits", 1, 2.0, user="late", lasts_s=1e6, priority=waiting)
    stage.run(RESERVE_AFTER_S + 10)
    assert isinstance(job, SavedJob)
    # All of its tasks, also those that need not end.
    assert len(job.asked) == (4 if yields else 0)
    stage.close()


def test_a_training_job_goes_on_if_an_elastic_one_can_shrink() -> None:
    stage = SchedulerStage({"agent-0": 4.0, "agent-1": 4.0})
    saved = stage.submit("saved", 4, 1.0, user="rich", lasts_s=1e6, kind=SavedJob, priority=Priority.LOW)
    elastic_job = stage.submit("elastic", 4, 1.0, user="poor", lasts_s=1e6, kind=ShrinkingJob)
    stage.run(3.0)
    stage.submit("waits", 1, 2.0, user="late", lasts_s=1e6, priority=Priority.HIGH)
    stage.run(URGENT_AFTER_S + PLACEMENT_INTERVAL_S + 3)
    assert isinstance(saved, SavedJob)
    assert isinstance(elastic_job, ShrinkingJob)
    assert (len(saved.asked), len(elastic_job.asked)) == (0, 2)
    stage.close()
