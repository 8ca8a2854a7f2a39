"""Locates and opens the database of searches, and translates its errors."""

from __future__ import annotations

import fcntl
import logging
import os
import sqlite3
import stat
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from sqlalchemy import Engine, create_engine, event, func, inspect, select
from sqlalchemy.engine import URL, Connection, make_url
from sqlalchemy.exc import (
    ArgumentError,
    DBAPIError,
    InterfaceError,
    NoSuchModuleError,
    OperationalError,
    SQLAlchemyError,
    TimeoutError,  # noqa: A004 (of the pool of connections)
)

from dike.checkpoints import make_private
from dike.exceptions import BadInputError
from framework.project.entry_point import RUNS_FOLDER, SEARCHES_FILE
from framework.scheduler.journal import StorageUnavailableError
from framework.search.tables import METADATA, SEARCHES, TABLES

logger = logging.getLogger(__name__)

STORAGE_VARIABLE = "DIKE_STORAGE"
DEFAULT_FOLDER = Path(RUNS_FOLDER)
"""The only database folder that is created automatically; any other missing one is a mistake in the URL."""
BUSY_TIMEOUT_S = 30.0
"""Maximum wait of a statement for another process that writes to the same SQLite file."""
SERVER_TIMEOUT_S = 45.0
"""Maximum wait of `wait_for_server`; shorter than the time after which silent slots are ended."""
_RETRY_S = 0.5
_BUSY_RETRY_S = 0.01
_TABLES_LOCK = 0x64696B65
"""PostgreSQL's advisory lock for creating tables."""
_EXAMPLES = "sqlite:///searches.db or postgresql://user@host/database"


def default_storage() -> str:
    """Returns the default database URL: `$DIKE_STORAGE`, else a file under the current folder."""
    return os.environ.get(STORAGE_VARIABLE) or f"sqlite:///{DEFAULT_FOLDER}/{SEARCHES_FILE}"


def parse_url(url: str) -> URL:
    """Parses a database URL; PostgreSQL's default driver is psycopg.

    Raises:
        BadInputError: if it is invalid.
    """
    try:
        parsed = make_url(url)
    except ArgumentError:
        # The part before the last @ may contain a password.
        raise BadInputError(
            f"The storage '{url.rpartition('@')[2]}' is not a database URL, such as {_EXAMPLES}."
        ) from None
    if parsed.drivername in ("postgresql", "postgres"):
        return parsed.set(drivername="postgresql+psycopg")
    return parsed


def shown(url: URL) -> str:
    """Formats the URL for messages, without password."""
    return url.render_as_string(hide_password=True)


def open_database(url: str, *, must_exist: bool = False, private: bool = False, option: str = "--storage") -> Engine:
    """Opens a database, and creates Dike's tables where they are missing.

    Args:
        url: its URL.
        must_exist: create neither a database file nor tables.
        private: a new file is readable by its owner only.
        option: the command-line option that names the database, for messages.

    Raises:
        BadInputError: if it cannot be reached, is no database, has other tables of the same names, or lacks searches
            although it must exist.
    """
    parsed = parse_url(url)
    path = _sqlite_path(parsed)
    if path is not None:
        if must_exist and not path.exists():
            raise BadInputError(
                f"There is no database of searches at {path}; name the right one with --storage. If the search "
                "belongs to a service, see dike jobs NAME, and resume it with dike tune --resume NAME --detach."
            )
        try:
            if path.parent == DEFAULT_FOLDER:
                make_private(str(path.parent))
        except OSError as error:
            raise BadInputError(f"The folder of the storage {path} cannot be created: {error.strerror}.") from error
        if not path.parent.is_dir():
            raise BadInputError(
                f"The folder {path.parent} of the database does not exist; create it, or correct {option}."
            )
        if private:
            _make_private(path)
    try:
        engine = create_engine(parsed, **engine_arguments(parsed))
    except NoSuchModuleError:
        raise BadInputError(
            f"The storage '{shown(parsed)}' is of a type that SQLAlchemy does not support; use {_EXAMPLES}."
        ) from None
    except ImportError as error:
        hint = "pip install 'dike[postgresql]'" if parsed.drivername == "postgresql+psycopg" else "install it"
        raise BadInputError(f"The storage '{shown(parsed)}' needs the driver {error.name or error}; {hint}.") from error
    if path is not None:
        event.listen(engine, "connect", _prepare_sqlite)
        event.listen(engine, "begin", _begin_sqlite)
    with storage_errors(parsed):
        if must_exist and not inspect(engine).has_table(SEARCHES.name):
            raise BadInputError(f"The storage {shown(parsed)} holds no searches; name the right one with --storage.")
        if not _has_current_schema(engine):
            raise BadInputError(
                f"The storage {shown(parsed)} was made by another version of Dike, such as one from before 0.1, and "
                f"cannot be read by this one; name another with {option}."
            )
        if not must_exist:
            with table_creation_lock(parsed):
                METADATA.create_all(engine)
    return engine


def _has_current_schema(engine: Engine) -> bool:
    """Returns whether Dike's existing tables have the expected columns."""
    found = inspect(engine).get_multi_columns(filter_names=list(METADATA.tables))
    columns = {name: {column["name"] for column in there} for (_, name), there in found.items()}
    # Tables of searches are created together; those of a service only if there is one.
    is_whole = SEARCHES.name not in columns or columns.keys() >= set(TABLES)
    return is_whole and all(there == set(METADATA.tables[name].c.keys()) for name, there in columns.items())


