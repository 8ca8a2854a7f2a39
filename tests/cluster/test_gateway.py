"""Who may join a cluster, and what its gateways carry: real TLS connections on this machine."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import pwd
import secrets
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dike.exceptions import BadInputError, DikeError
from framework.cluster import admission, join
from framework.cluster import gateway as gateways
from framework.cluster.authority import Authority, client_context, first_context, joining_context
from framework.cluster.records import AGENT, HEAD_ROLE, STORE, ClusterFolder, Description, Membership, random_network
from framework.embedded.ports import is_free, reserve_blocks
from tests.waiting import wait_until

pytestmark = pytest.mark.integration


class RunningGateway:
    """A gateway in a thread of this process."""

    def __init__(self, gateway: gateways.HeadGateway | gateways.MemberGateway) -> None:
        self.gateway = gateway
        self._loop = asyncio.new_event_loop()
        self._task: asyncio.Task[None] | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> RunningGateway:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        assert self._task is not None
        self._loop.call_soon_threadsafe(self._task.cancel)
        self._thread.join()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._task = self._loop.create_task(self.gateway.run())
        with contextlib.suppress(asyncio.CancelledError):
            self._loop.run_until_complete(self._task)
        for task in asyncio.all_tasks(self._loop):
            task.cancel()
        self._loop.run_until_complete(asyncio.sleep(0))


class Head:
    """The head of a cluster, without Mesos."""

    def __init__(self, path: Path) -> None:
        self.folder = ClusterFolder(path)
        self.folder.make()
        Authority.create(self.folder.keys, "lab")
        # Reserved as long as this object lives: no other test may take the ports first.
        [self.block] = reserve_blocks(1)
        port, first, *_ = self.block
        self.address = f"127.0.0.1:{port}"
        cluster = Description("lab", random_network(), first, self.address, secrets.token_urlsafe())
        self.own = Membership(HEAD_ROLE, "box", 1, "127.0.0.1", cluster, listen=self.address)
        self.folder.write_membership(self.own)

    def running(self) -> RunningGateway:
        return RunningGateway(gateways.HeadGateway(self.folder, self.own))


@pytest.fixture
def head(tmp_path: Path) -> Iterator[Head]:
    made = Head(tmp_path / "head")
    with made.running():
        _, _, port = made.address.rpartition(":")
        wait_until(lambda: not is_free(int(port)), "the gateway")
        yield made


def elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has machines that join from now on look like other machines than the head's."""
    for module in (admission, join):
        monkeypatch.setattr(module, "machine_id", lambda: secrets.token_hex(4))


def joined(head: Head, path: Path, name: str = "gpu1") -> tuple[ClusterFolder, Membership]:
    folder = ClusterFolder(path)
    answer = join.ask_to_join(folder, head.address, head.folder.new_token(), name)
    folder.write_membership(answer.membership)
    return folder, answer.membership


def test_a_machine_joins_with_a_token(head: Head, tmp_path: Path) -> None:
    folder, membership = joined(head, tmp_path / "member")
    assert membership.cluster == head.own.cluster
    assert (membership.name, membership.index) == ("gpu1", 2)
    assert membership.is_here
    assert list(head.folder.members()) == ["gpu1"]
    assert "gpu1" in join.ask_head(folder, membership.cluster, {"kind": "members"})["members"]


def test_two_machines_of_one_name_get_two_names(head: Head, tmp_path: Path) -> None:
    folder, first = joined(head, tmp_path / "first")
    with RunningGateway(gateways.MemberGateway(folder, first)):
        seen = lambda: join.ask_head(folder, first.cluster, {"kind": "members"})["members"]["gpu1"]  # noqa: E731
        wait_until(lambda: seen() is not None, "the first member to be seen")
        _, second = joined(head, tmp_path / "second")
    assert (second.name, second.index) == ("gpu1-2", 3)


