"""A search that a service accepts: created in the service's database, ended there, reported to its users."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import queue
import re
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import optuna
import pytest
from sqlalchemy import make_url

from framework.mesos import events
from framework.project import bundle
from framework.scheduler import lease
from framework.scheduler.journal import StorageUnavailableError
from framework.scheduler.lease import Heartbeat, Lease
from framework.scheduler.records import JobRecord, JobState
from framework.search import trials
from framework.search.optuna_study import Study
from framework.search.records import SearchSpec
from framework.search.store import Store
from framework.service.job_factory import JobContext
from framework.service.requests import search_request
from framework.service.service import Service
from framework.service.store import ServiceStore
from framework.service.submission import Submissions
from tests.mesos.fake_mesos import FakeMesos
from tests.search.search_stage import search_spec
from tests.waiting import wait_until


class SearchServiceStage:
    """A service with a fake Mesos and a real database."""

    def __init__(self, folder: Path) -> None:
        self.url = f"sqlite:///{folder}/service.db"
        self.store = ServiceStore(self.url)
        self.mesos = FakeMesos()
        self.submissions = Submissions(self.store, queue.SimpleQueue())
        self.script = folder / "train.py"
        self.script.touch()
        around = JobContext(
            store=self.store,
            bundle_url="http://127.0.0.1:1/bundle/{}".format,
            python="python3",
            image=None,
            hand_out_gpus=False,
            checkpoint_root="/checkpoints/",
            agents=lambda constraints: lambda: None,
            demand=lambda framework_id: None,
        )
        self.service = Service(around, self.mesos)
        self.service.handle(events.Subscribed("F", "127.0.0.1:5050"))

    def submit(self, spec: SearchSpec) -> str:
        request = search_request(spec, self.script.name, ("json",))
        return self.submissions.submit(request, bundle.pack(self.script), "ann").id

    def take_in(self, job_id: str) -> JobRecord:
        self.service.handle(events.JobSubmitted(job_id))
        self.service.tick()
        return self.job(job_id)

    def job(self, job_id: str) -> JobRecord:
        record = self.store.job(job_id)
        assert record is not None
        return record

    def searches(self) -> dict[str, SearchSpec]:
        with contextlib.closing(Store(self.url)) as store:
            return {summary.spec.name: summary.spec for summary in store.searches()}


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[SearchServiceStage]:
    made = SearchServiceStage(tmp_path)
    yield made
    made.service.scheduler.cancel()
    made.service.tick()
    made.store.close()


def is_free(stage: SearchServiceStage) -> bool:
    """Whether the search is free for any process to run it."""
    with contextlib.closing(Store(stage.url)) as store:
        return not next(summary for summary in store.searches() if summary.spec.name == "s").is_running


def open_files(folder: Path) -> int:
    """How many files in the folder this process has open."""
    opened = []
    for name in os.listdir("/proc/self/fd"):
        # The heartbeat may have closed it meanwhile.
        with contextlib.suppress(FileNotFoundError):
            opened.append(os.readlink(f"/proc/self/fd/{name}"))
    return sum(name.startswith(str(folder)) for name in opened)


def stored_spec(stage: SearchServiceStage, spec: SearchSpec) -> SearchSpec:
    """As the service keeps it."""
    folder = stage.job(spec.name).folder_name
    assert re.fullmatch(rf"{spec.name}-\d{{8}}-\d{{6}}", folder)
    return dataclasses.replace(spec, script="train.py", checkpoint_dir=f"/checkpoints/{folder}")


def test_it_is_made_where_the_service_keeps_its_jobs(stage: SearchServiceStage, tmp_path: Path) -> None:
    spec = search_spec(tmp_path, trials=2, checkpoint_dir="")
    assert stage.take_in(stage.submit(spec)).state is JobState.QUEUED
    assert stage.searches() == {"s": stored_spec(stage, spec)}
    assert not is_free(stage)


def test_a_search_does_not_count_as_ended_because_the_machine_was_paused(
    stage: SearchServiceStage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = itertools.count()
    monkeypatch.setattr(trials, "time", SimpleNamespace(monotonic=lambda: 10.0 * next(looks)))
    assert stage.take_in(stage.submit(search_spec(tmp_path))).state is JobState.QUEUED


def test_one_that_is_killed_gives_its_lease_back_and_says_how_it_ended(
    stage: SearchServiceStage, tmp_path: Path
) -> None:
    job_id = stage.submit(search_spec(tmp_path, trials=2))
    stage.take_in(job_id)
    stage.submissions.kill(stage.job(job_id))
    stage.service.handle(events.KillRequested(job_id))
    stage.service.tick()
    record = stage.job(job_id)
    assert record.state is JobState.KILLED
    assert record.result is not None
    assert {trial["state"] for trial in record.result["trials"]} == {"waiting"}
    with contextlib.closing(Store(stage.url)) as store:
        assert [summary.failure for summary in store.searches()] == ["interrupted"]
    assert is_free(stage)


def test_the_name_of_another_search_is_refused(stage: SearchServiceStage, tmp_path: Path) -> None:
    with contextlib.closing(Store(stage.url)) as store:
        store.create_search(search_spec(tmp_path, trials=3))
    record = stage.take_in(stage.submit(search_spec(tmp_path, trials=2)))
    assert record.state is JobState.FAILED
    assert "There is a search 's' already" in record.failure


def test_a_search_that_a_killed_service_has_created_is_resumed(stage: SearchServiceStage, tmp_path: Path) -> None:
    spec = search_spec(tmp_path, trials=2, checkpoint_dir="")
    job_id = stage.submit(spec)
    with contextlib.closing(Store(stage.url)) as store:
        store.create_search(stored_spec(stage, spec))
    assert stage.take_in(job_id).state is JobState.QUEUED


@pytest.mark.slow
def test_many_that_wait_share_their_connections_and_a_heartbeat(
    stage: SearchServiceStage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease, "HEARTBEAT_S", 0.05)
    beats: list[int] = []
    renew = Heartbeat.renew

    def counted(heartbeat: Heartbeat, leases: Sequence[Lease]) -> bool:
        # Searches of other tests in this process may beat still.
        if heartbeat._engine.url == make_url(stage.url):
            beats.append(len(leases))
        return renew(heartbeat, leases)

    monkeypatch.setattr(Heartbeat, "renew", counted)

    def take_in(number: int) -> None:
        job_id = stage.submit(search_spec(tmp_path, trials=2, name=f"s{number}", checkpoint_dir=""))
        assert stage.take_in(job_id).state is JobState.QUEUED

    take_in(0)
    take_in(1)
    threads, files = threading.enumerate(), open_files(tmp_path)
    for number in range(2, 8):
        take_in(number)
    # What others have left behind may end meanwhile.
    assert set(threading.enumerate()) <= set(threads)
    # None for each of the six: that the heartbeat writes at the same time may have opened another connection to share.
    assert open_files(tmp_path) < files + 6
    wait_until(lambda: 8 in beats, "one beat for all")
    stage.submissions.kill(stage.job("s3"))
    stage.service.handle(events.KillRequested("s3"))
    stage.service.tick()
    # One that had begun may have counted it still.
    beats.clear()
    wait_until(lambda: 7 in beats, "a beat without it")
    beats.clear()
    wait_until(lambda: len(beats) > 1, "more beats")
    assert set(beats) == {7}


def test_what_the_database_refuses_one_job_ends_that_job_only(
    stage: SearchServiceStage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    away, refused = StorageUnavailableError("unable to open database file"), 2

    def refuse(*arguments: Any) -> Study:
        nonlocal refused
        if refused:
            refused -= 1
            raise away
        return open_study(*arguments)

    open_study = Study.open
    monkeypatch.setattr(Study, "open", refuse)
    record = stage.take_in(stage.submit(search_spec(tmp_path, trials=2)))
    assert (record.state, record.failure) == (JobState.FAILED, str(away))
    assert is_free(stage)
    refused = 1
    # It was away for a moment.
    assert stage.take_in(stage.submit(search_spec(tmp_path, trials=2, name="next"))).state is JobState.QUEUED
    refused = 2
    other = stage.submit(search_spec(tmp_path, trials=2, name="other"))

    def refuse_all(*arguments: Any, **more: Any) -> None:
        raise away

    with monkeypatch.context() as patched:
        patched.setattr(stage.store, "change_job", refuse_all)
        with pytest.raises(StorageUnavailableError):
            stage.take_in(other)
    assert stage.job(other).state is JobState.QUEUED


def test_an_error_of_one_search_is_noted_and_leaves_others_alone(stage: SearchServiceStage, tmp_path: Path) -> None:
    other = stage.submit(search_spec(tmp_path, trials=2, name="other"))
    stage.take_in(other)
    optuna.create_study(storage=stage.url, study_name="s").ask()
    record = stage.take_in(stage.submit(search_spec(tmp_path, trials=2)))
    assert record.state is JobState.FAILED
    assert "an Optuna study 's' that is not Dike's" in record.failure
    assert is_free(stage)
    assert stage.job(other).state is JobState.QUEUED
