"""Elastic jobs shrink for the job that has a reservation, where it is too little that searches leave."""

from __future__ import annotations

import dataclasses

import pytest

from executor.elastic_messages import ElasticStatus, WantedProcess
from executor.messages import LaunchOrder, Report
from framework import events
from framework.job import JobSpec
from framework.service.explain import explain
from framework.service.explanation import Explanation
from framework.service.places import Places
from framework.service.records import JobKind, JobRecord
from framework.service.reservation import HOLD_S, RECHECK_S, RESERVE_AFTER_S, USELESS_S
from framework.service.seat import Seat
from framework.service.sizing import Fit, Nodes, TrainingSizing
from framework.service.standing import SOUGHT_S
from framework.service.tenant import Spare
from framework.training import TrainingJob
from tests.elastic.elastic_stage import ElasticWatcher, PlayedSlot, elastic
from tests.framework.job_stage import spec
from tests.service.played_cluster import STEP_S, HubStage, PlayedJob, VacatingJob


class ShrinkingJob(PlayedJob):
    """Can do with one task, and gives others up when a test says so."""

    asked: frozenset[str] = frozenset()
    leaving: frozenset[str] = frozenset()
    requests = 0

    def spare(self) -> Spare:
        left = [task_id for task_id in self.seat.tasks if task_id not in self.leaving]
        return Spare(tuple(reversed(left)), len(left) - 1, self.leaving)

    def give_up(self, task_ids: frozenset[str], reason: str) -> None:
        self.requests += task_ids != self.asked
        self.asked = task_ids


def explained(stage: HubStage, job_id: str) -> Explanation:
    return explain(JobRecord(job_id, JobKind.TRAINING, "", "train.py", {}), stage.hub.snapshot)


class LeavingSearch(VacatingJob):
    """Holds slots that it can do without."""

    is_gang = False


class StubbornJob(PlayedJob):
    """Never starts, whatever it is offered."""

    def tick(self) -> None:
        self.seat.declineOffer([offer["id"] for offer in self.offers])
        self.offers = []


def crowded(
    other: type[PlayedJob] = ShrinkingJob, waiting: type[PlayedJob] = PlayedJob, *, count: int = 1, cpus: float = 2.0
) -> tuple[HubStage, ShrinkingJob, PlayedJob]:
    """Two jobs hold an agent each, the user of the first more of it all; a third one has waited for a reservation."""
    stage = HubStage({"agent-0": 4.0, "agent-1": 4.0}, weight={"rich": 0.5})
    first = stage.submit("first", 4, 1.0, user="rich", lasts_s=1e6, kind=ShrinkingJob)
    stage.run(3.0)
    second = stage.submit("second", 4, 1.0, user="poor", lasts_s=1e6, kind=other)
    stage.run(3.0)
    stage.submit("waits", count, cpus, user="late", lasts_s=1e6, kind=waiting)
    stage.run(RESERVE_AFTER_S + 3)
    assert isinstance(first, ShrinkingJob)
    return stage, first, second


def leave(stage: HubStage, job: ShrinkingJob) -> None:
    """The job has done what it was asked for."""
    for task_id in job.asked & job.seat.tasks.keys():
        stage.update(task_id, "TASK_KILLED")


def test_the_user_furthest_above_the_fair_share_makes_way_until_the_other_runs() -> None:
    stage, first, second = crowded()
    assert isinstance(second, ShrinkingJob)
    assert (len(first.asked), second.asked) == (2, frozenset())
    assert stage.told == [("waits", "job first of rich makes way: it gives up 2 workers")]
    could_be_freed = explained(stage, "waits").could_be_freed
    assert could_be_freed[0].endswith("holds 4 cpus, 4096 MiB there. It makes way, and gives up 2 workers.")
    assert could_be_freed[1].endswith("there.")
    sentence = explained(stage, "first").sentence
    assert "makes way for job waits, which has waited long and fits without 2 workers of this one" in sentence
    assert "makes way" not in explained(stage, "second").sentence
    # While it saves nobody else is asked, nor it for more.
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
    stage.hub.cancel_job("waits")
    stage.run(2.0)
    assert (first.requests, first.asked) == (2, frozenset())
    stage.close()