def test_a_machine_that_joins_again_keeps_its_name_and_address(head: Head, tmp_path: Path) -> None:
    old, first = joined(head, tmp_path / "first")
    _, second = joined(head, tmp_path / "second")
    assert (second.name, second.index) == (first.name, first.index)
    with pytest.raises(DikeError, match="not a member of the cluster 'lab'"):
        join.ask_head(old, first.cluster, {"kind": "members"})


def test_a_wrong_token_is_refused(head: Head, tmp_path: Path) -> None:
    token = head.folder.new_token()
    identifier, _, rest = token.partition(".")
    wrong = f"{identifier}.{'A' if rest[0] != 'A' else 'B'}{rest[1:]}"
    with pytest.raises(BadInputError, match=rf"refuses this machine\. The token {identifier} is not valid"):
        join.ask_to_join(ClusterFolder(tmp_path / "member"), head.address, wrong, "gpu1")
    assert head.folder.members() == {}


def test_an_expired_token_is_refused(head: Head, tmp_path: Path) -> None:
    token = head.folder.new_token(expires_in_s=0.0)
    with pytest.raises(BadInputError, match="has expired, or was revoked"):
        join.ask_to_join(ClusterFolder(tmp_path / "member"), head.address, token, "gpu1")


def test_a_revoked_token_is_refused(head: Head, tmp_path: Path) -> None:
    token = head.folder.new_token()
    head.folder.revoke_token(token.partition(".")[0])
    with pytest.raises(BadInputError, match="has expired, or was revoked"):
        join.ask_to_join(ClusterFolder(tmp_path / "member"), head.address, token, "gpu1")


def test_nothing_is_sent_to_a_head_that_is_not_the_tokens(head: Head, tmp_path: Path) -> None:
    """A server in place of the head does not get the token's secret."""
    other = Head(tmp_path / "other")
    with pytest.raises(BadInputError, match="is not the head that made this token"):
        join.ask_to_join(ClusterFolder(tmp_path / "member"), head.address, other.folder.new_token(), "gpu1")
    assert head.folder.members() == {}


@pytest.mark.parametrize(
    ("here", "there"), [("3.11.4", "3.12.0"), ("2.21.0", "2.22.0"), ("0.1.0", "0.2.0"), ("3.11.4", "none")]
)
def test_versions_that_matter_are_refused(here: str, there: str) -> None:
    for name in admission.MUST_BE_EQUAL:
        other = {} if there == "none" else {name: there}
        with pytest.raises(BadInputError, match=rf"The head has {name} {here} and this machine {there}: install"):
            admission.compare_versions({name: here}, other)


def test_other_differences_are_warnings() -> None:
    here, there = {"TensorFlow": "2.21.0", "NumPy": "1.26.0"}, {"TensorFlow": "2.21.1", "NumPy": "2.1.0"}
    assert admission.compare_versions(here, there) == (
        "the head has TensorFlow 2.21.0 and this machine 2.21.1",
        "the head has NumPy 1.26.0 and this machine 2.1.0",
    )
    assert admission.compare_versions(here, here) == ()


