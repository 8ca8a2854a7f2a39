"""A PostgreSQL server of the tests' own, where its programs are installed."""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

USER = "postgres"
TIMEOUT_S = 60


@contextlib.contextmanager
def postgresql_server() -> Iterator[str]:
    """Starts a server on loopback and yields the URL of an empty database; skips the test where that cannot be."""
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

    def run(*command: str | None) -> None:
        subprocess.run(
            [str(part) for part in command], user=user, cwd=folder, check=True, capture_output=True, timeout=TIMEOUT_S
        )

    data = str(folder / "data")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    try:
        run(programs[0], "-D", data, "-U", USER, "-A", "trust", "-N", "--no-locale", "-E", "UTF8")
        options = f"-p {port} -c listen_addresses=127.0.0.1 -c unix_socket_directories={folder} -c fsync=off"
        run(programs[1], "-D", data, "-w", "-o", options, "-l", str(folder / "log"), "start")
        try:
            yield f"postgresql://{USER}@127.0.0.1:{port}/postgres"
        finally:
            run(programs[1], "-D", data, "-m", "immediate", "stop")
    finally:
        shutil.rmtree(folder)
