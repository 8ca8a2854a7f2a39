"""What the recorder writes into the database."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from executor.messages import LogChunk
from framework.scheduler.records import JobKind, JobRecord
from framework.service.recorder import JobRecorder, TrainingRecorder
from framework.service.store import ServiceStore
from framework.training.spec import JobTask
from solver import PlannedTask
from tests.training.job_stage import spec

JOB = JobRecord("job", JobKind.TRAINING, "ann", "train.py", {}, waiting="no room", bundle_token="t" * 32)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[ServiceStore]:
    with contextlib.closing(ServiceStore(f"sqlite:///{tmp_path}/service.db")) as opened:
        opened.add_job(JOB, b"")
        yield opened


def task(role: str, index: int, step: int) -> JobTask:
    planned = PlannedTask(role, index, "agent-0", cpus=1.0, mem_mb=512, disk_mb=0, gpus=0)
    return JobTask(f"job.{role}-{index}.0", planned, "S0", "agent-0", "127.0.0.1", 2222, step=step, loss=1.0)


def test_progress_is_the_chiefs(store: ServiceStore) -> None:
    recorder = JobRecorder(store, "job")
    observer = TrainingRecorder(recorder, spec().is_chief)
    for step in (100, 101):
        observer.progress(task("worker", 0, step))
    # Another worker is behind; what the chief has reported stays.
    observer.progress(task("worker", 1, 50))
    recorder.write()
    assert [point.step for point in store.history.progress("job")] == [100, 101]


def test_a_job_that_was_left_waiting_and_runs_does_not_wait(store: ServiceStore) -> None:
    recorder = JobRecorder(store, "job", JOB.waiting)
    TrainingRecorder(recorder, spec().is_chief).launched([task("worker", 0, 0)])
    recorder.write()
    found = store.job("job")
    assert found is not None
    assert found.waiting == ""


def test_a_job_that_waits_for_long_is_not_an_event_a_second(store: ServiceStore) -> None:
    recorder = JobRecorder(store, "job")
    observer = TrainingRecorder(recorder, spec().is_chief)
    for cpus in range(100):
        observer.waiting(f"too few CPUs; on offer: {cpus}")
    recorder.write()
    assert [event.text for event in store.history.events("job")] == ["too few CPUs; on offer: 0"]
    found = store.job("job")
    assert found is not None
    assert found.waiting == "too few CPUs; on offer: 99"


def test_a_service_that_is_killed_anywhere_leaves_each_character_to_one_of_two(store: ServiceStore) -> None:
    written = "a\né€\U0001f600 z".encode()
    writes = task("worker", 0, 0)
    for moment in range(len(written) + 1):
        writes.task_id = f"job.worker-0.{moment}"
        for end in (moment, len(written)):
            recorder = JobRecorder(store, "job")
            observer = TrainingRecorder(recorder, spec().is_chief)
            kept = store.history.received("job").get(writes.task_id, {}).get("stdout", 0)
            for offset in range(kept, end):
                observer.log(writes, LogChunk(writes.task_id, "stdout", offset, written[offset : offset + 1]))
            recorder.write()
    assert "".join(chunk.text for chunk in store.history.output("job")) == written.decode() * (len(written) + 1)
    assert {size for streams in store.history.received("job").values() for size in streams.values()} == {len(written)}
