"""A task's end and output are reported by its agent; the master's report is used only after a delay."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest

from executor.messages import LogChunk
from framework.mesos import events
from framework.scheduler.job import JobEntry
from framework.scheduler.offer_pool import SETTLE_S
from framework.scheduler.task_tracker import WITHHOLD_TIMEOUT_S
from framework.training.controller import TrainingJob
from tests.scheduler.scheduler_stage import FakeJob, SchedulerStage
from tests.training.job_stage import FakeObserver, ended, spec

ANSWER = {"source": "SOURCE_MASTER", "reason": "REASON_RECONCILIATION"}
UPDATE = {"source": "SOURCE_EXECUTOR", "uuid": "u"}


@pytest.fixture
def stage() -> Iterator[SchedulerStage]:
    with contextlib.closing(SchedulerStage({"agent-0": 4.0})) as made:
        yield made


@pytest.fixture
def running(stage: SchedulerStage) -> FakeJob:
    job = stage.submit("job", lasts_s=1e6)
    stage.run(3.0)
    job.seen.clear()
    return job


def told(job: FakeJob) -> list[dict[str, Any]]:
    """The status updates that a job has heard of, without its task and agent."""
    names = ("state", "source", "reason")
    updates = [event.status for event in job.seen if isinstance(event, events.StatusUpdate)]
    return [{name: status[name] for name in names if name in status} for status in updates]


def test_the_end_of_the_output_is_not_lost_to_an_answer_of_the_master() -> None:
    observer = FakeObserver()
    with contextlib.closing(SchedulerStage({"agent-0": 4.0})) as stage:

        def make(handle: JobEntry) -> TrainingJob:
            return TrainingJob(spec(max_workers=1), observer, lambda: None, lambda: stage.master.now)

        job = stage.scheduler.admit("job", "ada", 0, make).job
        assert isinstance(job, TrainingJob)
        stage.run(SETTLE_S + 2.0)
        chief = next(task for task in job.tasks if task.name == "worker:0")
        stage.scheduler.handle(events.Disconnected())
        stage.scheduler.handle(events.Subscribed("F", "127.0.0.1:5050"))
        stage.update(chief.task_id, "TASK_FINISHED", **ANSWER)
        last = ended(0, {"stdout": 4}).encode([LogChunk(chief.task_id, "stdout", 0, b"last")])
        stage.update(chief.task_id, "TASK_FINISHED", data=last, **UPDATE)
        stage.scheduler.tick()
        for task_id in stage.master.killed:
            stage.update(task_id, "TASK_KILLED")
        stage.scheduler.tick()
        assert (stage.scheduler.done, job.result.succeeded, observer.output) == (True, True, b"last")
        assert chief.outcome is not None


@pytest.mark.parametrize("state", ["TASK_FINISHED", "TASK_FAILED", "TASK_KILLED"])
def test_an_agent_that_is_silent_is_not_waited_for_for_ever(
    stage: SchedulerStage, running: FakeJob, state: str
) -> None:
    stage.update("job.0", state, **ANSWER)
    stage.run(WITHHOLD_TIMEOUT_S - 1)
    # A second answer does not make it wait longer.
    stage.update("job.0", state, **ANSWER)
    assert told(running) == []
    stage.run(2.0)
    assert told(running) == [{"state": state, **ANSWER}]
    stage.run(WITHHOLD_TIMEOUT_S)
    assert len(told(running)) == 1
    assert stage.journal.tasks["job.0"].has_ended


def test_what_an_agent_sends_before_the_end_is_taken_in_and_the_end_still_believed(
    stage: SchedulerStage, running: FakeJob
) -> None:
    stage.update("job.0", "TASK_FINISHED", **ANSWER)
    stage.update("job.0", "TASK_RUNNING", **UPDATE)
    stage.run(WITHHOLD_TIMEOUT_S + 1)
    assert [status["state"] for status in told(running)] == ["TASK_RUNNING", "TASK_FINISHED"]


def test_only_time_in_which_the_agent_can_deliver_counts(stage: SchedulerStage, running: FakeJob) -> None:
    stage.update("job.0", "TASK_FINISHED", **ANSWER)
    stage.scheduler.handle(events.Disconnected())
    stage.run(2 * WITHHOLD_TIMEOUT_S)
    stage.scheduler.handle(events.Subscribed("F", "127.0.0.1:5050"))
    stage.run(WITHHOLD_TIMEOUT_S - 1)
    assert told(running) == []
    stage.run(2.0)
    assert told(running) == [{"state": "TASK_FINISHED", **ANSWER}]


def test_an_agent_that_is_gone_with_its_update_does_not_make_a_task_lost_that_has_finished(
    stage: SchedulerStage, running: FakeJob
) -> None:
    stage.update("job.0", "TASK_FINISHED", **ANSWER)
    stage.update("job.0", "TASK_LOST", source="SOURCE_MASTER", reason="REASON_AGENT_REMOVED")
    assert told(running) == [{"state": "TASK_FINISHED", **ANSWER}]


@pytest.mark.parametrize("state", ["TASK_LOST", "TASK_UNREACHABLE", "TASK_GONE", "TASK_UNKNOWN"])
def test_that_a_task_is_lost_only_the_master_can_say(stage: SchedulerStage, running: FakeJob, state: str) -> None:
    stage.update("job.0", state, **ANSWER)
    assert told(running) == [{"state": state, **ANSWER}]
