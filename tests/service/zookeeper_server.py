"""A ZooKeeper of the tests' own, where Java and ZooKeeper's library are installed."""

from __future__ import annotations

import contextlib
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.waiting import wait_until

JARS = Path("/usr/share/java")
TICK_MS = 500
"""Sessions end between 2 and 20 ticks after the client's last word."""


class ZooKeeper:
    """One server on loopback."""

    def __init__(self, process: subprocess.Popen[bytes], port: int) -> None:
        self._process = process
        self.hosts = f"127.0.0.1:{port}"

    def freeze(self) -> None:
        """Makes it answer nobody, as behind a network that is gone."""
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self._process.send_signal(signal.SIGCONT)


@contextlib.contextmanager
def zookeeper_server() -> Iterator[ZooKeeper]:
    """Starts a server; skips the test where that cannot be."""
    java, library = shutil.which("java"), JARS / "zookeeper.jar"
    if java is None or not library.exists():
        pytest.skip(f"ZooKeeper is not installed ({library}, java)")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    options = ["-Xmx64m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-Dzookeeper.admin.enableServer=false"]
    main = "org.apache.zookeeper.server.ZooKeeperServerMain"
    with tempfile.TemporaryDirectory(prefix="dike-zookeeper-") as folder:
        log = Path(folder) / "log"
        command = [java, *options, "-cp", f"{library}:{JARS / 'slf4j-nop.jar'}", main, str(port), folder, str(TICK_MS)]
        with log.open("wb") as output, subprocess.Popen(command, stdout=output, stderr=output) as process:
            try:
                _wait(process, port, log)
                yield ZooKeeper(process, port)
            finally:
                process.kill()


def _wait(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    def answers() -> bool:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1.0) as connection:
            connection.sendall(b"srvr")
            return bool(connection.recv(100))
        return False

    wait_until(answers, "ZooKeeper", said=log.read_text, lost=lambda: process.poll() is not None)
