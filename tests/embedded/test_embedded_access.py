"""Who is heard by an embedded Mesos: its own account, if it knows the secret, and nobody else."""

from __future__ import annotations

import os
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from framework.embedded.access import ClusterAccess, known_access
from framework.embedded.agents import AgentSpec
from framework.embedded.cluster import EmbeddedCluster
from framework.embedded.libmesos.peers import uid_of_peer
from tests.embedded.embedded_support import RawFramework, basic
from tests.waiting import DEADLINE_S

NOBODY = 65534
STRANGER = """
import encodings.idna, os, socket, sys
os.setuid(65534)  # Cannot import any more where Python is not for everybody.
host, port, request = sys.argv[1], int(sys.argv[2]), sys.argv[3].encode()
connection = socket.create_connection((host, port), timeout=60)
try:
    connection.sendall(request)
    answer = connection.recv(1)
except ConnectionError:
    answer = b""
print("answered" if answer else "closed")
"""
AS_THE_MASTER = (
    "POST /slave(1)/mesos.internal.ShutdownMessage HTTP/1.1\r\n"
    "Libprocess-From: master@{master}\r\nConnection: Keep-Alive\r\nContent-Length: 0\r\n\r\n"
)
"""What the master sends an agent that it wants to end, with all its tasks."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[EmbeddedCluster]:
    with EmbeddedCluster([AgentSpec("cpus:1;mem:256")]) as started:
        yield started


@pytest.mark.mesos
@pytest.mark.parametrize(
    ("daemon", "path"),
    [
        *(("master", path) for path in ("state", "master/state?jsonp=x", "slaves", "metrics/snapshot", "flags")),
        *(("agent", path) for path in ("state", "slave(1)/state?jsonp=x", "containers", "files/browse?path=/")),
    ],
)
def test_nothing_is_told_without_the_secret(cluster: EmbeddedCluster, daemon: str, path: str) -> None:
    port = cluster.agents[0].port if daemon == "agent" else int(cluster.master.rpartition(":")[2])
    url = f"http://{cluster.access.address}:{port}/{path}"
    assert httpx.get(url, trust_env=False, timeout=DEADLINE_S).status_code == 401
    assert httpx.get(url, auth=("dike", "guessed"), trust_env=False, timeout=DEADLINE_S).status_code == 401
    assert httpx.get(url, auth=cluster.access.credentials, trust_env=False, timeout=DEADLINE_S).status_code != 401


@pytest.mark.mesos
@pytest.mark.parametrize("path", ["master/teardown", "master/maintenance/schedule", "api/v1", "logging/toggle"])
def test_nothing_is_done_without_the_secret(cluster: EmbeddedCluster, path: str) -> None:
    assert (
        httpx.post(
            f"http://{cluster.master}/{path}", json={"type": "GET_STATE"}, trust_env=False, timeout=DEADLINE_S
        ).status_code
        == 401
    )


@pytest.mark.mesos
def test_frameworks_must_know_the_secret(cluster: EmbeddedCluster) -> None:
    with pytest.raises(PermissionError, match="401"):
        RawFramework(cluster.master, headers={"Authorization": basic("dike", "wrong")}, principal="dike")
    with pytest.raises(PermissionError, match="401"):
        RawFramework(cluster.master, headers={})
    # Drivers that speak libprocess would have to authenticate by SASL, which the library has not.
    assert cluster.state()["flags"]["authenticate_frameworks"] == "true"
    framework = RawFramework(cluster.master)
    framework.launch("secret", {"value": "true"})
    framework.wait_for("secret", "TASK_FINISHED")
    framework.close()


@pytest.mark.mesos
@pytest.mark.skipif(os.getuid() != 0, reason="only root can act as somebody else")
def test_other_accounts_are_not_heard(cluster: EmbeddedCluster) -> None:
    (agent,) = cluster.agents
    for port, request in (
        (int(cluster.master.rpartition(":")[2]), "GET /version HTTP/1.0\r\n\r\n"),
        (agent.port, "GET /version HTTP/1.0\r\n\r\n"),
        (agent.port, AS_THE_MASTER.format(master=cluster.master)),
    ):
        stranger = [sys.executable, "-c", STRANGER, cluster.access.address, str(port), request]
        assert subprocess.check_output(stranger, text=True, timeout=DEADLINE_S) == "closed\n"
    cluster.wait_for_agents()
    assert f"refused a connection of account {NOBODY}" in (cluster.work_dir / "agent-0.log").read_text()


def test_only_its_own_account_reads_its_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DIKE_CACHE", str(tmp_path / "cache"))
    access = ClusterAccess()
    previous = os.umask(0)
    try:
        access.write(tmp_path / "credentials.json", tmp_path / "zygotes.sock")
    finally:
        os.umask(previous)
    modes = [stat.S_IMODE(path.stat().st_mode) for path in (access.secret_file, tmp_path / "credentials.json")]
    assert modes == [0o600, 0o600]
    assert stat.S_IMODE(access.secret_file.parent.stat().st_mode) == 0o700
    assert known_access(access.address) == access
    assert access.zygotes == ""
    (tmp_path / "zygotes.sock").touch()
    assert Path(access.zygotes).resolve() == tmp_path / "zygotes.sock"
    assert known_access("127.0.0.1") is None
    assert known_access("..") is None


@pytest.mark.mesos
def test_the_secret_goes_with_the_cluster() -> None:
    with EmbeddedCluster([AgentSpec("cpus:1;mem:256")]) as ending:
        assert ending.access.secret_file.exists()
        assert Path(ending.access.zygotes).resolve() == Path(ending.zygotes)
    assert not ending.access.secret_file.exists()
    assert not ending.access.zygotes_link.is_symlink()


@pytest.mark.integration
@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6])
def test_the_account_at_the_other_end(family: socket.AddressFamily) -> None:
    with socket.create_server(("127.45.6.7", 0)) as listening, socket.socket(family) as client:
        prefix = "" if family == socket.AF_INET else "::ffff:"
        client.connect((f"{prefix}127.45.6.7", listening.getsockname()[1]))
        accepted, _ = listening.accept()
        with accepted:
            assert uid_of_peer(accepted) == os.getuid()
            client.close()
            assert uid_of_peer(accepted) is None
