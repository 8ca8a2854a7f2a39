"""One subscription for many jobs: launches written down first, updates acknowledged last, orphans ended."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import pytest

from dike.exceptions import BadInputError
from framework.mesos import events
from framework.mesos.driver import CallRefusedError, MasterUnavailableError
from framework.mesos.offers import AgentOffer
from framework.scheduler.job import Answer, JobEntry, Need
from framework.scheduler.journal import StorageUnavailableError
from framework.scheduler.offer_matcher import GANG_KEEP_S, REVIVE_WHEN_SILENT_S
from framework.scheduler.reconciler import IMPLICIT_DEADLINE_S, INITIAL_RETRY_S, RECONCILE_AFTER_S, RECONCILE_INTERVAL_S
from framework.scheduler.records import TaskRecord
from framework.scheduler.task_tracker import KILL_RETRY_S
from framework.training.controller import TrainingJob
from framework.training.observer import JobObserver
from framework.training.planning import TrainingSizing
from solver import planner
from tests.scheduler.scheduler_stage import FakeJob, SchedulerStage
from tests.training.job_stage import spec


def live(task_id: str, job_id: str = "job", agent: str = "S0") -> TaskRecord:
    amounts = {"cpus": 1.0}
    return TaskRecord(
        task_id, job_id, agent, "agent-0", "127.0.0.1", "worker:0", "running", amounts, executor_id=task_id
    )


def test_a_launch_is_written_down_before_the_master_hears_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = SchedulerStage({"agent-0": 4.0})
    stage.submit("job", 2)
    accept = stage.master.acceptOffers

    def logged(*arguments: Any) -> None:
        stage.journal.log.append("accept")
        accept(*arguments)

    monkeypatch.setattr(stage.master, "acceptOffers", logged)
    stage.run(3.0)
    assert stage.journal.log == ["intends job.0 job.1", "accept"]
    assert {task.resources["cpus"] for task in stage.journal.tasks.values()} == {1.0}
    stage.close()


class Watchful(FakeJob):
    """Knows whether it is in the middle of a step."""

    is_busy = False

    def handle(self, event: events.Event) -> None:
        self.is_busy = True
        super().handle(event)
        self.is_busy = False

    def match_offers(self, agents: Sequence[AgentOffer]) -> Answer:
        self.is_busy = True
        answer = super().match_offers(agents)
        self.is_busy = False
        return answer

    def to_state(self) -> dict[str, Any]:
        assert not self.is_busy
        return {"need": self.need}


def test_the_state_of_a_job_is_never_asked_for_in_the_middle_of_its_step() -> None:
    stage = SchedulerStage({"agent-0": 4.0})
    stage.submit("job", kind=Watchful, lasts_s=1e6)
    stage.run(3.0)
    assert stage.journal.states == {"job": {"need": Need.NOTHING}}
    assert not stage.failed
    stage.close()


def test_an_update_is_acknowledged_after_what_follows_is_written_down(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = SchedulerStage({"agent-0": 4.0})
    stage.submit("job")
    stage.run(3.0)
    stage.update("job.0", "TASK_FINISHED")
    assert stage.journal.tasks["job.0"].state == "running"
    acknowledged = len(stage.master.acknowledged)

    def fails(*_: Any) -> None:
        raise StorageUnavailableError("the disk is full")

    with monkeypatch.context() as broken:
        broken.setattr(stage.journal, "record_changes", fails)
        with pytest.raises(StorageUnavailableError):
            stage.scheduler.tick()
    assert len(stage.master.acknowledged) == acknowledged
    stage.scheduler.tick()
    assert stage.journal.tasks["job.0"].state == "finished"
    assert stage.journal.states["job"] == {"launched": []}
    assert len(stage.master.acknowledged) == acknowledged + 1
    assert stage.ended == ["job"]
    stage.close()


def test_a_job_that_raises_ends_alone_and_its_tasks_end_in_the_database_too() -> None:
    stage = SchedulerStage({"agent-0": 4.0})
    bad, good = stage.submit("bad", lasts_s=1e6), stage.submit("good", lasts_s=1e6)
    stage.run(5.0)
    bad.raises = RuntimeError("a bug")
    stage.update("bad.0", "TASK_RUNNING")
    assert [job_id for job_id, _ in stage.failed] == ["bad"]
    stage.step()
    assert stage.master.killed == ["bad.0"]
    stage.step(KILL_RETRY_S)
    assert stage.master.killed == ["bad.0", "bad.0"]
    stage.update("bad.0", "TASK_KILLED")
    stage.step()
    assert stage.journal.tasks["bad.0"].state == "killed"
    assert stage.journal.tasks["bad.0"].has_ended
    stage.step(KILL_RETRY_S)
    assert stage.master.killed == ["bad.0", "bad.0"]
    assert not good.done
    stage.close()


def test_jobs_that_fail_together_are_removed_after_all_were_called() -> None:
    stage = SchedulerStage({"agent-0": 4.0})
    bad, good, worse = (stage.submit(name, lasts_s=1e6) for name in ("bad", "good", "worse"))
    stage.run(5.0)
    bad.raises, worse.raises = RuntimeError("a bug"), RuntimeError("another")
    stage.scheduler.handle(events.Disconnected())
    assert [job_id for job_id, _ in stage.failed] == ["bad", "worse"]
    assert [entry.job_id for entry in stage.scheduler.jobs] == ["good"]
    assert isinstance(good.seen[-1], events.Disconnected)
    stage.close()


def test_a_database_that_is_away_is_no_fault_of_the_job() -> None:
    stage = SchedulerStage({"agent-0": 4.0})
    job = stage.submit("job", lasts_s=1e6)
    stage.run(5.0)
    job.raises = StorageUnavailableError("the disk is full")
    with pytest.raises(StorageUnavailableError):
        stage.update("job.0", "TASK_RUNNING")
    assert (stage.failed, stage.ended, stage.master.killed) == ([], [], [])
    stage.close()


class RaisingTwice(FakeJob):
    """Raises when its launch is written down, and would again when it heard of it."""

    def to_state(self) -> dict[str, Any]:
        if self.looks:
            raise RuntimeError("a bug")
        return super().to_state()

    def launched(self) -> None:
        raise RuntimeError("what comes of it")


def test_a_job_that_raises_twice_ends_once() -> None:
    stage = SchedulerStage({"agent-0": 4.0})
    stage.submit("bad", kind=RaisingTwice)
    stage.submit("good")
    stage.run(5.0)
    assert [(job_id, str(error)) for job_id, error in stage.failed] == [("bad", "a bug")]
    assert "good" in stage.started_s
    stage.close()


class Persistent(FakeJob):
    """Starts again after a failed launch."""

    starts_again = True

    def refused(self, error: MasterUnavailableError | CallRefusedError) -> None:
        self.need = Need.START if self.starts_again else Need.NOTHING


class GivingUp(Persistent):
    starts_again = False


class Unlucky(FakeJob):
    """Does not start again after a launch that failed."""

    def refused(self, error: MasterUnavailableError | CallRefusedError) -> None:
        self.unwanted = set(self.job_handle.tasks)


def one_launch_fails(stage: SchedulerStage, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next call that accepts offers is lost."""
    accept = stage.master.acceptOffers

    def lost(*_: Any) -> None:
        monkeypatch.setattr(stage.master, "acceptOffers", accept)
        raise MasterUnavailableError("gone")

    monkeypatch.setattr(stage.master, "acceptOffers", lost)


