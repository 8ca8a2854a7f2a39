"""The search of a job that is forgotten goes with it, Optuna's study and its checkpoints included; no other does."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from sqlalchemy import text, update

from framework.scheduler.journal import StorageUnavailableError
from framework.scheduler.records import JobKind, JobRecord, JobState, dated_folder
from framework.search.optuna_study import Study
from framework.search.records import Parameter, SearchSpec, TrialRecord, TrialState
from framework.search.store import SearchSummary, Store, write_spec
from framework.search.tables import SEARCHES
from framework.service import retention
from framework.service.requests import is_own_search, search_request
from framework.service.retention import Checkpoints, RetentionPolicy, remove_old_searches, removing_old_jobs
from framework.service.store import ServiceStore
from solver.units import format_bytes
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
    request = search_request(spec(name), "train.py", ()).to_json()
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
    with removing_old_jobs(store, RetentionPolicy(7 * DAY_S)):
        wait_until(lambda: store.job("old") is None, "the end of the old job's records")
    assert [job.id for job in store.jobs()] == ["kept"]
    assert rows(store) == before
    add_job(store, "old", NOW_S)
    add_search(store, "old", NOW_S)


def test_a_resumed_search_is_kept_with_its_job(store: ServiceStore) -> None:
    add_job(store, "used", NOW_S - 10 * DAY_S)
    add_search(store, "used", NOW_S - DAY_S)
    add_job(store, "running", NOW_S - 10 * DAY_S)
    running = add_search(store, "running", NOW_S - 10 * DAY_S)
    before = rows(store)
    with running.lock("running"):
        gone = remove_old_searches(store, NOW_S - 7 * DAY_S)
        assert gone == []
        # Locked by a process that has just started.
        assert remove_old_searches(store, NOW_S + DAY_S) == ["used"]
    assert store.delete_jobs(NOW_S - 7 * DAY_S, gone) == 0
    assert rows(store)["studies"] == before["studies"] - 1


def test_a_search_that_its_service_resumes_meanwhile_is_kept(
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


def add_trials(
    store: ServiceStore, root: Path, name: str, states: Sequence[TrialState], folder: str | None = None
) -> Store:
    """A search that ended ten days ago, its trials each worse than the one before, and their checkpoints."""
    ended_s = NOW_S - 10 * DAY_S
    add_job(store, name, ended_s)
    folder = folder or folder_of(name)
    searches = Store(store.database.url, engine=store.database.engine)
    searches.create_search(dataclasses.replace(spec(name), checkpoint_dir=f"{root}/{folder}"))
    for number, state in enumerate(states):
        searches.save_trial(TrialRecord(number, {}, state, value=float(number)))
        for file in (f"run-0-step-{number}/dike-trial.json", "outputs/model", "run-0.log"):
            path = root / folder / f"trial-{number}" / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(bytes(1000))
            os.utime(path, (ended_s, ended_s))
    with store.database.engine.begin() as connection:
        connection.execute(update(SEARCHES).where(SEARCHES.c.name == name).values(heartbeat_s=ended_s))
    return searches


def folder_of(name: str) -> str:
    """What the folder of a search of `add_trials` is called."""
    return dated_folder(name, NOW_S - 10 * DAY_S - 10)


def with_checkpoints(root: Path, folder: str) -> list[int]:
    """Numbers of the trials that have any."""
    return sorted(int(path.parent.name[6:]) for path in (root / folder).glob("trial-*/run-*-step-*"))


FAILED, FINISHED, SUSPENDED = TrialState.FAILED, TrialState.FINISHED, TrialState.SUSPENDED


def test_checkpoints_are_removed_except_of_the_best_trial_and_resumable_ones(
    store: ServiceStore, tmp_path: Path
) -> None:
    searches = add_trials(store, tmp_path, "old", (FAILED, FINISHED, FINISHED, SUSPENDED, FAILED))
    folder = folder_of("old")
    (tmp_path / folder / "trial-2" / "run-7-step-7").symlink_to(tmp_path)
    (tmp_path / folder / "trial-9" / "run-0-step-1").mkdir(parents=True)
    old = Checkpoints(store, tmp_path, NOW_S - 5 * DAY_S)
    with searches.lock("old", last_sign_s=NOW_S - 10 * DAY_S):
        old.remove_old(lambda: False)
        # Another process runs the search.
        assert with_checkpoints(tmp_path, folder) == [0, 1, 2, 2, 3, 4, 9]
    os.utime(tmp_path / folder / "trial-2" / "run-7-step-7", (0, 0), follow_symlinks=False)
    old.remove_old(lambda: False)
    assert with_checkpoints(tmp_path, folder) == [1, 3, 9]
    assert [event.text for event in store.history.events("old")] == [
        f"checkpoints of its trials are removed, {format_bytes(3000 + len(str(tmp_path)))}: they were old"
    ]
    assert (tmp_path / folder / "trial-0" / "outputs" / "model").is_file()
    # Its age is unchanged. When the search is removed, only the best trial's checkpoints are kept.
    assert remove_old_searches(store, NOW_S - 7 * DAY_S, old) == ["old"]
    assert with_checkpoints(tmp_path, folder) == [1, 9]


@pytest.mark.parametrize("name", ["digits", "train-20231101-062803-76eec0"])
def test_a_search_s_folder_has_the_time_in_its_name(store: ServiceStore, tmp_path: Path, name: str) -> None:
    add_job(store, "before", NOW_S - 10 * DAY_S)
    submitted = store.job("before")
    assert submitted is not None
    folder = submitted.folder_name.replace("before", name)
    add_trials(store, tmp_path, name, (FINISHED, FINISHED), folder)
    record = store.job(name)
    assert record is not None
    assert record.folder_name == folder
    Checkpoints(store, tmp_path, NOW_S - 5 * DAY_S).remove_old(lambda: False)
    assert with_checkpoints(tmp_path, folder) == [0]


def test_checkpoints_of_a_search_that_is_used_or_is_not_the_job_s_stay(store: ServiceStore, tmp_path: Path) -> None:
    add_trials(store, tmp_path, "elsewhere", (FINISHED, FAILED))
    add_trials(store, tmp_path, "used", (FINISHED, FAILED))
    add_trials(store, tmp_path, "named", (FINISHED, FAILED))
    add_trials(store, tmp_path, "not-begun", (FINISHED, FAILED)).delete_search()
    add_trials(store, tmp_path, "by-its-user", (FINISHED, FAILED))
    request = {"kind": "search", "spec": {"checkpoint_dir": f"{tmp_path}/{folder_of('by-its-user')}"}}
    store.change_job("by-its-user", request=request)
    # `dike tune` has made one of that name before.
    of_dike_tune = dated_folder("of-dike-tune", NOW_S + DAY_S)
    add_trials(store, tmp_path, "of-dike-tune", (FINISHED, FAILED), of_dike_tune)
    store.change_job("of-dike-tune", state_data=None, submitted_s=NOW_S + DAY_S)
    with store.database.engine.begin() as connection:
        other = write_spec(
            dataclasses.replace(spec("elsewhere"), checkpoint_dir=f"/other/root/{folder_of('elsewhere')}")
        )
        connection.execute(update(SEARCHES).where(SEARCHES.c.name == "elsewhere").values(spec=other))
        # `dike tune --resume` has resumed it.
        connection.execute(update(SEARCHES).where(SEARCHES.c.name == "used").values(heartbeat_s=NOW_S))
    request = {"kind": "training", "checkpoint_dir": f"{tmp_path}/{folder_of('named')}"}
    store.add_job(JobRecord("job", JobKind.TRAINING, "ann", "train.py", request, bundle_token="job"), b"bundle")
    Checkpoints(store, tmp_path, NOW_S - 5 * DAY_S).remove_old(lambda: False)
    names = [*map(folder_of, ("elsewhere", "used", "not-begun", "by-its-user")), of_dike_tune, folder_of("named")]
    assert [with_checkpoints(tmp_path, name) for name in names] == [[0, 1]] * 6
    store.change_job("job", state=JobState.KILLED)
    Checkpoints(store, tmp_path, NOW_S - 5 * DAY_S).remove_old(lambda: False)
    assert [with_checkpoints(tmp_path, name) for name in names] == [*[[0, 1]] * 5, [0]]


def test_checkpoints_of_a_search_that_is_resumed_meanwhile_stay(
    store: ServiceStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_trials(store, tmp_path, "old", (FINISHED, FAILED))

    def then_reopened(record: JobRecord, search: SearchSummary) -> bool:
        return is_own_search(record, search) and store.reopen_job(record.id, "it goes on")

    monkeypatch.setattr(retention, "is_own_search", then_reopened)
    Checkpoints(store, tmp_path, NOW_S - 5 * DAY_S).remove_old(lambda: False)
    assert with_checkpoints(tmp_path, folder_of("old")) == [0, 1]


def test_links_keep_no_search_from_being_forgotten(store: ServiceStore, tmp_path: Path) -> None:
    root, treasure = tmp_path / "root", tmp_path / "treasure"
    add_trials(store, root, "old", (FINISHED, FAILED, FAILED))
    (root / folder_of("old") / "trial-1").rename(treasure)
    (root / folder_of("old") / "trial-1").symlink_to(treasure)
    old = Checkpoints(store, root, NOW_S - 5 * DAY_S)
    assert remove_old_searches(store, NOW_S - 5 * DAY_S, old) == ["old"]
    assert (treasure / "run-0-step-1" / "dike-trial.json").is_file()
    assert with_checkpoints(root, folder_of("old")) == [0, 1], "through the link"
    add_trials(store, root, "moved", (FINISHED, FAILED))
    (root / folder_of("moved")).rename(tmp_path / "moved")
    (root / folder_of("moved")).symlink_to(tmp_path / "moved")
    assert remove_old_searches(store, NOW_S - 5 * DAY_S, old) == ["old", "moved"]
    assert with_checkpoints(root, folder_of("moved")) == [0, 1]
