"""The search of a job that is forgotten goes with it, Optuna's study included, and no other does."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import text, update

from framework.scheduler.journal import StorageUnavailableError
from framework.scheduler.records import JobKind, JobRecord, JobState
from framework.search.optuna_study import Study
from framework.search.records import Parameter, SearchSpec
from framework.search.store import SearchSummary, Store
from framework.search.tables import SEARCHES
from framework.service import retention
from framework.service.requests import is_own_search, search_request
from framework.service.retention import remove_old_searches, removing_old_jobs
from framework.service.store import ServiceStore
from tests.search.stored_search import FULL, SPEC
from tests.waiting import wait_until

NOW_S = time.time()
DAY_S = 24 * 3600.0
TABLES = (
    "dike_searches",
    "dike_trials",
    "dike_losses",
    "studies",
    "trials",
    "trial_params",
    "trial_intermediate_values",
)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[ServiceStore]:
    with contextlib.closing(ServiceStore(f"sqlite:///{tmp_path}/service.db")) as opened:
        yield opened


def spec(name: str) -> SearchSpec:
    space = (Parameter("lr", (0.1, 0.2)), Parameter("units", low=2, high=64, is_integer=True, log=True))
    return dataclasses.replace(SPEC, name=name, script="train.py", sampler="random", space=space)


def add_job(store: ServiceStore, name: str, ended_s: float) -> None:
    request = search_request(spec(name), "train.py", ()).model_dump()
    record = JobRecord(
        name, JobKind.SEARCH, "ann", "train.py", request, submitted_s=ended_s - 10, state=JobState.FINISHED
    )
    store.add_job(dataclasses.replace(record, ended_s=ended_s, bundle_token=name, state_data={}), b"bundle")


def add_search(store: ServiceStore, name: str, heartbeat_s: float) -> Store:
    """A search with a trial that has reported something, left alone since a time."""
    searches = Store(store.database.url, engine=store.database.engine)
    searches.create_search(spec(name))
    study = Study.create(store.database.url, spec(name))
    study.ask()
    study.report(0, 1, 0.5)
    study.close()
    report = {"type": "progress", "step": 1, "train_s": 1.0, "loss": 1.0, "low": 1.0, "high": 1.0, "count": 1}
    searches.save_progress(FULL, [(0, report)])
    with store.database.engine.begin() as connection:
        connection.execute(update(SEARCHES).where(SEARCHES.c.name == name).values(heartbeat_s=heartbeat_s))
    return searches


def rows(store: ServiceStore) -> dict[str, int]:
    with store.database.reading() as connection:
        return {name: connection.execute(text(f"SELECT count(*) FROM {name}")).scalar_one() for name in TABLES}


@pytest.mark.slow
def test_an_old_search_goes_with_its_job_and_its_name_is_free(store: ServiceStore) -> None:
    add_job(store, "kept", NOW_S - DAY_S)
    add_search(store, "kept", NOW_S - DAY_S)
    before = rows(store)
    assert all(before.values())
    add_job(store, "old", NOW_S - 10 * DAY_S)
    add_search(store, "old", NOW_S - 10 * DAY_S)
    with removing_old_jobs(store, keep_s=7 * DAY_S):
        wait_until(lambda: store.job("old") is None, "the end of the old job's records")
    assert [job.id for job in store.jobs()] == ["kept"]
    assert rows(store) == before
    add_job(store, "old", NOW_S)
    add_search(store, "old", NOW_S)


def test_a_search_that_somebody_has_gone_on_with_is_kept_with_its_job(store: ServiceStore) -> None:
    add_job(store, "used", NOW_S - 10 * DAY_S)
    add_search(store, "used", NOW_S - DAY_S)
    add_job(store, "running", NOW_S - 10 * DAY_S)
    running = add_search(store, "running", NOW_S - 10 * DAY_S)
    before = rows(store)
    with running.lock("running"):
        gone = remove_old_searches(store, NOW_S - 7 * DAY_S)
        assert gone == []
        # Held by somebody who has just begun.
        assert remove_old_searches(store, NOW_S + DAY_S) == ["used"]
    assert store.delete_jobs(NOW_S - 7 * DAY_S, gone) == 0
    assert rows(store)["studies"] == before["studies"] - 1


def test_a_search_that_its_service_goes_on_with_at_that_moment_is_kept(
    store: ServiceStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_job(store, "old", NOW_S - 10 * DAY_S)
    add_search(store, "old", NOW_S - 10 * DAY_S)
    before = rows(store)

    def then_reopened(record: JobRecord, search: SearchSummary) -> bool:
        return is_own_search(record, search) and store.reopen_job(record.id, "it goes on")

    with monkeypatch.context() as patch:
        patch.setattr(retention, "is_own_search", then_reopened)
        assert remove_old_searches(store, NOW_S - DAY_S) == []
    assert rows(store) == before


@pytest.mark.slow
def test_what_was_removed_halfway_is_removed_the_next_time(
    store: ServiceStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_job(store, "old", NOW_S - 10 * DAY_S)
    add_search(store, "old", NOW_S - 10 * DAY_S)

    def fail(searches: Store) -> None:
        raise StorageUnavailableError("no space left")

    with monkeypatch.context() as patch:
        patch.setattr(Store, "delete_search", fail)
        with pytest.raises(StorageUnavailableError, match="no space left"):
            remove_old_searches(store, NOW_S + DAY_S)
    assert remove_old_searches(store, NOW_S + DAY_S) == ["old"]
    assert not any(rows(store).values())


def test_a_study_that_is_not_ours_is_kept(store: ServiceStore) -> None:
    import optuna

    optuna.create_study(storage=store.database.url, study_name="theirs")
    add_job(store, "theirs", NOW_S - 10 * DAY_S)
    Store(store.database.url, engine=store.database.engine).create_search(spec("theirs"))
    assert remove_old_searches(store, NOW_S) == ["theirs"]
    assert [summary.study_name for summary in optuna.get_all_study_summaries(store.database.url)] == ["theirs"]
