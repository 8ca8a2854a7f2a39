"""The database of searches: what goes in comes out, on SQLite and PostgreSQL, and after a SIGKILL."""

from __future__ import annotations

import dataclasses
import itertools
import math
import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import optuna
import pytest
from sqlalchemy import text, update

from dike.exceptions import BadInputError, JobFailedError
from executor.trial_messages import RunEnd
from framework.policies.interface import Milestone, PolicySettings, Reading
from framework.search import lease, losses
from framework.search.database import default_storage, open_database, parse_url
from framework.search.records import Parameter, SearchSpec, SliceRecord, TrialRecord, TrialState
from framework.search.roster import Roster
from framework.search.store import Store
from framework.search.study import Study
from framework.search.tables import SEARCHES
from tests.search.postgresql_server import postgresql_server

DEADLINE_S = 60.0

SPEC = SearchSpec(
    name="digits",
    script="/scripts/train.py",
    arguments=("--epochs", "2"),
    flags={"lr": "--lr"},
    space=(Parameter("lr", (0.1, 1, True, "x")), Parameter("units", low=2, high=64, is_integer=True, log=True)),
    sampler="tpe",
    trial_count=4,
    settings=PolicySettings(milestones=(Milestone(0.5, 20.0),)),
    earlier_results=({"loss": 0.5, "nested": [1, 2]},),
    environment={"A": "b"},
)
FULL = TrialRecord(
    number=0,
    parameters={"lr": 0.1, "units": 3, "nesterov": True, "optimizer": "sgd"},
    state=TrialState.SUSPENDED,
    runs=2,
    failures=1,
    step=120,
    train_s=12.5,
    slot_s=14.0,
    loss=0.25,
    value=0.5,
    metrics={"accuracy": 0.9},
    convergence=0.01,
    checkpoint="/checkpoints/trial-0/run-1-step-120",
    checkpoint_step=120,
    checkpoint_train_s=12.5,
    agent="node-1",
    slot=3,
    error="Traceback: ä",
    created_s=1.7e9,
    ended_s=1.7e9 + 60,
)


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with postgresql_server() as url:
        yield url


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/searches.db"
    server_url: str = request.getfixturevalue("server")
    engine = open_database(server_url)
    with engine.begin() as connection:
        connection.execute(text("DROP SCHEMA public CASCADE"))
        connection.execute(text("CREATE SCHEMA public"))
    engine.dispose()
    return server_url


@pytest.fixture
def sqlite_url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/searches.db"


@pytest.fixture
def store(url: str) -> Iterator[Store]:
    with closing(Store(url)) as opened:
        opened.create_search(SPEC)
        yield opened


def report(step: int, loss: float | None = None, **others: Any) -> dict[str, Any]:
    numbers = {} if loss is None else {"loss": loss, "low": loss, "high": loss, "count": 1}
    return {"step": step, "train_s": step * 0.5, **numbers, **others}


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_search_comes_back_as_it_was_asked_for(store: Store, url: str) -> None:
    with closing(Store(url, must_exist=True)) as other:
        read = other.open_search("digits")
    assert read == SPEC
    assert [type(value) for value in read.space[0].choices] == [float, int, bool, str]


def test_a_name_is_given_once(store: Store) -> None:
    with pytest.raises(BadInputError, match="--resume digits"):
        store.create_search(SPEC)


def test_an_unknown_name_gets_the_nearest_one_suggested(store: Store) -> None:
    with pytest.raises(BadInputError, match="did you mean 'digits'"):
        store.open_search("digit")
    with pytest.raises(BadInputError, match="dike trials"):
        store.open_search("something else")


