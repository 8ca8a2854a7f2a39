"""Several processes at one database of searches, and after a SIGKILL."""

from __future__ import annotations

import dataclasses
import os
import signal
import sqlite3
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import optuna
import pytest
from sqlalchemy import text, update

from dike.exceptions import BadInputError, JobFailedError
from framework.scheduler import lease
from framework.search.database import parse_url
from framework.search.optuna_study import Study
from framework.search.records import Parameter, TrialRecord
from framework.search.store import Store
from framework.search.tables import SEARCHES
from tests.search.stored_search import FULL, SPEC, add_losses, report
from tests.waiting import DEADLINE_S, wait_until


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


def test_a_holder_elsewhere_is_gone_when_it_is_not_heard(
    store: Store, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Nothing happens by time, however long the test takes: neither a heartbeat nor the end of its validity.
    monkeypatch.setattr(lease, "HEARTBEAT_S", 3600.0)
    monkeypatch.setattr(lease, "STALE_S", 3600.0)
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


def test_the_heartbeat_continues_while_the_search_runs(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease, "HEARTBEAT_S", 0.05)
    with store.lock("digits"):
        owner(store, heartbeat_s=1.0)

        def was_heard() -> bool:
            with store._engine.connect() as connection:
                return float(connection.execute(text("SELECT heartbeat_s FROM dike_searches")).scalar_one()) > 1.0

        wait_until(was_heard, "a heartbeat")


def test_optuna_and_dike_share_the_database(store: Store, url: str) -> None:
    spec = dataclasses.replace(SPEC, name="shared", space=(Parameter("lr", low=0.1, high=1.0),))
    study = Study.create(url, spec)
    number, parameters = study.ask()
    study.tell(number, 0.5, failed=False)
    loaded = optuna.load_study(study_name="shared", storage=parse_url(url).render_as_string(hide_password=False))
    assert loaded.best_params == parameters


WRITER = """
import sys
from framework.search import store as stores
from framework.search.records import TrialRecord
from tests.search.stored_search import add_losses
# None are merged, however many it gets to write.
stores.MAX_REPORTS = sys.maxsize
store = stores.Store(sys.argv[1])
store.open_search("digits")
with store.lock("digits"):
    step = 0
    while True:
        step += 1
        numbers = {"loss": 1.0, "low": 1.0, "high": 1.0, "count": 1}
        add_losses(store, 0, 0, [{"step": step, "train_s": 1.0 * step, **numbers}])
        store.save_trial(TrialRecord(0, {"lr": 0.1}, step=step))
"""


@pytest.mark.integration
def test_a_killed_writer_leaves_a_whole_database_and_no_lock(storage: str) -> None:
    with closing(Store(storage)) as store:
        store.create_search(SPEC)
        with subprocess.Popen([sys.executable, "-c", WRITER, storage], cwd=Path(__file__).parents[2]) as writer:
            try:
                # Reading works while the other process writes.
                wait_until(lambda: any(trial.step > 20 for trial in store.load_trials()), "20 steps")
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
    with sqlite3.connect(storage.removeprefix("sqlite:///")) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]


@pytest.mark.slow
def test_searches_that_begin_and_write_at_once_wait_for_each_other(storage: str) -> None:
    def run(name: str) -> int:
        spec = dataclasses.replace(SPEC, name=name, space=(Parameter("lr", low=0.1, high=1.0),))
        with closing(Store(storage)) as store:
            store.create_search(spec)
            study = Study.create(storage, spec)
            for step in range(20):
                store.save_trial(TrialRecord(0, {}, step=step))
                add_losses(store, 0, 0, [report(step, 1.0)])
            study.ask()
            return len(store.load_trials()[0].readings)

    with ThreadPoolExecutor() as pool:
        assert list(pool.map(run, ["a", "b", "c"])) == [20, 20, 20]
