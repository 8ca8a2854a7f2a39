"""Hosts made of network namespaces: links have the specified speeds, and the hosts are removed completely."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import measured
from benchmarks.shaped_hosts import PREFIX, HostsError, ShapedHosts, unsupported_reason
from tests.waiting import is_alive, wait_until

pytestmark = pytest.mark.integration

REASON = unsupported_reason()
needs_namespaces = pytest.mark.skipif(REASON is not None, reason=REASON or "")
COUNT = 1_500_000
"""Bytes sent: far more than the burst of a filter."""
RATIO = 4.0
ROOT = Path(__file__).parent.parent.parent


def _left(pid: int) -> list[str]:
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True, timeout=30).stdout
    return [line for line in listed.splitlines() if line.startswith(f"{PREFIX}-{pid}-")]


def test_without_the_commands_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert list(measured.measure()) == ["Not measured: The command 'ip' is missing: install the package iproute2."]


def test_without_root_it_says_that_it_needs_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: f"/sbin/{name}")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert list(measured.measure()) == ["Not measured: Network namespaces need root: run this as root."]


@needs_namespaces
def test_the_slower_card_decides_in_both_directions_and_can_be_changed() -> None:
    slow, fast = 20.0, 20.0 * RATIO
    with ShapedHosts([slow, fast, 4 * fast]) as hosts:

        def reaches(rate_mbps: float, source: int, target: int) -> None:
            """A link is never faster than it is said to be, and as fast as that once nothing else delays a transfer."""

            def is_as_fast() -> bool:
                mbps = hosts.transfer_mbps(source, target, COUNT)
                assert mbps < rate_mbps * 1.1
                return mbps > rate_mbps * 0.8

            wait_until(is_as_fast, f"{rate_mbps} Mbit/s from host {source} to host {target}")

        for pair in ((1, 2), (2, 1)):
            reaches(fast, *pair)
        for pair in ((0, 2), (2, 0), (0, 1), (1, 0)):
            reaches(slow, *pair)
        hosts.set_rate(0, fast)
        reaches(fast, 0, 2)


@needs_namespaces
def test_hosts_end_with_their_processes_whatever_happens_inside() -> None:
    hosts = ShapedHosts([100.0, 100.0])

    def fail() -> None:
        with hosts:
            started.append(hosts.start(1, ["sleep", "600"]))
            assert len(_left(os.getpid())) == 3
            raise HostsError("The work failed.")

    started: list[subprocess.Popen[bytes]] = []
    with pytest.raises(HostsError, match="The work failed"):
        fail()
    assert _left(os.getpid()) == []
    with started[0] as process:
        assert process.wait(30) == -signal.SIGKILL


@needs_namespaces
def test_a_link_that_cannot_be_made_names_the_command_and_leaves_nothing() -> None:
    with pytest.raises(HostsError, match=r"^'tc .* tbf rate 0bit .* failed: "), ShapedHosts([100.0, 0.0]):
        pass
    assert _left(os.getpid()) == []


@needs_namespaces
def test_what_a_killed_run_left_is_removed_by_the_next() -> None:
    # The process is on its host before the program is killed: only from there is it known whose it is.
    program = (
        "import os, signal\n"
        "from benchmarks.shaped_hosts import ShapedHosts\n"
        "hosts = ShapedHosts([100.0, 100.0]).__enter__()\n"
        "sleeper = hosts.start(0, ['sh', '-c', 'echo; exec sleep 600'])\n"
        "sleeper.stdout.readline()\n"
        "print(sleeper.pid, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    killed = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    with killed:
        output, _ = killed.communicate(timeout=60)
    sleeper = int(output)
    assert len(_left(killed.pid)) == 3
    with ShapedHosts([100.0]):
        assert _left(killed.pid) == []
        assert not is_alive(sleeper)