def test_a_trial_comes_back_whole(store: Store) -> None:
    store.save_trial(dataclasses.replace(FULL, state=TrialState.WAITING, step=0))
    store.save_trial(FULL)
    bare = TrialRecord(1, {"lr": 1})
    store.save_trial(bare)
    assert store.load_trials() == [FULL, bare]


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf, 0.1])
def test_numbers_that_are_none_come_back_as_they_were(store: Store, number: float) -> None:
    store.save_trial(TrialRecord(0, {}, loss=number, value=number, convergence=number, metrics={"a": number}))
    store.add_losses(0, 0, [report(1, number, metrics={"a": number}, value=number)])
    (trial,) = store.load_trials()
    (reading,) = trial.readings
    numbers = [trial.loss, trial.value, trial.convergence, trial.metrics["a"], reading.loss, reading.low, reading.high]
    for read in [*numbers, store.load_losses()[0][0]["value"]]:
        assert repr(read) == repr(number)


def test_losses_become_the_readings_of_the_objective(store: Store) -> None:
    store.save_trial(TrialRecord(0, {}))
    store.add_losses(0, 0, [report(10, 2.0), report(20, metrics={"accuracy": 0.5}, value=0.5), report(20, 1.5)])
    (trial,) = store.load_trials()
    assert trial.readings == [Reading(5.0, 10, 2.0, 2.0, 2.0), Reading(10.0, 20, 1.5, 1.5, 1.5)]

    store.create_search(dataclasses.replace(SPEC, name="other", metric="accuracy", mode="max"))
    store.save_trial(TrialRecord(0, {}))
    store.add_losses(0, 0, [report(10, 2.0), report(20, metrics={"accuracy": 0.5}, value=0.5)])
    (trial,) = store.load_trials()
    assert trial.readings == [Reading(10.0, 20, -0.5, -0.5, -0.5)]


def test_slices_come_back_and_count_the_readings_before_them(store: Store) -> None:
    store.save_trial(TrialRecord(0, {}))
    first = SliceRecord(0, 0, slot=1, agent="node-1", start_s=100.0, reason="first slice")
    store.add_slice(first)
    assert store.load_slices() == [first]
    store.add_losses(0, 0, [report(10, 2.0), report(20, 1.5)])
    closed = dataclasses.replace(
        first, end_s=110.0, first_step_s=101.0, to_step=20, outcome="suspended", suspend_s=0.5, rss_bytes=2**40, cpu=1.5
    )
    store.close_slice(closed)
    second = SliceRecord(0, 1, slot=2, agent="node-2", start_s=111.0, convergence=0.1, from_step=20, to_step=20)
    store.add_slice(second)
    store.add_losses(0, 1, [report(30, 1.0)])
    assert store.load_slices() == [closed, second]
    assert store.load_trials()[0].slices == [0, 2]


def test_what_a_run_repeats_is_kept_once(store: Store) -> None:
    store.save_trial(TrialRecord(0, {}))
    store.add_losses(0, 0, [report(10, 3.0), report(20, 2.0), report(30, 1.0)])
    store.add_losses(0, 1, [report(20, 7.0), report(40, 0.5)])
    assert [(line["run"], line["step"], line["loss"]) for line in store.load_losses()[0]] == [
        (0, 10, 3.0),
        (0, 20, 2.0),
        (0, 30, 1.0),
        (1, 40, 0.5),
    ]
    assert [reading.loss for reading in store.load_trials()[0].readings] == [3.0, 2.0, 1.0, 0.5]


def test_a_loss_that_comes_twice_is_kept_once(store: Store) -> None:
    store.save_trial(TrialRecord(0, {}))
    store.add_losses(0, 0, [report(10, 3.0)])
    store.add_losses(0, 0, [report(10, 3.0)])
    store.add_losses(0, 0, [report(10, metrics={"accuracy": 0.5}, value=0.5)])
    store.add_losses(0, 1, [report(10, 3.0), report(20, 2.0)])
    lines = store.load_losses()[0]
    assert [(line["step"], line.get("loss"), line.get("value")) for line in lines] == [
        (10, 3.0, None),
        (10, None, 0.5),
        (20, 2.0, None),
    ]