def test_what_another_job_leaves_meanwhile_need_not_be_given_up() -> None:
    stage, first, second = crowded()
    assert first.asked
    for task_id in list(second.seat.tasks)[:2]:
        stage.update(task_id, "TASK_FINISHED", "S1")
    stage.run(3.0)
    assert "waits" in stage.started_s
    assert (len(first.seat.tasks), first.asked) == (4, frozenset())
    stage.close()


@pytest.mark.parametrize(("count", "cpus", "asked"), [(1, 4.0, 0), (2, 3.0, 3)])
def test_an_elastic_job_shrinks_only_as_far_as_searches_do_not_leave(count: int, cpus: float, asked: int) -> None:
    stage, first, search = crowded(LeavingSearch, count=count, cpus=cpus)
    assert "S1" in search.vacated
    assert len(first.asked) == asked
    searches = [line for line in explained(stage, "waits").could_be_freed if line.startswith("The search second")]
    assert [line.endswith("It is asked to leave what is kept for this one.") for line in searches] == [True]
    leave(stage, first)
    stage.run(RECHECK_S + 5)
    assert len(first.asked) == asked, "it is not to grow again yet"
    for task_id in list(search.seat.tasks):
        stage.update(task_id, "TASK_KILLED", "S1")
    # What is kept is offered to other frameworks meanwhile.
    stage.run(HOLD_S + 3)
    assert "waits" in stage.started_s
    stage.close()


def test_who_could_not_use_what_was_given_up_is_not_given_way_to_again() -> None:
    stage, first, _ = crowded(PlayedJob, StubbornJob)
    assert len(first.asked) == 2
    leave(stage, first)
    stage.run(3.0)
    assert stage.hub.snapshot.reservation is None
    assert first.asked == frozenset()
    stage.submit("again", 2, 1.0, user="again", lasts_s=1e6)
    stage.run(USELESS_S + RESERVE_AFTER_S + RECHECK_S)
    assert "again" in stage.started_s
    assert first.requests == 2
    stage.close()


class SlowToPlace(PlayedJob):
    """Takes long to say where it would start."""

    plan_s = planned_s = 0.0

    def _fit(self, nodes: Nodes) -> Fit:
        type(self).planned_s += self.plan_s
        return super()._fit(nodes)


def slowly_placed(monkeypatch: pytest.MonkeyPatch, plan_s: float) -> HubStage:
    """Two jobs hold an agent each, and another waits for most of both, which is planned on the master's clock."""
    monkeypatch.setattr(SlowToPlace, "plan_s", plan_s)
    monkeypatch.setattr(SlowToPlace, "planned_s", 0.0)
    stage = HubStage({"agent-0": 4.0, "agent-1": 4.0})
    stage.hub._standing._places = Places(lambda: stage.master.now + SlowToPlace.planned_s)
    for name in ("first", "second"):
        stage.submit(name, 4, 1.0, user=name, lasts_s=1e6, kind=ShrinkingJob)
        stage.run(3.0)
    stage.submit("waits", 2, 3.0, user="late", lasts_s=1e6, kind=SlowToPlace)
    return stage


