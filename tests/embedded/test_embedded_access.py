"""An embedded Mesos accepts connections only from its own account, and only with its secret."""

from __future__ import annotations

import os
import socket
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from dike.exceptions import DikeError
from executor.environment import ZygoteKind
from executor.zygote_pool import warm
from framework.embedded import detached
from framework.embedded.access import ClusterAccess, find_access
from framework.embedded.agents import AgentSpec
from framework.embedded.cluster import EmbeddedCluster
from framework.embedded.libmesos.peers import uid_of_peer
from framework.user_folders import private_cache_dir
from tests.embedded.embedded_support import RawFramework, basic
from tests.waiting import DEADLINE_S, wait_until

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
        access.write_credentials(tmp_path / "credentials.json")
        access.publish(tmp_path / "zygotes.sock")
    finally:
        os.umask(previous)
    modes = [stat.S_IMODE(path.stat().st_mode) for path in (access.secret_file, tmp_path / "credentials.json")]
    assert modes == [0o600, 0o600]
    assert stat.S_IMODE(access.secret_file.parent.stat().st_mode) == 0o700
    assert find_access(access.address) == access
    assert access.zygotes == ""
    (tmp_path / "zygotes.sock").touch()
    assert Path(access.zygotes).resolve() == tmp_path / "zygotes.sock"
    assert find_access("127.0.0.1") is None
    assert find_access("..") is None


def _prepared_by_another(cache: Path, private: Path) -> None:
    private.mkdir()
    os.chown(private, 12345, 12345)


def _open_to_others(cache: Path, private: Path) -> None:
    private.mkdir()
    private.chmod(0o777)


def _link(cache: Path, private: Path) -> None:
    (cache / "elsewhere").mkdir(mode=0o700)
    private.symlink_to(cache / "elsewhere")


def _file(cache: Path, private: Path) -> None:
    private.touch(mode=0o600)


def _replaceable(cache: Path, private: Path) -> None:
    cache.chmod(0o777)


def _cache_of_another(cache: Path, private: Path) -> None:
    os.chown(cache, 12345, 12345)


@pytest.mark.parametrize(
    "prepare", [_prepared_by_another, _open_to_others, _link, _file, _replaceable, _cache_of_another]
)
def test_a_cache_in_which_another_account_could_take_our_place_is_refused(
    prepare: Callable[[Path, Path], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if prepare in (_prepared_by_another, _cache_of_another) and os.getuid() != 0:
        pytest.skip("only root can give a folder to another account")
    cache = tmp_path / "cache"
    cache.mkdir()
    cache.chmod(0o1777)
    monkeypatch.setenv("DIKE_CACHE", str(cache))
    assert private_cache_dir() == cache / f"private-{os.getuid()}"
    private_cache_dir().rmdir()
    prepare(cache, cache / f"private-{os.getuid()}")
    for use in (
        private_cache_dir,
        lambda: find_access("127.1.2.3"),
        lambda: ClusterAccess().publish(tmp_path / "zygotes"),
        detached.find,
    ):
        with pytest.raises(DikeError, match="another account could"):
            use()


@pytest.mark.integration
def test_a_zygote_server_of_another_account_is_not_asked(tmp_path: Path) -> None:
    if os.getuid() != 0:
        pytest.skip("only root can listen as another account")
    path = tmp_path / "zygotes.sock"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(path))
        # The socket's account is the one that called `listen`.
        os.seteuid(12345)
        try:
            listener.listen()
        finally:
            os.seteuid(0)
        with pytest.raises(PermissionError, match="belongs to account 12345"):
            warm(str(path), ZygoteKind("executor.slot_process", ("json",), ()))


@pytest.mark.mesos
def test_the_secret_goes_with_the_cluster() -> None:
    with EmbeddedCluster([AgentSpec("cpus:1;mem:256")]) as ending:
        assert ending.access.secret_file.exists()
        # A cluster does not wait for its zygote server, which is optional.
        published = wait_until(lambda: ending.access.zygotes, "the zygote server's socket")
        assert Path(published).resolve() == Path(ending.zygotes)
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