def test_a_deleted_search_leaves_its_name_free(store: Store) -> None:
    store.save_trial(TrialRecord(0, {}))
    store.add_losses(0, 0, [report(10, 3.0)])
    store.delete_search()
    assert store.searches() == []
    store.create_search(SPEC)
    assert store.load_trials() == []


def test_a_malformed_report_is_refused_whole(store: Store) -> None:
    for wrong in ({"loss": 1.0}, report(2, loss=None, metrics=[1]), {**report(2, 1.0), "loss": []}):
        with pytest.raises(ValueError, match="malformed"):
            store.add_losses(0, 0, [report(1, 1.0), wrong])
    assert store.load_losses() == {}


def test_many_losses_are_merged_evenly_and_lose_neither_mean_nor_extremes(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(losses, "LIMIT", 40)
    store.save_trial(TrialRecord(0, {}))
    values = [1 / (step + 1) for step in range(400)]
    for begin in range(0, 400, 10):
        store.add_losses(0, 0, [report(step, values[step]) for step in range(begin, begin + 10)])
    readings = store.load_trials()[0].readings
    assert 20 <= len(readings) <= 40
    assert [reading.step for reading in readings] == sorted({reading.step for reading in readings})
    assert sum(reading.count for reading in readings) == 400
    assert math.isclose(sum(reading.loss * reading.count for reading in readings), sum(values))
    assert max(reading.high for reading in readings) == values[0]
    assert min(reading.low for reading in readings) == values[-1]
    assert readings[-1].step == 399
    # The older part stands for equally many reports a row.
    widths = [later.step - earlier.step for earlier, later in itertools.pairwise(readings[:11])]
    assert max(widths) <= 2 * min(widths)


def test_merged_losses_keep_nan_and_the_newest_metrics() -> None:
    row = {"run": 0, "train_s": 1.0, "value": None, "reports": 1, "metrics": '{"a": 1}', "count": 1}
    rows = [
        {**row, "step": 1, "loss": 1.0, "low": 1.0, "high": 1.0},
        {**row, "step": 2, "loss": math.nan, "low": math.nan, "high": math.nan, "value": 5.0},
        {**row, "step": 3, "loss": None, "low": None, "high": None, "count": 0, "metrics": '{"a": 2}'},
    ]
    (merged,) = losses.merge(rows, 1)
    assert (merged["step"], merged["count"], merged["reports"], merged["value"]) == (3, 2, 3, 5.0)
    assert merged["metrics"] == '{"a": 2}'
    assert all(math.isnan(merged[name]) for name in ("loss", "low", "high"))


def test_the_list_of_searches_says_how_each_stands(store: Store) -> None:
    store.save_trial(FULL)
    store.save_trial(TrialRecord(1, {}))
    with store.lock("digits"):
        (running,) = store.searches()
        assert running.is_running
        assert running.states == {TrialState.SUSPENDED: 1, TrialState.WAITING: 1}
        assert running.ended_s is None
    store.finish_search("interrupted")
    (ended,) = store.searches()
    assert (ended.is_running, ended.failure, ended.spec) == (False, "interrupted", SPEC)
    assert ended.ended_s is not None


def test_the_framework_id_is_kept(store: Store) -> None:
    assert store.framework_id("digits") is None
    store.set_framework_id("digits", "f-1")
    assert store.framework_id("digits") == "f-1"


def test_a_search_is_run_by_one_process_at_a_time(store: Store, url: str) -> None:
    with closing(Store(url)) as other:
        message = f"run by process {os.getpid()} on "
        with store.lock("digits"), pytest.raises(BadInputError, match=message), other.lock("digits"):
            raise AssertionError("two run one search")
        with other.lock("digits"):
            assert other.searches()[0].is_running


def owner(store: Store, **values: Any) -> None:
    with store._engine.begin() as connection:
        connection.execute(update(SEARCHES).values(**values))


def test_a_holder_elsewhere_is_gone_when_it_is_not_heard(store: Store, url: str) -> None:
    with closing(Store(url)) as other, store.lock("digits"):
        owner(store, owner_machine="elsewhere", owner_host="elsewhere")
        with pytest.raises(BadInputError, match="on elsewhere"), other.lock("digits"):
            raise AssertionError("the holder was heard a moment ago")
        owner(store, heartbeat_s=time.time() - lease.STALE_S - 5)
        with other.lock("digits"):
            # The first holder finds out as soon as it writes.
            with pytest.raises(JobFailedError, match=f"taken over by process {os.getpid()}"):
                store.save_trial(FULL)
            other.save_trial(TrialRecord(1, {}))
            assert [trial.number for trial in other.load_trials()] == [1]


def test_the_heartbeat_goes_on_while_the_search_is_run(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease, "HEARTBEAT_S", 0.05)
    with store.lock("digits"):
        owner(store, heartbeat_s=1.0)

        def was_heard() -> bool:
            with store._engine.connect() as connection:
                return float(connection.execute(text("SELECT heartbeat_s FROM dike_searches")).scalar_one()) > 1.0

        wait_until(was_heard)


def test_optuna_and_dike_share_the_database(store: Store, url: str) -> None:
    spec = dataclasses.replace(SPEC, name="shared", space=(Parameter("lr", low=0.1, high=1.0),))
    study = Study.create(url, spec)
    number, parameters = study.ask()
    study.tell(number, 0.5, failed=False)
    loaded = optuna.load_study(study_name="shared", storage=parse_url(url).render_as_string(hide_password=False))
    assert loaded.best_params == parameters


WRITER = """
import sys
from framework.search.records import TrialRecord
from framework.search.store import Store
store = Store(sys.argv[1])
store.open_search("digits")
with store.lock("digits"):
    step = 0
    while True:
        step += 1
        numbers = {"loss": 1.0, "low": 1.0, "high": 1.0, "count": 1}
        store.add_losses(0, 0, [{"step": step, "train_s": 1.0 * step, **numbers}])
        store.save_trial(TrialRecord(0, {"lr": 0.1}, step=step))
"""


def test_a_killed_writer_leaves_a_whole_database_and_no_lock(sqlite_url: str) -> None:
    with closing(Store(sqlite_url)) as store:
        store.create_search(SPEC)
        with subprocess.Popen([sys.executable, "-c", WRITER, sqlite_url], cwd=Path(__file__).parents[2]) as writer:
            try:
                # Reading goes on while the other process writes.
                wait_until(lambda: any(trial.step > 20 for trial in store.load_trials()))
                with pytest.raises(BadInputError, match=f"process {writer.pid}"), store.lock("digits"):
                    raise AssertionError("the writer lives")
                seen = store.load_trials()[0].step
            finally:
                os.kill(writer.pid, signal.SIGKILL)
            writer.wait(DEADLINE_S)
        (trial,) = store.load_trials()
        assert trial.step >= seen
        assert [reading.step for reading in trial.readings][: trial.step] == list(range(1, trial.step + 1))
        with store.lock("digits"):
            store.save_trial(TrialRecord(0, {"lr": 0.1}, step=1))
    with sqlite3.connect(sqlite_url.removeprefix("sqlite:///")) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]