def test_another_version_cannot_join(head: Head, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    versions = admission.own_versions()
    asked = iter([{**versions, "TensorFlow": "1.15.0"}])
    monkeypatch.setattr(join, "own_versions", lambda: next(asked, versions))
    with pytest.raises(BadInputError, match=r"and this machine 1\.15\.0: install the same version on both"):
        joined(head, tmp_path / "member")


def test_a_stranger_without_a_certificate_may_only_join(head: Head) -> None:
    authority = head.folder.keys.authority.read_text()
    for kind in ("members", "spare", "alive", "leave"):
        answer = _answer(head, joining_context(authority), {"kind": kind})
        assert answer == {"error": "This machine is not a member of the cluster 'lab'."}
    assert _answer(head, joining_context(authority), {"kind": "open", "to": "master"}).keys() == {"error"}


def test_a_certificate_of_another_authority_is_refused(head: Head, tmp_path: Path) -> None:
    other = Head(tmp_path / "other")
    context = first_context()
    context.load_cert_chain(other.folder.keys.certificate, other.folder.keys.key)
    with pytest.raises((OSError, ValueError, EOFError)):
        _answer(head, context, {"kind": "members"})


def test_a_member_cannot_pose_as_the_head(head: Head, tmp_path: Path) -> None:
    """Members have certificates of the same authority, but for clients only."""
    folder, membership = joined(head, tmp_path / "member")
    posing = Head(tmp_path / "posing")
    for name in ("authority", "certificate", "key"):
        getattr(posing.folder.keys, name).write_bytes(getattr(folder.keys, name).read_bytes())
    with posing.running():
        _, _, port = posing.address.rpartition(":")
        wait_until(lambda: not is_free(int(port)), "the gateway")
        cluster = dataclasses.replace(membership.cluster, head=posing.address)
        with pytest.raises(DikeError, match="is not the head of a cluster"):
            join.ask_head(folder, cluster, {"kind": "members"})


def test_a_removed_member_is_refused(head: Head, tmp_path: Path) -> None:
    folder, membership = joined(head, tmp_path / "member")
    with head.folder.changing_members() as members:
        del members["gpu1"]
    with pytest.raises(DikeError, match="not a member of the cluster 'lab'"):
        join.ask_head(folder, membership.cluster, {"kind": "members"})


def test_a_member_that_leaves_is_forgotten(head: Head, tmp_path: Path) -> None:
    folder, membership = joined(head, tmp_path / "member")
    assert join.ask_head(folder, membership.cluster, {"kind": "leave"}) == {}
    assert head.folder.members() == {}


def serve_echo(address: str, port: int) -> socket.socket:
    """Answers each connection with the port and what it gets."""
    server = socket.create_server((address, port))

    def serve() -> None:
        while True:
            try:
                connection, _ = server.accept()
            except OSError:
                return
            threading.Thread(target=echo, args=(connection,), daemon=True).start()

    def echo(connection: socket.socket) -> None:
        with connection:
            while data := connection.recv(1 << 16):
                connection.sendall(data)

    threading.Thread(target=serve, daemon=True).start()
    return server


def test_a_member_reaches_master_and_store(head: Head, tmp_path: Path) -> None:
    folder, own = joined(head, tmp_path / "member")
    cluster = own.cluster
    servers = [serve_echo(cluster.address(1), cluster.port), serve_echo(cluster.address(1), cluster.port + STORE)]
    try:
        for to in ("master", "store"):
            assert (
                _echo(head, client_context(folder.keys), {"kind": "open", "to": to}, b"hello" * 1000) == b"hello" * 1000
            )
    finally:
        for server in servers:
            server.close()


def test_a_member_reaches_nothing_else(head: Head, tmp_path: Path) -> None:
    folder, own = joined(head, tmp_path / "member")
    agent = serve_echo(own.cluster.address(1), own.cluster.port + AGENT)
    try:
        for to in ("box", "agent", own.cluster.address(1), "127.0.0.1:22"):
            assert _echo(head, client_context(folder.keys), {"kind": "open", "to": to}, b"hello") == b""
    finally:
        agent.close()


def test_the_head_reaches_the_agent_of_a_member(head: Head, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The connection goes over a spare one of the member; here both ends are on one machine, at two addresses."""
    elsewhere(monkeypatch)
    folder, own = joined(head, tmp_path / "member")
    assert not own.is_here
    # The head's gateway listens at the agent's address, so the agent itself needs another one here.
    at_member = dataclasses.replace(own, index=77, is_here=True)
    agent = serve_echo(own.cluster.address(77), own.cluster.port + AGENT)
    with RunningGateway(gateways.MemberGateway(folder, at_member)):
        try:
            for _ in range(3 * gateways.SPARE_CONNECTIONS):
                wait_until(lambda: _echo_plain(own.cluster.address(own.index), own.cluster.port + AGENT), "an echo")
        finally:
            agent.close()


def test_connections_of_other_accounts_are_refused(head: Head, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if os.getuid() != 0:
        pytest.skip("becoming another account needs root")
    elsewhere(monkeypatch)
    _, own = joined(head, tmp_path / "member")
    address, port = own.cluster.address(own.index), own.cluster.port + AGENT
    wait_until(lambda: not _is_refused(address, port), "the gateway to listen")
    program = (
        "import os, socket\n"
        f"os.setuid({pwd.getpwnam('nobody').pw_uid})\n"
        "peer = socket.socket()\n"
        f"peer.connect(('{address}', {port}))\n"
        "try:\n    print(peer.recv(1))\n"
        "except ConnectionError:\n    print(b'')\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "b''"


def test_a_lost_member_is_noticed_and_its_connections_end(
    head: Head, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gateways, "ALIVE_TIMEOUT_S", 0.5)
    folder, own = joined(head, tmp_path / "member")
    server = serve_echo(own.cluster.address(1), own.cluster.port)

    async def hold() -> bytes:
        """Opens a connection, but gives no sign of life."""
        host, _, port = head.address.rpartition(":")
        reader, writer = await gateways.connect(host, int(port), client_context(folder.keys))
        await gateways.send(writer, {"kind": "open", "to": "master"})
        try:
            return await asyncio.wait_for(reader.read(), 30)
        except OSError:
            return b""
        finally:
            writer.transport.abort()

    try:
        assert asyncio.run(hold()) == b""
    finally:
        server.close()


def test_the_last_sign_of_each_member_is_known(head: Head, tmp_path: Path) -> None:
    folder, own = joined(head, tmp_path / "member")
    seen = lambda: join.ask_head(folder, own.cluster, {"kind": "members"})["members"]["gpu1"]  # noqa: E731
    with RunningGateway(gateways.MemberGateway(folder, own)):
        wait_until(lambda: seen() is not None, "a sign")
        begun_s = time.monotonic()
        wait_until(lambda: seen() < time.monotonic() - begun_s, "a later sign")


def _answer(head: Head, context: Any, request: dict[str, Any]) -> dict[str, Any]:
    async def ask() -> dict[str, Any]:
        host, _, port = head.address.rpartition(":")
        reader, writer = await gateways.connect(host, int(port), context)
        try:
            await gateways.send(writer, request)
            return await asyncio.wait_for(gateways.read_line(reader), 30)
        finally:
            writer.transport.abort()

    return asyncio.run(ask())


def _echo(head: Head, context: Any, request: dict[str, Any], data: bytes) -> bytes:
    async def ask() -> bytes:
        host, _, port = head.address.rpartition(":")
        reader, writer = await gateways.connect(host, int(port), context)
        try:
            await gateways.send(writer, request)
            writer.write(data)
            return await asyncio.wait_for(reader.readexactly(len(data)), 30)
        except (asyncio.IncompleteReadError, OSError):
            return b""
        finally:
            writer.transport.abort()

    return asyncio.run(ask())


def _echo_plain(address: str, port: int) -> bool:
    try:
        with socket.create_connection((address, port), 10) as connection:
            connection.sendall(b"hello")
            return connection.recv(5) == b"hello"
    except OSError:
        return False


def _is_refused(address: str, port: int) -> bool:
    try:
        socket.create_connection((address, port), 10).close()
    except OSError:
        return True
    return False


def test_strangers_leave_room_for_machines_that_join(
    head: Head, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gateways, "MAX_STRANGERS", 3)
    context = joining_context(head.folder.keys.authority.read_text())

    async def crowd() -> list[bytes]:
        """Opens more connections than there is room for, and asks for nothing."""
        host, _, port = head.address.rpartition(":")
        streams = [await gateways.connect(host, int(port), context) for _ in range(5)]
        done, _ = await asyncio.wait(
            [asyncio.create_task(reader.read()) for reader, _ in streams],
            timeout=5,
            return_when=asyncio.FIRST_COMPLETED,
        )
        for _, writer in streams:
            writer.transport.abort()
        return [task.result() for task in done]

    assert b"" in asyncio.run(crowd())
    joined(head, tmp_path / "member")
