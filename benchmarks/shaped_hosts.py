"""Emulates hosts with slow network cards on one machine: network namespaces on bridges, each link shaped both ways.

A host is a network namespace with one card (`veth`), whose other end is a port of its rack's bridge. The two bridges,
joined by another shaped link, are in their own namespace, isolated from the machine's network. A token bucket filter
(`tc ... tbf`) at the card limits what a host sends, one at its port what it receives. Tasks of one host communicate
over its loopback, unshaped.
"""

from __future__ import annotations

import itertools
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import IO

import psutil

PREFIX = "dike-hosts"
BURST = "64kb"
LATENCY = "200ms"
"""Maximum time of a packet in a queue. With short queues packet loss, not the rate, limits TensorFlow's bursts."""
NETWORK = "10.77.0"
RACKS = (0, 0, 1, 1, 1)
"""The rack of each host."""
UNSHAPED_MBPS = 10_000.0
"""Rate between the racks of a single switch: more than all cards of one rack together."""
COMMAND_TIMEOUT_S = 30.0
TRANSFER_TIMEOUT_S = 60.0
REMOVE_TIMEOUT_S = 10.0
_NAME = re.compile(rf"{PREFIX}-(\d+)-\d+-\w+")
"""Process id, number of the `ShapedHosts` in that process, and name of the host."""
_made = itertools.count()
_RECEIVER = """
import socket, sys
server = socket.create_server((sys.argv[1], 0))
server.settimeout(float(sys.argv[2]))
print(server.getsockname()[1], flush=True)
connection, _ = server.accept()
connection.settimeout(float(sys.argv[2]))
while connection.recv(1 << 20):
    pass
connection.sendall(b"x")
"""
_SENDER = """
import socket, sys, time
data = bytes(int(sys.argv[3]))
connection = socket.create_connection((sys.argv[1], int(sys.argv[2])), float(sys.argv[4]))
start = time.monotonic()
connection.sendall(data)
connection.shutdown(socket.SHUT_WR)
connection.recv(1)
print(time.monotonic() - start)
"""


class HostsError(Exception):
    """The hosts could not be made or used; the message has the command and its output."""


def unsupported_reason() -> str | None:
    """Returns why this machine cannot make such hosts, in one sentence; None if it can."""
    missing = [name for name in ("ip", "tc") if shutil.which(name) is None]
    if missing:
        return f"The command '{missing[0]}' is missing: install the package iproute2."
    if os.geteuid() != 0:
        return "Network namespaces need root: run this as root."
    try:
        with ShapedHosts([100.0]):
            return None
    except HostsError as error:
        return f"This machine does not allow network namespaces with shaped links: {error}"