def test_searches_that_begin_and_write_at_once_wait_for_each_other(sqlite_url: str) -> None:
    def run(name: str) -> int:
        spec = dataclasses.replace(SPEC, name=name, space=(Parameter("lr", low=0.1, high=1.0),))
        with closing(Store(sqlite_url)) as store:
            store.create_search(spec)
            study = Study.create(sqlite_url, spec)
            for step in range(20):
                store.save_trial(TrialRecord(0, {}, step=step))
                store.add_losses(0, 0, [report(step, 1.0)])
            study.ask()
            return len(store.load_trials()[0].readings)

    with ThreadPoolExecutor() as pool:
        assert list(pool.map(run, ["a", "b", "c"])) == [20, 20, 20]


@pytest.mark.parametrize(
    ("storage", "message"),
    [
        ("searches.db", "not a database URL"),
        ("unknown://x/y", "of a kind that SQLAlchemy does not know"),
        ("sqlite://", "not kept in memory"),
        ("sqlite:///FOLDER/none/searches.db", "/none of the database does not exist"),
        ("sqlite:///FOLDER", "cannot be used: unable to open database file"),
        ("sqlite:///FOLDER/text", "cannot be used: file is not a database"),
        ("postgresql://u:secret@127.0.0.1:1/x", "127.0.0.1:1/x"),
    ],
)
def test_a_storage_that_cannot_be_used_is_named(tmp_path: Path, storage: str, message: str) -> None:
    (tmp_path / "text").write_text("this is no database, " * 100)
    with pytest.raises(BadInputError) as caught:
        Store(storage.replace("FOLDER", str(tmp_path)))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert "secret" not in str(caught.value)


