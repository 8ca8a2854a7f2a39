"""A search whose database does not answer for a moment, or for long, whether Dike notices it or Optuna."""

from __future__ import annotations

import contextlib
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from framework.scheduler.journal import StorageUnavailableError
from framework.search import database
from framework.search.database import open_database, wait_for_server
from framework.search.optuna_study import Study
from framework.search.store import Store
from tests.running import dike_environment
from tests.search.postgresql_server import PostgresqlServer
from tests.search.search_stage import search_spec
from tests.search.stored_search import FULL
from tests.search.test_tune import LONG, Tune, command, expected
from tests.waiting import DEADLINE_S, wait_until

IMPATIENT_DIKE = """
from framework.scheduler import lease
from framework.search import database
database.BUSY_TIMEOUT_S = 0.2
# A heartbeat that writes slowly would be waited for no longer than the lock that the test takes.
lease.HEARTBEAT_S = 3600.0
from framework.cli import main
main()
"""


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Another process locks the database for writing, and keeps the lock."""
    with contextlib.closing(sqlite3.connect(path, DEADLINE_S, isolation_level=None)) as connection:
        connection.execute("BEGIN IMMEDIATE")
        yield
        connection.execute("ROLLBACK")


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing waits long for a lock."""
    monkeypatch.setattr(database, "BUSY_TIMEOUT_S", 0.1)
    # Optuna tries again after up to 2 s.
    monkeypatch.setattr("optuna.storages._rdb.storage.random.random", lambda: 0.0)


@pytest.mark.slow
@pytest.mark.usefixtures("impatient")
def test_a_study_says_what_the_database_says(tmp_path: Path) -> None:
    path = tmp_path / "searches.db"
    study = Study.create(f"sqlite:///{path}", search_spec(tmp_path))
    study.ask()
    calls: list[Any] = [
        study.ask,
        lambda: study.report(0, 5, 0.5),
        lambda: study.annotate(0, {"state": "suspended"}),
        lambda: study.tell(0, 0.5, failed=False),
    ]
    with locked(path):
        for call in [*calls, study.delete]:
            with pytest.raises(
                StorageUnavailableError, match=r"^The storage .*/searches.db cannot be used: .* locked\.$"
            ):
                call()
    for call in calls:
        call()
    assert sorted(study.asked()) == [0, 1]
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.execute("ALTER TABLE trials RENAME TO hidden")
    with pytest.raises(StorageUnavailableError, match="no such table"):
        study.asked()
    study.close()


@pytest.mark.usefixtures("impatient")
def test_a_search_passes_it_on(begin: Any, tmp_path: Path) -> None:
    stage = begin(trials=1)
    slot = stage.offer()[0]
    slot.train()
    # Optuna gets a report before Dike writes it down.
    with locked(tmp_path / "searches.db"), pytest.raises(StorageUnavailableError, match="database is locked"):
        slot.report(1, 0.5)


@contextlib.contextmanager
def on_server(
    server: PostgresqlServer, name: str, folder: Path, note: Callable[[str], None]
) -> Iterator[tuple[Store, Study]]:
    """A search there, with one trial; waits."""
    spec = search_spec(folder, name=name)
    engine = open_database(server.url)
    with contextlib.closing(Store(server.url, engine=engine)) as store:
        store.create_search(spec)
        with contextlib.closing(Study.create(server.url, spec)) as study:
            study.ask()
            wait_for_server(engine, note)
            study.wait_for_server(note)
            yield store, study


def test_a_server_that_is_restarted_is_waited_for(server: PostgresqlServer, tmp_path: Path) -> None:
    notes: list[str] = []

    def note(text: str) -> None:
        notes.append(text)
        if "does not answer" in text:
            server.start()

    with on_server(server, "restarted", tmp_path, note) as (store, study):
        server.stop()
        study.report(0, 5, 0.5)
        assert notes[1:] == ["the storage answers again"]
        server.stop()
        store.save_trial(FULL)
        assert len(notes) == 4
        assert store.load_trials(readings=False) == [FULL]


def test_a_server_that_stays_away_is_an_error(
    server: PostgresqlServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A clock that only waiting advances: the user is notified before the first wait, even if a refusal takes long.
    now = [0.0]
    clock = SimpleNamespace(monotonic=lambda: now[0], sleep=lambda seconds: now.append(now.pop() + seconds))
    monkeypatch.setattr(database, "time", clock)
    notes: list[str] = []
    with on_server(server, "lost", tmp_path, notes.append) as (store, study):
        server.stop()
        try:
            for use in (lambda: study.report(0, 5, 0.5), lambda: store.save_trial(FULL)):
                with pytest.raises(StorageUnavailableError, match=r"/postgres cannot be used: .*refused"):
                    use()
        finally:
            server.start()
        assert len(notes) == 2
        study.report(0, 5, 0.5)
        store.save_trial(FULL)


@pytest.mark.mesos
@pytest.mark.timeout(300)
def test_dike_tune_says_how_to_resume_and_can(tmp_path: Path) -> None:
    tune = Tune(tmp_path)
    arguments = command(tune, "--policy", "fifo", "--checkpoint-interval", "1", lr="0.1,0.05", steps=LONG)
    process = subprocess.Popen(
        [sys.executable, "-c", IMPATIENT_DIKE, *map(str, arguments)],
        cwd=tmp_path,
        env=dike_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    wait_until(lambda: len(tune.processes()) == 2, "two trials", lost=lambda: process.poll() is not None)
    with locked(tmp_path / "dike-runs" / "searches.db"):
        _, stderr = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 1, stderr
    assert "cannot be used: database is locked. Every trial is saved" in " ".join(stderr.split())
    assert "resume with dike tune --resume count" in " ".join(stderr.split())
    assert "Traceback" not in stderr
    tune.hurry("0.1", "0.05")
    assert tune.json("tune", "--resume", "count")["complete"]
    assert tune.trajectories() == {lr: expected(lr, LONG) for lr in ("0.1", "0.05")}
