"""What clients ask of a service's database, on SQLite and PostgreSQL."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from dike.exceptions import BadInputError
from framework.scheduler.records import JobKind, JobRecord, JobState, OutputChunk, ProgressPoint, TaskRecord
from framework.search.records import TrialRecord, TrialState, best_trial
from framework.search.store import Store
from framework.service import queries
from framework.service.metrics import ServiceMetrics
from framework.service.store import ServiceStore
from tests.search.postgresql_server import postgresql_server
from tests.search.stored_search import SPEC


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with postgresql_server() as running:
        yield running.url


@pytest.fixture(scope="module", params=["sqlite", pytest.param("postgresql", marks=pytest.mark.integration)])
def store(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServiceStore]:
    sqlite = f"sqlite:///{tmp_path_factory.mktemp('database')}/service.db"
    url = sqlite if request.param == "sqlite" else request.getfixturevalue("server")
    with contextlib.closing(ServiceStore(url)) as opened:
        yield opened


def add(store: ServiceStore, name: str, **changes: object) -> str:
    record = JobRecord(name, JobKind.TRAINING, "ann", "train.py", {"kind": "training"}, bundle_token=f"token-{name}")
    store.add_job(dataclasses.replace(record, **changes), b"archive")  # type: ignore[arg-type]
    return name


def test_many_may_submit_at_once(store: ServiceStore) -> None:
    names = [f"many-{number}" for number in range(20)]
    with ThreadPoolExecutor(8) as pool:
        assert sorted(pool.map(lambda name: add(store, name), names)) == sorted(names)
    with pytest.raises(BadInputError, match="There is a job 'many-0' already"):
        add(store, "many-0")
    with store.database.reading() as connection:
        assert sorted(queries.newest_ids(connection, 20)) == sorted(names)
        assert len(queries.newest_ids(connection, 5)) == 5
        assert queries.state_of(connection, "many-3") is JobState.QUEUED
        assert queries.state_of(connection, "none") is None


def test_a_brief_list_leaves_out_what_is_long(store: ServiceStore) -> None:
    add(store, "long", constraints=("rack:IN:a",), result={"steps": 1}, state_data={"plan": []})
    [brief] = store.jobs(limit=1, brief=True)
    full = store.job("long")
    assert full is not None
    assert brief == dataclasses.replace(full, request={}, result=None, state_data=None)


def test_tasks_are_counted_and_the_last_progress_is_found(store: ServiceStore) -> None:
    busy, idle = add(store, "busy"), add(store, "idle")
    tasks = [
        TaskRecord(f"T-{index}", busy, "S-1", "node", "127.0.0.1", "worker:0", "running", executor_id="E")
        for index in range(3)
    ]
    ended = dataclasses.replace(tasks[0], state="failed", ended_s=1e9)
    store.save([ended, *tasks[1:]], {})
    store.history.add_progress(busy, [ProgressPoint(step, 1e9, 1 / step, None) for step in range(1, 101)])
    with store.database.reading() as connection:
        assert queries.live_tasks(connection, [busy, idle]) == {busy: 2}
        assert queries.last_progress(connection, [busy, idle]) == {busy: ProgressPoint(100, 1e9, 0.01, None)}
        assert queries.live_tasks(connection, []) == queries.last_progress(connection, []) == {}
        assert queries.task_counts(connection) == {"failed": 1, "running": 2}
        assert queries.job_counts(connection)[JobKind.TRAINING, JobState.QUEUED] >= 2
        steps = [point.step for point in queries.thinned_progress(connection, busy, -1, 7)]
        assert steps == [10, 25, 40, 55, 70, 85, 100]
        assert [point.step for point in queries.thinned_progress(connection, busy, 98, 7)] == [99, 100]
        assert queries.thinned_progress(connection, idle, -1, 7) == []


def test_output_is_found_by_task_and_number(store: ServiceStore) -> None:
    job_id = add(store, "talkative")
    store.history.add_output(
        job_id, [("worker:0", "stdout", "a"), ("ps:0", "stderr", "b"), ("worker:0", "stdout", "c")]
    )
    with store.database.reading() as connection:
        chunks = queries.output(connection, job_id, after=0, task=None, limit=10)
        assert [chunk.text for chunk in chunks] == ["a", "b", "c"]
        later = queries.output(connection, job_id, after=chunks[0].number, task="worker:0", limit=10)
        assert later == [OutputChunk(chunks[2].number, "worker:0", "stdout", "c")]
        assert queries.output(connection, job_id, after=0, task=None, limit=2) == chunks[:2]


def test_trials_are_counted_by_state(store: ServiceStore) -> None:
    name = add(store, "digits", kind=JobKind.SEARCH)
    search = Store(store.database.url, engine=store.database.engine)
    assert not search.has_search(name)
    with store.database.reading() as connection:
        assert queries.trial_states(connection, [name]) == {}
    for one in (name, "of-nobody-here"):
        search.create_search(dataclasses.replace(SPEC, name=one))
        for number, state in enumerate((TrialState.FINISHED, TrialState.FINISHED, TrialState.RUNNING)):
            search.save_trial(TrialRecord(number, {}, state))
    with store.database.reading() as connection:
        assert search.has_search(name)
        counts = {TrialState.FINISHED: 2, TrialState.RUNNING: 1}
        assert queries.trial_states(connection, [name]) == {name: counts}
        assert queries.best_values(connection, {name: "min"}) == {}
        # Searches of `dike tune` in the same database are not the service's.
        assert queries.trial_counts(connection) == counts
    task = TaskRecord("T-digits", name, "S-1", "node", "127.0.0.1", "slot-0", "running", executor_id="E")
    store.save([task], {})
    running = len([task for task in store.tasks(live_only=True) if task.state == "running"])
    text = ServiceMetrics(store).text().decode()
    store.save([dataclasses.replace(task, state="finished", ended_s=1e9)], {})
    search.open_search(name)
    values = ((TrialState.FINISHED, 0.5), (TrialState.RUNNING, math.nan), (TrialState.FAILED, 9.0))
    for number, (state, value) in enumerate((*values, (TrialState.SUSPENDED, 2.0), (TrialState.WAITING, math.inf))):
        search.save_trial(TrialRecord(number, {}, state, value=value))
    with store.database.reading() as connection:
        assert queries.best_values(connection, {name: "min"}) == {name: 0.5}
        assert queries.best_values(connection, {name: "max"}) == {name: 0.5}
        assert queries.search_modes(connection, [name, "none"]) == {name: "min"}
    trials = search.load_trials()
    for mode in ("min", "max"):
        assert best_trial(trials, mode) is trials[0], "the rule of all tables"
    search.save_trial(TrialRecord(0, {}, TrialState.RUNNING, value=0.5))
    with store.database.reading() as connection:
        assert queries.best_values(connection, {name: "max"}) == {name: 2.0}
    assert 'dike_trials{state="finished"} 2.0' in text
    assert 'dike_jobs{kind="search",state="queued"} 1.0' in text
    assert f'dike_tasks{{state="running"}} {running}.0' in text


def test_what_is_open_is_counted_by_user_and_by_state(store: ServiceStore) -> None:
    with store.database.reading() as connection:
        before_bytes = queries.bundle_bytes(connection)
    add(store, "of-eve", user="eve", submitted_s=1.0)
    add(store, "of-eve-too", user="eve", state=JobState.RUNNING, submitted_s=0.5)
    # It waits again, and has run before.
    add(store, "of-eve-again", user="eve", submitted_s=0.25, started_s=0.5)
    add(store, "ended", user="zoe", state=JobState.KILLED, ended_s=9.0)
    search = add(store, "slots", user="eve", kind=JobKind.SEARCH, state=JobState.RUNNING)
    names = (("a", "running", None), ("b", "running", None), ("c", "unreachable", None), ("d", "failed", 9.0))
    slots = [
        TaskRecord(name, search, "S-1", "node", "127.0.0.1", f"slot {name}", state, ended_s=ended_s, executor_id="E")
        for name, state, ended_s in names
    ]
    store.save(slots, {})
    with store.database.reading() as connection:
        counts = queries.open_job_counts(connection)
        assert {key: count for key, count in counts.items() if key[0] in ("eve", "zoe")} == {
            ("eve", JobState.QUEUED): 2,
            ("eve", JobState.RUNNING): 2,
        }
        assert queries.slot_counts(connection) == {"running": 2, "unreachable": 1}
        assert queries.oldest_queued_s(connection) == pytest.approx(min(job.submitted_s for job in queued(store)))
        assert queries.bundle_bytes(connection) == before_bytes + 5 * len(b"archive")
    text = ServiceMetrics(store).text().decode()
    metrics = {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in text.splitlines() if line[0] != "#"}
    assert metrics['dike_slots{state="running"}'] == 2
    assert metrics['dike_slots{state="staging"}'] == 0
    assert metrics['dike_slots{state="unreachable"}'] == 1
    assert metrics["dike_bundle_bytes"] == before_bytes + 5 * len(b"archive")
    assert metrics["dike_database_bytes"] == store.database.size_bytes() > metrics["dike_bundle_bytes"]
    assert metrics["dike_oldest_queued_seconds"] > 1e9
    assert "eve" not in text
    by_user = ServiceMetrics(store).text(by_user=True).decode()
    assert 'dike_open_jobs{state="queued",user="eve"} 2.0' in by_user
    assert "zoe" not in by_user


def queued(store: ServiceStore) -> list[JobRecord]:
    return [job for job in store.jobs(states=[JobState.QUEUED]) if job.started_s is None]


def test_nobody_waits_in_an_empty_database(tmp_path: Path) -> None:
    with contextlib.closing(ServiceStore(f"sqlite:///{tmp_path}/service.db")) as store:
        text = ServiceMetrics(store).text(by_user=True).decode()
    assert "\ndike_oldest_queued_seconds 0.0\n" in text
    assert "\ndike_bundle_bytes 0.0\n" in text


def test_folders_that_users_have_named_for_open_jobs_are_found(store: ServiceStore) -> None:
    add(store, "named-1", request={"kind": "training", "checkpoint_dir": "/shared/1"})
    add(store, "named-2", kind=JobKind.SEARCH, request={"kind": "search", "spec": {"checkpoint_dir": "/shared/2"}})
    add(store, "unnamed", request={"kind": "search", "spec": {"checkpoint_dir": ""}})
    add(store, "over", request={"checkpoint_dir": "/shared/3"}, state=JobState.FINISHED)
    with store.database.reading() as connection:
        assert sorted(queries.named_folders(connection)) == ["/shared/1", "/shared/2"]