def test_jobs_make_way_for_one_whose_plans_take_long_too(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = slowly_placed(monkeypatch, 0.3)
    stage.run(RESERVE_AFTER_S)
    reserved = []
    for _ in range(round(SOUGHT_S / STEP_S)):
        stage.step()
        reserved.append(stage.hub.snapshot.reservation)
    assert [kept for kept in reserved if kept is not None and kept.awaits_ends] == []
    assert sum(len(job.asked) for job in stage.jobs.values() if isinstance(job, ShrinkingJob)) == 6
    assert SlowToPlace.planned_s > 1.0, "it was not found at once"
    stage.close()


def test_what_is_known_has_to_do_where_plans_take_very_long(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = slowly_placed(monkeypatch, 10.0)
    stage.run(RESERVE_AFTER_S + SOUGHT_S / 2)
    assert stage.hub.snapshot.reservation is None
    deadline_s = stage.master.now + 200.0
    while stage.hub.snapshot.reservation is None and stage.master.now < deadline_s:
        stage.step()
    kept = stage.hub.snapshot.reservation
    assert kept is not None
    assert kept.awaits_ends
    stage.close()


class Played:
    """Real training jobs at a hub, with played slots."""

    def __init__(self) -> None:
        self.stage = HubStage({"agent-0": 4.0, "agent-1": 4.0})
        self.watcher = ElasticWatcher()
        self.slots: dict[str, PlayedSlot] = {}
        self._heard = self._ended = 0

    def admit(self, job_spec: JobSpec, number: int) -> TrainingJob:
        def make(seat: Seat) -> TrainingJob:
            seat.sizing = TrainingSizing(job_spec)
            return TrainingJob(job_spec, seat, self.watcher, lambda: None, lambda: self.stage.master.now)

        job = self.stage.hub.admit(job_spec.job_id, job_spec.job_id, number, make).tenant
        assert isinstance(job, TrainingJob)
        return job

    def run(self, seconds: float) -> None:
        """Time passes; slots do what they are told, tasks that are killed end."""
        stage = self.stage
        for _ in range(round(seconds / STEP_S)):
            stage.step()
            for info in stage.master.accepted:
                task_id, order = info["task_id"]["value"], LaunchOrder.decode(info["data"])
                if order.elastic and task_id not in self.slots:
                    status = ElasticStatus(task_id, 0, True, order.task.attempt)
                    self.slots[task_id] = PlayedSlot(order, status, [order.task.attempt])
            messages, self._heard = stage.master.messages[self._heard :], len(stage.master.messages)
            for task_id, data in messages:
                self.slots[task_id].obey(WantedProcess.decode(data))
                stage.hub.handle(events.MessageArrived("S0", task_id, self.slots[task_id].status.encode()))
            killed, self._ended = stage.master.killed[self._ended :], len(stage.master.killed)
            for task_id in killed:
                stage.update(task_id, "TASK_KILLED")

    def report(self, job: TrainingJob, **content: object) -> None:
        """The job's chief says something."""
        chief = next(task for task in job.tasks if task.name == "chief:0")
        report = Report(chief.task_id, content).encode()
        self.stage.hub.handle(events.MessageArrived(chief.agent_id, chief.task_id, report))


def test_a_training_job_starts_once_an_elastic_one_has_shrunk_and_that_does_not_grow_before() -> None:
    played = Played()
    large = played.admit(dataclasses.replace(elastic(1, 6), job_id="large"), 1)
    played.run(3.0)
    before = {task.task_id for task in large.tasks if task.planned.role == "worker"}
    small = played.admit(spec(job_id="small", max_workers=1), 2)
    played.report(large, type="progress", step=100, loss=1.0)
    played.report(large, type="checkpoint", path="p", step=100)
    played.run(RESERVE_AFTER_S + 10)
    after = {task.task_id for task in large.tasks if task.planned.role == "worker"}
    assert len(after) == len(before) - 1
    assert small.tasks
    assert [reason for reason in played.watcher.reasons if "job small has waited long" in reason]
    assert large.result.resizes == []
    played.report(large, type="resumed", step=100)
    played.report(large, type="progress", step=101, loss=1.0)
    assert [(one.to_workers, one.step) for one in large.result.resizes] == [(len(after), 100)]
    assert len(played.watcher.reasons) == 1
    assert not played.stage.failed
    played.stage.close()