def test_offers_of_a_launch_that_failed_are_given_back_and_offered_again(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = SchedulerStage({"agent-0": 1.0})
    stage.submit("job", kind=Persistent)
    one_launch_fails(stage, monkeypatch)
    stage.run(10.0)
    assert stage.master.declined[:1] == ["O0"]
    assert "job" in stage.started_s
    stage.close()


def test_the_master_is_asked_for_tasks_of_a_launch_that_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = SchedulerStage({"agent-0": 1.0})
    stage.step(RECONCILE_AFTER_S)
    job = stage.submit("job", kind=GivingUp)
    one_launch_fails(stage, monkeypatch)
    while not job.job_handle.tasks:
        stage.step()
    asked = len(stage.master.reconciled)
    stage.run(INITIAL_RETRY_S + 1)
    assert stage.master.reconciled[asked:] == [{"job.0": "S0"}]
    stage.update("job.0", "TASK_GONE", reason="REASON_RECONCILIATION")
    assert not job.job_handle.tasks
    stage.close()


def test_unknown_tasks_are_killed_and_noted_and_those_of_ended_jobs_written_down() -> None:
    stage = SchedulerStage({"agent-0": 4.0})
    stage.scheduler.disown([live("old.0", "old")])
    stage.update("stranger.0", "TASK_RUNNING", reason="REASON_RECONCILIATION")
    stage.step()
    assert sorted(stage.master.killed) == ["old.0", "stranger.0"]
    assert stage.journal.strangers == ["stranger.0"]
    for task_id in ("old.0", "stranger.0"):
        stage.update(task_id, "TASK_KILLED")
    stage.step()
    assert stage.journal.tasks.keys() == {"old.0"}
    assert stage.journal.tasks["old.0"].has_ended
    stage.close()


def test_a_task_that_comes_back_with_its_agent_is_ended() -> None:
    stage = SchedulerStage({"agent-0": 4.0})
    stage.submit("job", 1, lasts_s=1e6)
    stage.run(3.0)
    stage.update("job.0", "TASK_UNREACHABLE")
    stage.step()
    assert stage.journal.tasks["job.0"].has_ended
    assert not stage.scheduler.jobs
    stage.update("job.0", "TASK_RUNNING")
    stage.step()
    assert stage.master.killed == ["job.0"]
    assert not stage.journal.tasks["job.0"].has_ended
    stage.update("job.0", "TASK_KILLED")
    stage.step()
    assert stage.journal.tasks["job.0"].has_ended
    assert not stage.journal.strangers
    stage.close()


def test_all_that_runs_is_asked_for_after_a_subscription_until_all_have_answered() -> None:
    stage = SchedulerStage({"agent-0": 4.0})
    stage.scheduler.handle(events.Disconnected())
    for number in range(2):
        stage.scheduler.admit(
            f"job-{number}",
            "ada",
            number,
            lambda handle: _running(handle),
            tasks=[live(f"job-{number}.0", f"job-{number}")],
        )
    stage.scheduler.handle(events.Subscribed("F", ""))
    began_s = stage.master.now
    stage.update("job-0.0", "TASK_RUNNING")
    while not stage.master.reconciled:
        stage.step()
    assert stage.master.now - began_s >= RECONCILE_AFTER_S
    assert stage.master.reconciled == [{"job-1.0": "S0"}]
    stage.update("job-1.0", "TASK_RUNNING")
    stage.step()
    assert stage.master.reconciled[1:] == [{}]
    stage.step(IMPLICIT_DEADLINE_S)
    assert len(stage.master.reconciled) == 2
    stage.step(RECONCILE_INTERVAL_S)
    assert stage.master.reconciled[2:] == [{"job-0.0": "S0", "job-1.0": "S0"}, {}]
    stage.close()


def _running(handle: JobEntry) -> Any:
    job = FakeJob(handle, 1, 1.0)
    job.need = Need.NOTHING
    return job


def test_without_tasks_the_rest_is_asked_for_once_the_master_knows_its_agents() -> None:
    stage = SchedulerStage({"agent-0": 4.0})
    stage.step(RECONCILE_AFTER_S - 1.0)
    assert not stage.master.reconciled
    stage.step(1.0)
    assert stage.master.reconciled == [{}]
    stage.close()


def test_offers_are_suppressed_when_idle_and_revived_at_most_once_a_second() -> None:
    stage = SchedulerStage({"agent-0": 4.0})
    stage.run(2.0)
    assert stage.master.calls == ["suppress"]
    for number in range(20):
        stage.submit(f"job-{number}", 1, 8.0)
        stage.step(0.1)
    assert 1 <= stage.master.calls.count("revive") <= 3
    revived = stage.master.calls.count("revive")
    stage.run(20.0)
    assert stage.master.calls.count("revive") == revived + 1, "those that came within the second share one"
    stage.scheduler.cancel()
    stage.run(1.0)
    assert stage.master.calls[-1] == "suppress"
    assert stage.scheduler.done
    stage.close()


def test_a_master_that_makes_no_offers_is_told_again() -> None:
    stage = SchedulerStage({"agent-0": 1.0}, others={"agent-0": 1.0})
    stage.submit("job")
    stage.run(REVIVE_WHEN_SILENT_S * 2.5)
    assert 2 <= stage.master.calls.count("revive") <= 4
    stage.close()


def test_what_the_master_did_not_take_back_is_declined_again(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = SchedulerStage({"agent-0": 1.0})
    stage.submit("job", 1, 8.0)

    def away(*_: Any) -> None:
        raise MasterUnavailableError("gone")

    with monkeypatch.context() as broken:
        broken.setattr(stage.master, "declineOffer", away)
        stage.run(GANG_KEEP_S + 2)
    assert not stage.master.declined
    stage.step()
    assert len(stage.master.declined) == 1
    assert stage.master.refused_for_s[0] > 0
    stage.close()


def test_a_rescinded_offer_is_taken_from_whoever_looks_at_it() -> None:
    stage = SchedulerStage({"agent-0": 4.0})
    slow = stage.submit("slow")
    slow.keeps_offers = True
    stage.run(2.0)
    (offer_id,) = slow.job_handle.offers.locked
    stage.scheduler.handle(events.OfferRescinded(offer_id))
    assert not slow.job_handle.offers.locked
    assert len(stage.scheduler.pool) == 0
    slow.keeps_offers = False
    stage.run(4.0)
    assert not stage.master.accepted
    stage.close()


def test_a_job_that_plans_is_asked_again_with_the_offers_that_are_left() -> None:
    stage = SchedulerStage({"agent-0": 4.0, "agent-1": 4.0})
    slow = stage.submit("slow")
    slow.keeps_offers = True
    stage.run(2.0)
    first, second = slow.job_handle.offers.locked
    stage.scheduler.handle(events.OfferRescinded(first))
    del stage.master.offered[first]
    slow.keeps_offers = False
    stage.scheduler.tick()
    assert [task.agent_id for task in slow.job_handle.tasks.values()] == ["S1"]
    assert second not in stage.scheduler.pool
    stage.close()


def test_what_the_master_was_not_asked_for_any_more_is_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stage = SchedulerStage({"agent-0": 1.0, "agent-1": 1.0})
    pair = stage.submit("pair", 2, kind=Unlucky)
    one_launch_fails(stage, monkeypatch)
    while not pair.job_handle.tasks:
        stage.step()
    assert stage.journal.tasks.keys() == {"pair.0", "pair.1"}, "all of it is written down before the first call"
    assert not stage.master.launches
    stage.step()
    assert set(stage.master.killed) == {"pair.0", "pair.1"}
    for task_id in ("pair.0", "pair.1"):
        stage.update(task_id, "TASK_GONE")
    stage.submit("next", lasts_s=1e6)
    stage.run(3.0)
    assert stage.master.launches == ["next.0"]
    stage.close()


def test_a_job_sees_only_agents_that_its_constraints_admit() -> None:
    stage = SchedulerStage({"agent-0": 4.0, "agent-1": 4.0})
    stage.master.attributes["agent-1"]["rack"] = "r2"
    stage.submit("job", 1, constraints=["rack:IN:r2,r3"])
    stage.submit("nowhere", 1, constraints=["rack:IS:r9"])
    stage.run(5.0)
    assert {info["agent_id"]["value"] for info in stage.master.accepted} == {"S1"}
    assert stage.jobs["nowhere"].looks == 0
    with pytest.raises(BadInputError, match="not an operator"):
        stage.submit("malformed", constraints=["rack:IZ:r9"])
    assert stage.scheduler.job("malformed") is None
    stage.close()


def test_offers_of_several_agents_are_gathered_for_a_job_that_needs_them_at_once() -> None:
    """The agents become free one after the other, each later than the other's offer would have been given back."""
    stage = SchedulerStage({"agent-0": 4.0, "agent-1": 4.0}, others={"agent-1": 4.0})
    stage.submit("pair", 2, 4.0)
    stage.run(2.0)
    assert stage.scheduler.pool.offers, "it is held for a while"
    stage.master.others.clear()
    stage.run(GANG_KEEP_S)
    assert "pair" in stage.started_s
    stage.close()


def test_what_was_lost_is_logged_in_words_and_a_normal_end_is_not(caplog: pytest.LogCaptureFixture) -> None:
    stage = SchedulerStage({"agent-0": 4.0})
    # Of this logger only: other tests' threads may log something.
    with caplog.at_level(logging.INFO, "framework.scheduler.scheduler"):
        stage.scheduler.handle(events.ExecutorLost("S0", "one", 0))
        stage.scheduler.handle(events.ExecutorLost("S0", "two", 9))
        stage.scheduler.handle(events.AgentLost("S0"))
    assert caplog.messages == ["executor two on agent S0 has ended with wait status 9", "agent S0 is gone"]
    stage.close()


@pytest.mark.slow
def test_a_thousand_queued_jobs_are_planned_once_for_each_kind_and_supply(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = SchedulerStage({f"agent-{number}": 0.1 for number in range(5)})
    plans = 0
    search = planner.fastest

    def counted(*arguments: Any, **more: Any) -> Any:
        nonlocal plans
        plans += 1
        return search(*arguments, **more)

    monkeypatch.setattr(planner, "fastest", counted)

    def make(handle: JobEntry) -> TrainingJob:
        job_spec = spec(job_id=handle.job_id, max_workers=1 + handle.number % 4)
        handle.sizing = TrainingSizing(job_spec)
        return TrainingJob(job_spec, JobObserver(), lambda: None, lambda: stage.master.now)

    for number in range(1000):
        stage.scheduler.admit(f"job-{number}", f"user-{number % 3}", number, make)
    stage.run(20.0)
    assert len(stage.scheduler.jobs) == 1000
    assert not stage.failed
    planned = plans
    # Each plan takes up to two searches (with GPUs only, and of all workers).
    assert 0 < planned < 40
    stage.run(40.0)
    assert plans - planned <= 12, "offers that were too little are still too little"
    stage.close()
