"""The location of the database of searches, and the messages if it cannot be used."""

from __future__ import annotations

import os
import sqlite3
import stat
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import pytest
from sqlalchemy import create_engine, inspect, text

from dike.exceptions import BadInputError
from framework.search.database import default_storage, open_database
from framework.search.store import Store
from framework.service.database import ServiceDatabase
from framework.service.store import ServiceStore
from framework.service.tables import JOBS, SERVICES
from tests.search.locks import locked_by
from tests.waiting import DEADLINE_S

QUERIES_DURING_THE_FIRST_SEARCH = """
import sys, threading
from framework.service.queries import best_values
from framework.service.database import ServiceDatabase
from framework.service.store import ServiceStore
store, ended, errors = ServiceStore(sys.argv[1]), threading.Event(), []
def ask():
    while not ended.is_set():
        try:
            with store.database.reading() as connection:
                best_values(connection, {})
        except BaseException as error:
            errors.append(error)
            return
asking = [threading.Thread(target=ask) for _ in range(4)]
for thread in asking:
    thread.start()
from framework.search.optuna_study import open_storage
open_storage(sys.argv[1])
ended.set()
for thread in asking:
    thread.join()
sys.exit(repr(errors) if errors else 0)
"""


@pytest.mark.parametrize(
    ("storage", "message"),
    [
        ("searches.db", "not a database URL"),
        ("postgresql:/u:secret@db/x", "The storage 'db/x' is not a database URL"),
        ("unknown://x/y", "of a type that SQLAlchemy does not support"),
        ("sqlite://", "cannot be stored in memory"),
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


@pytest.mark.integration
def test_a_service_makes_its_database_private_and_leaves_the_locks_of_others_in_its_process(tmp_path: Path) -> None:
    path = tmp_path / "service.db"
    files = [path, tmp_path / "service.db-wal", tmp_path / "service.db-shm"]
    url = f"sqlite:///{path}"
    with closing(ServiceStore(url)):
        assert [stat.S_IMODE(file.stat().st_mode) for file in files] == [0o600] * 3
        held = [locked_by(os.getpid(), file) for file in (path, files[2])]
        assert all(held)
        ServiceStore(url).close()
        assert [locked_by(os.getpid(), file) for file in (path, files[2])] == held
        # Another process sees that the database is in use, and keeps its files.
        read = "import sqlite3, sys; sqlite3.connect(sys.argv[1]).execute('SELECT * FROM dike_searches').fetchall()"
        subprocess.run([sys.executable, "-c", read, path], check=True, timeout=DEADLINE_S)
        assert all(file.exists() for file in files)


def test_others_are_told_of_that_may_read_a_services_database(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "service.db"
    path.touch(0o644)
    ServiceStore(f"sqlite:///{path}").close()
    assert f"others may read the database {path}" in caplog.text
    assert stat.S_IMODE(path.stat().st_mode) == 0o644


def test_a_database_is_opened_while_another_program_writes_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "s.db"
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("CREATE TABLE other (id INTEGER)")
        other.execute("BEGIN IMMEDIATE")
        # It ends when it is waited for.
        monkeypatch.setattr(time, "sleep", lambda _: other.in_transaction and other.rollback())
        Store(f"sqlite:///{path}").close()
    with closing(sqlite3.connect(path)) as other:
        assert other.execute("PRAGMA journal_mode").fetchone() == ("wal",)


@pytest.mark.parametrize(
    "change",
    [
        "ALTER TABLE dike_trials DROP COLUMN batch_size",
        "ALTER TABLE dike_jobs DROP COLUMN waiting",
        "ALTER TABLE dike_slices ADD COLUMN of_tomorrow TEXT",
        "DROP TABLE dike_trial_output",
    ],
)
def test_a_database_of_another_version_is_refused_in_one_sentence(tmp_path: Path, change: str) -> None:
    url = f"sqlite:///{tmp_path}/s.db"
    engine = open_database(url)
    with engine.execution_options(dike_writes=True).begin() as connection:
        connection.execute(text(change))
        there = inspect(connection).get_table_names()
    engine.dispose()
    for option, opened in (
        ("--storage", lambda: Store(url, must_exist=True)),
        ("--storage", lambda: Store(url)),
        ("--state", lambda: ServiceDatabase(url)),
    ):
        with pytest.raises(BadInputError) as caught:
            opened()
        assert str(caught.value) == (
            f"The storage {url} was made by another version of Dike, such as one from before 0.1, and cannot be read "
            f"by this one; name another with {option}."
        )
    engine = create_engine(url)
    assert inspect(engine).get_table_names() == there
    engine.dispose()


def test_a_database_without_a_service_is_read_as_it_is(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/s.db"
    engine = open_database(url)
    for table in (JOBS, SERVICES):
        table.drop(engine)
    engine.dispose()
    engine = open_database(url, must_exist=True)
    there = inspect(engine).get_table_names()
    engine.dispose()
    assert "dike_searches" in there
    assert not {JOBS.name, SERVICES.name} & set(there)


@pytest.mark.integration
def test_queries_do_not_mind_that_optuna_is_loaded_meanwhile(tmp_path: Path) -> None:
    # In a process of its own: it is loaded once.
    command = [sys.executable, "-c", QUERIES_DURING_THE_FIRST_SEARCH, f"sqlite:///{tmp_path}/s.db"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.integration
def test_nothing_of_optuna_is_loaded_once_there_are_threads(tmp_path: Path) -> None:
    script = """
import sys
from framework.search.optuna_study import load_optuna
load_optuna()
before = {name for name in sys.modules if name.startswith("optuna")}
from framework.search.optuna_study import remove_study
from framework.search.optuna_study import Study
from tests.search.stored_search import SPEC
study = Study.create(sys.argv[1], SPEC)
study.ask()
study.close()
remove_study(sys.argv[1], SPEC.name)
assert "sklearn" not in sys.modules, "100 MB that only the importance of parameters needs"
sys.exit(repr({name for name in sys.modules if name.startswith("optuna")} - before or 0))
"""
    command = [sys.executable, "-c", script, f"sqlite:///{tmp_path}/s.db"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.stderr.strip() in ("", "0"), done.stderr
