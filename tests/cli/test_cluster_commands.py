"""`dike cluster`, as a user types it, with all machines of the cluster on this one."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from framework.embedded.library import ensure_library
from tests.waiting import wait_until

pytestmark = pytest.mark.mesos
DEADLINE_S = 180
Dike = Callable[..., "subprocess.CompletedProcess[str]"]
TOKEN = "7f3c9a." + "A" * 64
SMALL = ("--resources", "cpus:1;mem:1024")


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    cache = tmp_path_factory.mktemp("cluster-cache")
    library = ensure_library()
    shutil.copytree(library.parent, cache / library.parent.name, ignore=shutil.ignore_patterns("making-*"))
    kept = {name: value for name, value in os.environ.items() if name not in ("DIKE_PRIVATE", "DIKE_MASTER")}
    return {**kept, "DIKE_CACHE": str(cache)}


@pytest.fixture(scope="module")
def dike(environment: dict[str, str]) -> Iterator[Dike]:
    """Runs `dike ...` with a cache of its own."""

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command(*arguments), env=environment, capture_output=True, text=True, timeout=DEADLINE_S, check=False
        )

    yield run
    run("cluster", "stop")


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "framework", *arguments]


def free_address() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


@pytest.fixture(scope="module")
def head(dike: Dike) -> str:
    """The line with which other machines join the cluster."""
    started = dike("cluster", "start", "--name", "lab", "--listen", free_address(), "--machine-name", "box", *SMALL)
    assert started.returncode == 0, started.stderr
    first, second = started.stdout.splitlines()
    assert first.startswith("dike: cluster 'lab' is up at 127.0.0.1:")
    return second.strip()


def status(dike: Dike) -> dict[str, bool]:
    done = dike("cluster", "status", "--format", "json")
    assert done.returncode == 0, done.stderr
    return {one["name"]: one["active"] for one in json.loads(done.stdout)["machines"]}


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("join",), "This machine has joined no cluster as"),
        (("join", "10.0.0.5:8690"), "To join, name the head's address and a token"),
        (("join", "--token", TOKEN), "To join, name the head's address and a token"),
        (("join", "10.0.0.5:", "--token", TOKEN), "'10.0.0.5:' is not an address of a cluster; write HOST:PORT"),
        (("join", "127.0.0.1", "--token", TOKEN), "Nothing answers at 127.0.0.1"),
        (("join", "127.0.0.1:9", "--token", TOKEN, "--resources", "cpu:2"), "did you mean cpus?"),
        (("join", "127.0.0.1:9", "--token", "7f3c9a.X4k"), "The token is incomplete"),
        (("join", "127.0.0.1:9", "--token", TOKEN, "--name", "a b"), "'a b' is not a name of a machine"),
        (("join", "127.0.0.1:9", "--token", TOKEN, "--resources", "cpus"), '"cpus" is not a resource'),
        (("join", "127.0.0.1:9", "--token", TOKEN), "Nothing answers at 127.0.0.1:9 (Connection refused)"),
        (("join", "127.0.0.1:9", "--token-file", "/nonexistent"), "/nonexistent"),
        (("start", "--listen", "8690:"), "'8690:' is not an address of a cluster; write HOST:PORT"),
        (("start", "--listen", "192.0.2.77:8690"), "The cluster cannot listen at 192.0.2.77:8690"),
        (("start", "--name", "a/b"), "'a/b' is not a name of a cluster"),
    ],
)
def test_bad_input_is_one_sentence(
    environment: dict[str, str], tmp_path: Path, arguments: tuple[str, ...], sentence: str
) -> None:
    shutil.copytree(ensure_library().parent, tmp_path / ensure_library().parent.name)
    own = {**environment, "DIKE_CACHE": str(tmp_path)}
    done = subprocess.run(
        command("cluster", *arguments), env=own, capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )
    assert done.returncode == 2, done.stderr
    last = done.stderr.splitlines()[-1]
    assert last.startswith("dike: ")
    assert sentence in last


def test_without_a_cluster_commands_say_how_to_get_one(environment: dict[str, str], tmp_path: Path) -> None:
    own = {**environment, "DIKE_CACHE": str(tmp_path)}
    for name in ("status", "token", "leave"):
        done = subprocess.run(
            command("cluster", name), env=own, capture_output=True, text=True, timeout=DEADLINE_S, check=False
        )
        assert done.returncode == 1
        assert "start one with `dike cluster start`, or join one with `dike cluster join`" in done.stderr


def test_a_second_start_is_refused(dike: Dike, head: str) -> None:
    again = dike("cluster", "start", "--name", "lab", "--listen", free_address())
    assert again.returncode == 2
    assert "This machine is the head of the cluster 'lab', which is up already" in again.stderr
    other = dike("cluster", "start", "--name", "other", "--listen", free_address())
    assert other.returncode == 2
    assert "is the head of the cluster 'lab'" in other.stderr
    assert head.split()[3] in dike("cluster", "token").stdout


def test_a_member_joins_leaves_and_joins_again(dike: Dike, head: str) -> None:
    joined = dike(*head.split()[1:], "--name", "gpu1", *SMALL)
    assert joined.returncode == 0, joined.stderr
    assert joined.stdout == "dike: joined 'lab' as gpu1: 1 CPUs, 1.0 GiB\n"
    assert status(dike) == {"box": True, "gpu1": True}
    again = dike(*head.split()[1:], "--name", "gpu1", *SMALL)
    assert again.returncode == 2
    assert "in the cluster 'lab' as gpu1 already" in again.stderr


def test_the_head_does_not_join_itself(dike: Dike, head: str) -> None:
    """Its resources would count twice."""
    joined = dike(*head.split()[1:], "--name", "again")
    assert joined.returncode == 2
    assert "is the head of the cluster 'lab', which is up already" in joined.stderr


def test_tokens_are_listed_and_revoked(dike: Dike, head: str) -> None:
    line = dike("cluster", "token", "--expires", "30m").stdout.strip()
    identifier = line.split()[-1].partition(".")[0]
    assert f"{identifier}  expires in 0.5 h" in dike("cluster", "token", "--list").stdout
    revoked = dike("cluster", "token", "--revoke", line.split()[-1])
    assert revoked.returncode == 0, revoked.stderr
    refused = dike(*line.split()[1:], "--name", "late", *SMALL)
    assert refused.returncode == 2
    assert f"The token {identifier} is not valid" in refused.stderr
    unknown = dike("cluster", "token", "--revoke", identifier)
    assert unknown.returncode == 2
    short = dike("cluster", "token", "--expires", "soon")
    assert short.returncode == 2
    assert "'soon' is not a time" in short.stderr


def test_a_member_in_the_foreground_drains_at_sigterm(dike: Dike, environment: dict[str, str], head: str) -> None:
    member = subprocess.Popen(
        command(*head.split()[1:], "--name", "pilot", "--foreground", *SMALL),
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert member.stdout is not None
    assert member.stdout.readline().startswith("dike: joined 'lab' as pilot")
    assert status(dike)["pilot"]
    member.send_signal(signal.SIGTERM)
    output, _ = member.communicate(timeout=DEADLINE_S)
    assert member.returncode == 0
    assert "tasks are saved first" in output
    wait_until(lambda: not status(dike).get("pilot"), "the end of the agent")
    # It may come back without a token.
    again = dike("cluster", "join", "--name", "pilot")
    assert again.returncode == 0, again.stderr
    assert status(dike)["pilot"]


def test_a_removed_member_is_not_listed(dike: Dike, head: str) -> None:
    joined = dike(*head.split()[1:], "--name", "old", *SMALL)
    assert joined.returncode == 0, joined.stderr
    removed = dike("cluster", "remove", "old")
    assert removed.returncode == 0, removed.stderr
    wait_until(lambda: not status(dike).get("old"), "the end of its agent")
    assert dike("cluster", "remove", "old").returncode == 2
    assert "is the head itself" in dike("cluster", "remove", "box").stderr


def test_commands_use_the_cluster_unless_they_are_private(dike: Dike, head: str, tmp_path: Path) -> None:
    script = tmp_path / "plain.py"
    script.write_text("import dike\n\nx = dike.params(x=0)['x']\ndike.report(1, loss=float(x))\n")
    options = ("--param", "x=1", "--storage", f"sqlite:///{tmp_path}/s.db", "--checkpoint-dir", str(tmp_path / "c"))
    limits = ("--slot-mem", "512")
    used = dike("tune", str(script), *options, *limits, "--name", "on-cluster")
    assert "using the cluster 'lab' (--private uses this machine alone)" in used.stderr
    assert used.returncode == 0, used.stderr + used.stdout
    alone = dike("tune", str(script), *options, *limits, "--name", "alone", "--private")
    assert alone.returncode == 0, alone.stderr + alone.stdout
    assert "using the cluster" not in alone.stderr