@contextmanager
def table_creation_lock(url: URL) -> Iterator[None]:
    """Locks the creation of tables in this database against other processes."""
    with ExitStack() as stack:
        path = _sqlite_path(url)
        if path is not None:
            folder = os.open(path.absolute().parent, os.O_RDONLY)
            stack.callback(os.close, folder)
            fcntl.flock(folder, fcntl.LOCK_EX)
        elif url.get_backend_name() == "postgresql":
            engine = create_engine(url, **engine_arguments(url))
            stack.callback(engine.dispose)
            connection = stack.enter_context(engine.connect())
            connection.execute(select(func.pg_advisory_lock(_TABLES_LOCK)))
        yield


def engine_arguments(url: URL) -> dict[str, Any]:
    """Returns the arguments for engines on this database, Optuna's included."""
    if url.get_backend_name() == "sqlite":
        return {"connect_args": {"timeout": BUSY_TIMEOUT_S}}
    if url.get_backend_name() == "postgresql":
        return {"pool_pre_ping": True, "connect_args": {"connect_timeout": 10}}
    return {"pool_pre_ping": True}


@contextmanager
def storage_errors(url: URL) -> Iterator[None]:
    """Translates errors of the database into one sentence.

    Raises:
        StorageUnavailableError: if the database cannot be reached, or cannot write.
        BadInputError: for any other error of the database.
    """
    try:
        yield
    except SQLAlchemyError as error:
        cause = error.orig if isinstance(error, DBAPIError) else error
        reason = (str(cause).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
        is_away = isinstance(error, OperationalError | InterfaceError | TimeoutError)
        kind = StorageUnavailableError if is_away else BadInputError
        raise kind(f"The storage {shown(url)} cannot be used: {reason}.") from error


def wait_for_server(engine: Engine, log: Callable[[str], None]) -> None:
    """Makes the calling thread wait for a server that refuses connections, such as one that restarts.

    In other threads, and after `SERVER_TIMEOUT_S`, a refused connection is an error.
    """
    waiting_thread = threading.get_ident()

    def connect(dialect: Any, _record: object, arguments: Any, named: Any) -> Any:
        if threading.get_ident() != waiting_thread:
            return None
        until_s = time.monotonic() + SERVER_TIMEOUT_S
        is_away = False
        while True:
            try:
                connection = dialect.connect(*arguments, **named)
            except dialect.loaded_dbapi.OperationalError:
                if time.monotonic() >= until_s:
                    raise
                if not is_away:
                    log(f"the storage {shown(engine.url)} does not answer; waiting up to {SERVER_TIMEOUT_S:g} s for it")
                    is_away = True
                time.sleep(_RETRY_S)
            else:
                if is_away:
                    log("the storage answers again")
                return connection

    event.listen(engine, "do_connect", connect)


def _sqlite_path(url: URL) -> Path | None:
    if url.get_backend_name() != "sqlite":
        return None
    if not url.database or url.database == ":memory:":
        raise BadInputError("A search cannot be stored in memory; name a file, such as sqlite:///searches.db.")
    return Path(url.database)


def database_files(url: str) -> frozenset[Path]:
    """Returns the files of an SQLite database, whether they exist or not; none for a server.

    Only SQLite may open them: when a process closes any descriptor of a file, the system drops all its locks on it. The
    next reader then treats the database as unused, and deletes the log that the process still writes to
    (https://sqlite.org/howtocorrupt.html, section 2.2).
    """
    path = _sqlite_path(parse_url(url))
    if path is None:
        return frozenset()
    real = os.path.realpath(path)
    return frozenset(Path(f"{real}{suffix}") for suffix in ("", "-wal", "-shm", "-journal"))


def _make_private(path: Path) -> None:
    """Creates a missing file, readable by its owner; SQLite gives the files beside it the same mode.

    An existing file is not opened (`database_files`).
    """
    with suppress(OSError):
        # SQLite meets and reports the same error.
        with suppress(FileExistsError):
            os.close(os.open(os.path.realpath(path), os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
        if path.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO):
            logger.warning("others may read the database %s, which holds scripts and their tokens; chmod 600 it", path)


def _prepare_sqlite(connection: sqlite3.Connection, _record: object) -> None:
    # _begin_sqlite begins transactions, as the driver takes the write lock too late to wait for it.
    connection.isolation_level = None
    # With WAL readers never wait. The mode is stored in the file.
    until_s = time.monotonic() + BUSY_TIMEOUT_S
    while connection.execute("PRAGMA journal_mode").fetchone() != ("wal",):
        try:
            connection.execute("PRAGMA journal_mode=WAL").close()
        except sqlite3.OperationalError as error:
            # The change needs exclusive access, and SQLite does not wait for it.
            if error.sqlite_errorcode != sqlite3.SQLITE_BUSY or time.monotonic() >= until_s:
                raise
            time.sleep(_BUSY_RETRY_S)
    connection.execute("PRAGMA foreign_keys=ON").close()


def _begin_sqlite(connection: Connection) -> None:
    writes = connection.get_execution_options().get("dike_writes")
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")