def test_only_the_default_folder_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("DIKE_STORAGE", raising=False)
    Store(default_storage()).close()
    assert (tmp_path / "dike-runs" / "searches.db").exists()
    with pytest.raises(BadInputError, match="correct --storage"):
        Store(f"sqlite:///{tmp_path}/a/b/searches.db")
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize(
    ("last", "stored"),
    [
        # The last report, as it came before.
        ({"step": 10, "train_s": 5.0, "loss": 1.0, "low": 1.0, "high": 1.0, "count": 1, "metrics": {"a": 0.5}}, []),
        # With what a function has returned.
        ({"step": 10, "train_s": 5.0, "loss": 1.0, "metrics": {"a": 0.5, "b": 2.0}, "value": 0.25}, [(10, None, 0.25)]),
        ({"value": 0.25}, [(10, None, 0.25)]),
        # A report that was lost on its way.
        ({"step": 20, "train_s": 9.0, "loss": 0.5, "low": 0.5, "high": 0.5, "count": 1}, [(20, 0.5, None)]),
        ({}, []),
    ],
)
def test_the_last_report_of_a_run_is_stored_once(
    sqlite_url: str, last: dict[str, Any], stored: list[tuple[int, float | None, float | None]]
) -> None:
    spec = dataclasses.replace(SPEC, space=(Parameter("lr", (0.1,)),), sampler="grid", trial_count=1)
    with closing(Store(sqlite_url)) as store:
        store.create_search(spec)
        roster = Roster(spec, store, Study.create(sqlite_url, spec))
        roster.admit(1, 0.0, 0.0)
        record = roster.records[0]
        run = roster.starts(record, 0, "node-1", None)
        roster.reported(record, run, [report(10, 1.0, metrics={"a": 0.5})])
        roster.ended(record, RunEnd(0, run, "finished", last=last), 1.0)
        lines = store.load_losses()[0]
        assert [(line["step"], line.get("loss"), line.get("value")) for line in lines] == [(10, 1.0, None), *stored]
        assert store.load_trials()[0].value == last.get("value", record.value)
        assert record.metrics == {"a": 0.5, **last.get("metrics", {})}


def test_reading_makes_no_database(tmp_path: Path) -> None:
    path = tmp_path / "none.db"
    with pytest.raises(BadInputError, match="There is no database of searches at"):
        Store(f"sqlite:///{path}", must_exist=True)
    assert not path.exists()
    sqlite3.connect(path).execute("CREATE TABLE other (id INTEGER)").close()
    with pytest.raises(BadInputError, match="holds no searches"):
        Store(f"sqlite:///{path}", must_exist=True)


def test_the_storage_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DIKE_STORAGE", raising=False)
    assert default_storage() == "sqlite:///dike-runs/searches.db"
    monkeypatch.setenv("DIKE_STORAGE", "postgresql://x/y")
    assert default_storage() == "postgresql://x/y"
