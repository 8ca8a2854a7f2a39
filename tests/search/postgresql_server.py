"""A PostgreSQL server of the tests' own, where its programs are installed."""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from sqlalchemy import text

from framework.embedded.ports import reserve_blocks
from framework.search.database import open_database
from tests.waiting import DEADLINE_S

USER = "postgres"
TIMEOUT_S = round(DEADLINE_S)


@dataclass(frozen=True)
class PostgresqlServer:
    """A server that runs.

    Attributes:
        url: of a database in it.
        stop: cuts all connections and takes no more.
        start: has it come back; returns when it takes connections.
    """

    url: str
    stop: Callable[[], None]
    start: Callable[[], None]

    def emptied(self) -> str:
        """The URL; nothing is in that database any more."""
        engine = open_database(self.url)
        with engine.begin() as connection:
            connection.execute(text("DROP SCHEMA public CASCADE"))
            connection.execute(text("CREATE SCHEMA public"))
        engine.dispose()
        return self.url


@contextlib.contextmanager
def postgresql_server() -> Iterator[PostgresqlServer]:
    """Starts a server on loopback with an empty database; skips the test where that cannot be."""
    programs = [shutil.which(name) for name in ("initdb", "pg_ctl")]
    if not all(programs):
        pytest.skip("PostgreSQL's initdb and pg_ctl are not installed")
    pytest.importorskip("psycopg", reason="the extra 'postgresql' is not installed")
    folder = Path(tempfile.mkdtemp(prefix="dike-postgresql-"))
    # The server refuses to run as root.
    user: str | None = None
    if os.geteuid() == 0:
        try:
            entry = pwd.getpwnam(USER)
        except KeyError:
            pytest.skip(f"PostgreSQL does not run as root, and there is no user '{USER}'")
        user = USER
        os.chown(folder, entry.pw_uid, entry.pw_gid)

    def run(*command: str | int | None) -> None:
        subprocess.run(
            [str(part) for part in command], user=user, cwd=folder, check=True, capture_output=True, timeout=TIMEOUT_S
        )

    data = str(folder / "data")
    # The port stays reserved while the server is stopped; otherwise an outgoing connection might take it.
    (block,) = reserve_blocks(1)
    port = block.first
    try:
        run(programs[0], "-D", data, "-U", USER, "-A", "trust", "-N", "--no-locale", "-E", "UTF8")
        options = f"-p {port} -c listen_addresses=127.0.0.1 -c unix_socket_directories={folder} -c fsync=off"

        def start() -> None:
            run(programs[1], "-D", data, "-w", "-t", TIMEOUT_S, "-o", options, "-l", str(folder / "log"), "start")

        def stop() -> None:
            run(programs[1], "-D", data, "-m", "immediate", "stop")

        start()
        try:
            yield PostgresqlServer(f"postgresql://{USER}@127.0.0.1:{port}/postgres", stop, start)
        finally:
            stop()
    finally:
        block.claim.close()
        shutil.rmtree(folder)
