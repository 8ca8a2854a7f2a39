"""Every state in which Mesos can end a task, and what jobs make of it; the master is a fake."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from framework.mesos import events
from framework.mesos.tasks import TaskState
from framework.scheduler.journal import Journal
from framework.scheduler.offer_pool import SETTLE_S
from framework.scheduler.scheduler import Scheduler
from framework.training.controller import TrainingJob
from tests.mesos.fake_mesos import FakeMesos
from tests.search.search_stage import SearchStage, search_spec
from tests.training.job_stage import FakeObserver, JobStage, ended, spec

LOST = ("LOST", "DROPPED", "GONE", "GONE_BY_OPERATOR", "UNREACHABLE", "UNKNOWN")
ENDED = (*LOST, "FAILED", "KILLED", "ERROR")


@pytest.mark.parametrize("name", LOST)
def test_what_cannot_be_counted_on_is_lost(name: str) -> None:
    assert TaskState.of(f"TASK_{name}") is TaskState.LOST
    assert TaskState.of(f"TASK_{name}").is_terminal()


@pytest.mark.parametrize("name", ENDED)
@pytest.mark.parametrize("task", ["ps:0", "worker:0"])
def test_a_training_job_starts_again(task: str, name: str) -> None:
    stage = JobStage(spec())
    first = stage.start(2)
    stage.step(first["worker:0"], 5)
    stage.update(first[task], f"TASK_{name}", source="SOURCE_MASTER", reason="REASON_AGENT_REMOVED")
    others = {one.task_id for one in first.values()} - {first[task].task_id}
    assert set(stage.mesos.killed) == others
    stage.end_killed()
    second = stage.start(2)
    assert set(second) == set(first)
    assert not {one.task_id for one in second.values()} & {one.task_id for one in first.values()}
    assert stage.job.result.restarts == 1
    # What was given up and comes back is not wanted any more.
    stage.update(first[task], "TASK_RUNNING", source="SOURCE_MASTER", reason="REASON_AGENT_REREGISTERED")
    assert stage.mesos.killed.count(first[task].task_id) == 1
    assert [one.state for one in stage.job.tasks] == [TaskState.RUNNING] * len(second)


def test_a_launch_on_void_offers_is_no_failure() -> None:
    stage = JobStage(spec())
    stage.offer(stage.mesos.offer(0), stage.mesos.offer(1))
    stage.wait(SETTLE_S + 0.1)
    first = list(stage.job.tasks)
    for task in first:
        stage.update(task, "TASK_DROPPED", source="SOURCE_MASTER", reason="REASON_INVALID_OFFERS")
    stage.wait(0.1)
    stage.start(2)
    assert stage.job.result.restarts == 0


def test_a_chief_that_finds_its_folder_taken_over_is_not_started_again() -> None:
    stage = JobStage(spec())
    tasks = stage.start(2)
    stage.step(tasks["worker:0"], 5)
    stage.update(tasks["worker:0"], "TASK_FAILED", ended(76))
    stage.end_killed()
    assert stage.job.done
    assert "another job uses its checkpoint folder /checkpoints" in stage.job.result.failure


@pytest.mark.slow
@pytest.mark.parametrize("name", ENDED)
def test_a_search_takes_another_slot(tmp_path: Path, name: str) -> None:
    stage = SearchStage(search_spec(tmp_path, trials=1), f"sqlite:///{tmp_path / 'search.db'}")
    lost = stage.offer()[0]
    key = lost.train()
    lost.say(checkpoint="/checkpoints/0/run-0-step-3", checkpoint_step=3)
    lost.update(f"TASK_{name}", source="SOURCE_MASTER", reason="REASON_AGENT_REMOVED")
    (slot,) = stage.offer(first=1)
    assert slot.slot.task_id != lost.slot.task_id
    assert slot.train() == (key[0], key[1] + 1)
    assert slot.wanted.run is not None
    assert slot.wanted.run.trial.resume_from == "/checkpoints/0/run-0-step-3"
    stage.mesos.killed.clear()
    lost.update("TASK_RUNNING", source="SOURCE_MASTER", reason="REASON_AGENT_REREGISTERED")
    assert stage.mesos.killed == [lost.slot.task_id]


class SchedulerStage:
    """A scheduler with one training job."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.mesos = FakeMesos()
        self.scheduler = Scheduler(
            self.mesos,
            journal=Journal(),
            log=lambda text: None,
            ended=lambda handle: None,
            failed=lambda handle, error: pytest.fail(str(error)),
            clock=lambda: self.now,
        )
        self.scheduler.handle(events.Subscribed("F", "127.0.0.1:5050"))
        self.scheduler.admit(
            "job", "user", 1, lambda handle: TrainingJob(spec(), FakeObserver(), lambda: None, lambda: self.now)
        )

    def update(self, task_id: str, state: str, **more: Any) -> None:
        status = {"task_id": {"value": task_id}, "agent_id": {"value": "S0"}, "state": state, **more}
        self.scheduler.handle(events.StatusUpdate(status))
        self.scheduler.tick()


@pytest.mark.parametrize("name", LOST)
def test_the_hub_ends_a_task_that_was_given_up_and_comes_back(name: str) -> None:
    stage = SchedulerStage()
    stage.scheduler.handle(events.OffersArrived((stage.mesos.offer(0), stage.mesos.offer(1))))
    stage.now += SETTLE_S + 0.1
    stage.scheduler.tick()
    handle = stage.scheduler.job("job")
    assert handle is not None
    given_up, *others = list(handle.tasks)
    stage.update(given_up, f"TASK_{name}", reason="REASON_AGENT_REMOVED")
    assert given_up not in handle.tasks
    assert stage.mesos.killed == others
    # Before and after the others have ended.
    stage.update(given_up, "TASK_RUNNING", uuid="u1")
    assert stage.mesos.killed == [*others, given_up]
    for task_id in others:
        stage.update(task_id, "TASK_KILLED")
    stage.update(given_up, "TASK_RUNNING", uuid="u2")
    assert [status["uuid"] for status in stage.mesos.acknowledged if "uuid" in status] == ["u1", "u2"]
    # A call may get lost.
    stage.now += 60.0
    stage.scheduler.tick()
    assert stage.mesos.killed.count(given_up) == 2
    stage.update(given_up, "TASK_KILLED", uuid="u3")
    stage.now += 60.0
    stage.scheduler.tick()
    assert stage.mesos.killed.count(given_up) == 2
