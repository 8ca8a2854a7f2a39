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
from kazoo.client import KazooClient

from framework.embedded.ports import reserve_blocks
from tests.waiting import DEADLINE_S, wait_until

JARS = Path("/usr/share/java")
TICK_MS = 500
"""Sessions last 2 ticks at least."""
LONGEST_SESSION_S = 120.0


class ZooKeeper:
    """One server on loopback."""

    def __init__(self, process: subprocess.Popen[bytes], port: int) -> None:
        self._process = process
        self.hosts = f"127.0.0.1:{port}"

    def freeze(self) -> None:
        """Stops it from answering, as if the network were down."""
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def end_session(self, session: int, password: bytes) -> None:
        """Ends a client's session, as if nothing had been heard of that for long enough."""
        client = KazooClient(self.hosts, client_id=(session, password))
        client.start(DEADLINE_S)
        client.stop()
        client.close()


@contextlib.contextmanager
def zookeeper_server() -> Iterator[ZooKeeper]:
    """Starts a server; skips the test where that cannot be."""
    java, library = shutil.which("java"), JARS / "zookeeper.jar"
    if java is None or not library.exists():
        pytest.skip(f"ZooKeeper is not installed ({library}, java)")
    (block,) = reserve_blocks(1)  # For as long as it runs: no other test may take the port before it does.
    port = block.first
    options = ["-Xmx64m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-Dzookeeper.admin.enableServer=false"]
    main = "org.apache.zookeeper.server.ZooKeeperServerMain"
    with tempfile.TemporaryDirectory(prefix="dike-zookeeper-") as folder:
        log, config = Path(folder) / "log", Path(folder) / "zoo.cfg"
        settings = {"clientPort": port, "dataDir": folder, "tickTime": TICK_MS}
        settings["maxSessionTimeout"] = round(1000 * LONGEST_SESSION_S)
        config.write_text("".join(f"{name}={value}\n" for name, value in settings.items()))
        command = [java, *options, "-cp", f"{library}:{JARS / 'slf4j-nop.jar'}", main, str(config)]
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
