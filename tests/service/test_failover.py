"""A service that is killed at any moment is taken up again: real Mesos, real processes, a real database."""

from __future__ import annotations

import os
import queue
import signal
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from framework.scheduler.records import JobState
from framework.service.submission import Submissions
from tests.service.dying_service import AFTER_ACCEPT, BEFORE_ACCEPT, BEFORE_LAST_ACKNOWLEDGEMENT, NEVER
from tests.service.failover_stage import ROOT, FailoverStage, staged
from tests.waiting import DEADLINE_S

pytestmark = [pytest.mark.mesos]


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[FailoverStage]:
    with staged(tmp_path) as made:
        yield made


@pytest.fixture
def fake_python(tmp_path: Path) -> Path:
    """What runs on the agents in place of Python: an executor whose tasks run until they are killed."""
    python = tmp_path / "python"
    executor = ROOT / "benchmarks" / "load" / "quick_executor.py"
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" -I -S "{executor}" forever\n')
    python.chmod(0o755)
    return python


def test_nothing_is_launched_twice_by_services_that_die_around_the_launch(
    stage: FailoverStage, fake_python: Path
) -> None:
    job = stage.submit([])
    stage.wait_for_death(stage.serve(BEFORE_ACCEPT, fake_python))
    framework_id = stage.store.framework_id()
    assert framework_id
    intended = stage.store.tasks(job_id=job.id)
    assert {task.state for task in intended} == {"intended"}
    assert stage.known_to_mesos() == []

    stage.wait_for_death(stage.serve(AFTER_ACCEPT, fake_python))
    launched = {task.task_id for task in stage.store.tasks(job_id=job.id, live_only=True)}
    assert len(launched) == 2
    assert not launched & {task.task_id for task in intended}

    stage.serve(NEVER, fake_python)
    stage.wait_until(lambda: len(stage.running(job.id)) == 2, "the tasks under another service")
    assert {task.task_id for task in stage.running(job.id)} == launched
    assert Counter(task["id"] for task in stage.known_to_mesos()) == Counter(launched)
    assert stage.store.framework_id() == framework_id
    stage.wait_until(lambda: stage.job(job.id).state is JobState.RUNNING, "the job's state")


@pytest.mark.tensorflow
def test_a_job_trains_on_under_services_that_are_killed(stage: FailoverStage) -> None:
    job = stage.submit([str(stage.folder)])
    # Its executors cannot fetch the script, because the service is down; that is no failure of the job.
    stage.wait_for_death(stage.serve(AFTER_ACCEPT))

    service = stage.serve()
    stage.wait_until(lambda: stage.last_step(job.id) > 5, "training")
    framework_id, tasks = stage.store.framework_id(), {task.task_id for task in stage.running(job.id)}
    service.kill()
    service.wait()
    step_at_death = stage.last_step(job.id)

    dying = stage.serve(BEFORE_LAST_ACKNOWLEDGEMENT)
    stage.wait_until(lambda: stage.last_step(job.id) > step_at_death + 5, "progress under another service")
    assert {task.task_id for task in stage.running(job.id)} == tasks
    (stage.folder / "enough").touch()
    stage.wait_for_death(dying)
    assert not stage.job(job.id).state.has_ended()

    stage.serve()
    stage.wait_until(lambda: stage.job(job.id).state.has_ended(), "the job's end")
    ended = stage.job(job.id)
    assert (ended.state, ended.failure) == (JobState.FINISHED, "")
    assert ended.result is not None
    assert (ended.result["succeeded"], ended.result["restarts"]) == (True, 0)
    assert ended.result["steps"] > step_at_death + 5
    stage.wait_until(lambda: not stage.store.tasks(live_only=True), "all ends written down")

    assert stage.store.framework_id() == framework_id
    counts = Counter(task["id"] for task in stage.known_to_mesos())
    assert set(counts.values()) == {1}
    assert set(counts) == {task.task_id for task in stage.store.tasks(job_id=job.id)}
    assert len((stage.folder / "started").read_text().split()) == 1, "the script was started more than once"
    points = stage.store.history.progress(job.id)
    losses = [point.loss for point in points if point.loss is not None]
    assert losses == sorted(losses, reverse=True), "training began anew"


def tear_down(stage: FailoverStage, framework_id: str | None) -> None:
    url, wanted = f"http://{stage.cluster.master}/teardown", {"frameworkId": framework_id}
    assert httpx.post(
        url, data=wanted, auth=stage.cluster.access.credentials, trust_env=False, timeout=DEADLINE_S
    ).is_success


def test_a_framework_that_was_torn_down_starts_its_jobs_again_under_another_id(
    stage: FailoverStage, fake_python: Path
) -> None:
    job = stage.submit([])
    service = stage.serve(NEVER, fake_python)
    stage.wait_until(lambda: len(stage.running(job.id)) == 2, "the tasks")
    before = {task.task_id for task in stage.running(job.id)}
    first_id = stage.store.framework_id()
    tear_down(stage, first_id)
    stage.wait_until(lambda: {task.task_id for task in stage.running(job.id)} - before, "tasks of a new framework")
    assert service.poll() is None
    assert stage.store.framework_id() not in (None, first_id)
    assert not before & {task.task_id for task in stage.store.tasks(live_only=True)}
    assert stage.job(job.id).state is not JobState.FAILED
    # Gone for longer than the failover timeout is the same to the next service.
    second_id = stage.store.framework_id()
    service.kill()
    service.wait()
    tear_down(stage, second_id)
    stage.serve(NEVER, fake_python)
    stage.wait_until(
        lambda: stage.store.framework_id() not in (None, first_id, second_id) and len(stage.running(job.id)) == 2,
        "tasks of a third framework",
    )
    unfinished = [task["id"] for task in stage.known_to_mesos() if task["state"] in ("TASK_RUNNING", "TASK_STAGING")]
    assert sorted(unfinished) == sorted(task.task_id for task in stage.store.tasks(live_only=True))


def test_a_job_that_was_killed_while_no_service_ran_ends_with_the_next_one(
    stage: FailoverStage, fake_python: Path
) -> None:
    job = stage.submit([])
    service = stage.serve(NEVER, fake_python)
    stage.wait_until(lambda: len(stage.running(job.id)) == 2, "the tasks")
    os.kill(service.pid, signal.SIGKILL)
    service.wait()
    Submissions(stage.store, queue.SimpleQueue()).kill(stage.job(job.id))
    never_started = stage.submit([])
    Submissions(stage.store, queue.SimpleQueue()).kill(stage.job(never_started.id))
    stage.serve(NEVER, fake_python)
    for one in (job, never_started):
        stage.wait_until(lambda one=one: stage.job(one.id).state is JobState.KILLED, "the job's end")
    assert not stage.store.tasks(live_only=True)
    assert not [task for task in stage.known_to_mesos() if task["state"] == "TASK_RUNNING"]