class ShapedHosts:
    """Hosts in two racks; a context manager that removes them on exit.

    Entry removes stale hosts of killed processes.

    Args:
        rates_mbps: speed of each host's card in Mbit/s, each way, Ethernet headers included.

    Raises:
        HostsError: if a namespace, a link or a filter cannot be made.
    """

    def __init__(self, rates_mbps: Sequence[float]) -> None:
        self._rates = list(rates_mbps)
        prefix = f"{PREFIX}-{os.getpid()}-{next(_made)}"
        self._switch = f"{prefix}-switch"
        self._names = [f"{prefix}-{host}" for host in range(len(self._rates))]
        self._started: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> ShapedHosts:
        _remove_stale()
        try:
            self._make()
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._remove()

    def address(self, host: int) -> str:
        return f"{NETWORK}.{host + 1}"

    def card(self, host: int) -> tuple[str, str]:
        """Namespace of a host, and its network card."""
        return self._ends(host)[0]

    def set_rate(self, host: int, rate_mbps: float) -> None:
        """Changes the speed of a host's card, in Mbit/s, each way."""
        for namespace, device in self._ends(host):
            _run("tc", "-n", namespace, *_filter("change", device, rate_mbps))

    def set_uplink(self, rate_mbps: float) -> None:
        """Changes the speed between the two racks, in Mbit/s, each way."""
        for rack in (0, 1):
            _run("tc", "-n", self._switch, *_filter("change", f"uplink{rack}", rate_mbps))

    def start(
        self,
        host: int,
        command: Sequence[str],
        *,
        cwd: Path | None = None,
        env: dict[str, str] | None = None,
        stderr: IO[bytes] | None = None,
    ) -> subprocess.Popen[bytes]:
        """Starts a process on a host, with unbuffered pipes to its standard input and from its standard output."""
        process = subprocess.Popen(
            ["ip", "netns", "exec", self._names[host], *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            bufsize=0,
            cwd=cwd,
            env=env,
        )
        self._started.append(process)
        return process

    def transfer_mbps(self, source: int, target: int, count: int) -> float:
        """Sends `count` bytes over one TCP connection; returns the payload rate in Mbit/s."""
        limit, address = str(TRANSFER_TIMEOUT_S), self.address(target)
        with self.start(target, [sys.executable, "-c", _RECEIVER, address, limit]) as receiver:
            try:
                assert receiver.stdout is not None
                port = receiver.stdout.readline().decode().strip()
                with self.start(source, [sys.executable, "-c", _SENDER, address, port, str(count), limit]) as sender:
                    taken, _ = sender.communicate()
            finally:
                receiver.kill()
        if sender.returncode:
            raise HostsError(f"Host {source} could not send to host {target}: exit status {sender.returncode}.")
        return count * 8 / 1e6 / float(taken)

    def _ends(self, host: int) -> tuple[tuple[str, str], tuple[str, str]]:
        """Namespace and device of both ends of a host's link; each end's filter limits outgoing traffic."""
        return (self._names[host], "eth0"), (self._switch, f"port{host}")

    def _make(self) -> None:
        inside = ("ip", "-n", self._switch, "link")
        _run("ip", "netns", "add", self._switch)
        _run(*inside, "add", "uplink0", "type", "veth", "peer", "name", "uplink1")
        for rack in (0, 1):
            _run(*inside, "add", f"rack{rack}", "type", "bridge")
            _run(*inside, "set", f"rack{rack}", "up")
            _run(*inside, "set", f"uplink{rack}", "master", f"rack{rack}", "up")
            _run("tc", "-n", self._switch, *_filter("add", f"uplink{rack}", UNSHAPED_MBPS))
        for host, name in enumerate(self._names):
            port = f"port{host}"
            _run("ip", "netns", "add", name)
            _run("ip", "-n", name, "link", "add", "eth0", "type", "veth", "peer", "name", port, "netns", self._switch)
            _run("ip", "-n", self._switch, "link", "set", port, "master", f"rack{RACKS[host]}", "up")
            _run("ip", "-n", name, "address", "add", f"{self.address(host)}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                _run("ip", "-n", name, "link", "set", device, "up")
            for namespace, device in self._ends(host):
                _run("tc", "-n", namespace, *_filter("add", device, self._rates[host]))

    def _remove(self) -> None:
        for process in self._started:
            process.kill()  # not yet in its namespace, it would survive the removal
        existing = _namespaces()
        for name in (*self._names, self._switch):
            if name in existing:
                _remove_namespace(name)


def _filter(verb: str, device: str, rate_mbps: float) -> list[str]:
    rate = f"{rate_mbps * 1e6:.0f}bit"
    return ["qdisc", verb, "dev", device, "root", "tbf", "rate", rate, "burst", BURST, "latency", LATENCY]


def _remove_stale() -> None:
    for name in _namespaces():
        match = _NAME.fullmatch(name)
        if match is not None and not psutil.pid_exists(int(match[1])):
            try:
                _remove_namespace(name)
            except HostsError:
                # Another process may have removed it.
                if name in _namespaces():
                    raise


def _namespaces() -> list[str]:
    return [line.split()[0] for line in _run("ip", "netns", "list").splitlines() if line.strip()]


def _remove_namespace(name: str) -> None:
    """Kills the processes on a host, then removes it; its links go with it."""
    deadline = time.monotonic() + REMOVE_TIMEOUT_S
    while (pids := _run("ip", "netns", "pids", name).split()) and time.monotonic() < deadline:
        for pid in pids:
            try:
                os.kill(int(pid), signal.SIGKILL)
            except ProcessLookupError:
                continue
        time.sleep(0.02)
    _run("ip", "netns", "delete", name)


def _run(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise HostsError(f"'{' '.join(command)}' could not be run: {error}.") from error
    if done.returncode:
        raise HostsError(f"'{' '.join(command)}' failed: {(done.stderr or done.stdout).strip()}.")
    return done.stdout
