"""pymesos' traps, each handled: on the real Mesos where that can show it, on a bare socket where it cannot."""

from __future__ import annotations

import getpass
import http.client
import http.server
import json
import queue
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest

from dike.exceptions import BadInputError
from framework.embedded.agents import AgentSpec
from framework.embedded.cluster import EmbeddedCluster
from framework.mesos import driver as driver_module
from framework.mesos import events
from framework.mesos.driver import (
    RECONNECT_PAUSE_S,
    CallRefusedError,
    Driver,
    FrameworkSettings,
    MasterUnavailableError,
    driver_failure,
)
from framework.mesos.events import EventScheduler
from framework.mesos.master import connect
from tests.embedded.embedded_support import leading_master
from tests.waiting import DEADLINE_S, wait_until

pytestmark = pytest.mark.integration

SETTINGS = FrameworkSettings(name="test", user=getpass.getuser())
Kind = TypeVar("Kind")


def next_event(scheduler: EventScheduler, kind: type[Kind]) -> Kind:
    """The next event of a kind; others are passed over."""
    deadline = time.monotonic() + DEADLINE_S
    while True:
        try:
            event = scheduler.events.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            pytest.fail(f"no {kind.__name__} came")
        if isinstance(event, kind):
            return event


@pytest.fixture(scope="module")
def mesos() -> Iterator[EmbeddedCluster]:
    agents = [AgentSpec(resources="cpus:1;mem:512;gpus:2", attributes="gpu_model:K80;rack:r1;network_gbps:25")]
    with EmbeddedCluster(agents) as cluster:
        cluster.wait_for_agents(DEADLINE_S)
        yield cluster


def settings(cluster: EmbeddedCluster, **changes: Any) -> FrameworkSettings:
    principal, secret = cluster.access.credentials
    return FrameworkSettings(
        **{"name": "test", "user": getpass.getuser(), "principal": principal, "secret": secret, **changes}
    )


@pytest.mark.mesos
def test_agents_with_gpus_are_offered(mesos: EmbeddedCluster) -> None:
    scheduler = EventScheduler()
    driver = Driver(settings(mesos), mesos.master, scheduler)
    driver.start()
    try:
        (offer,) = next_event(scheduler, events.OffersArrived).offers
        assert {"name": "gpus", "type": "SCALAR", "scalar": {"value": 2.0}}.items() <= next(
            piece for piece in offer["resources"] if piece["name"] == "gpus"
        ).items()
    finally:
        driver.stop()
        driver.join()


@pytest.mark.mesos
def test_a_wrong_secret_is_one_event_and_no_exception(mesos: EmbeddedCluster) -> None:
    scheduler = EventScheduler()
    driver = Driver(settings(mesos, secret="wrong"), mesos.master, scheduler)
    driver.start()
    assert next_event(scheduler, events.Refused).http_status == 401
    driver.join()


@pytest.mark.mesos
def test_who_is_thrown_out_stays_out(mesos: EmbeddedCluster) -> None:
    first_scheduler, second_scheduler = EventScheduler(), EventScheduler()
    first = Driver(settings(mesos), mesos.master, first_scheduler)
    first.start()
    framework_id = next_event(first_scheduler, events.Subscribed).framework_id
    second = Driver(settings(mesos), mesos.master, second_scheduler)
    second.framework_id = framework_id
    second.start()
    try:
        next_event(second_scheduler, events.Subscribed)
        assert "failed over" in next_event(first_scheduler, events.Refused).reason
        first.join()
        assert second.connected
    finally:
        second.stop()
        second.join()


@pytest.mark.mesos
def test_a_kill_of_an_unknown_task_is_answered(mesos: EmbeddedCluster) -> None:
    scheduler = EventScheduler()
    driver = Driver(settings(mesos), mesos.master, scheduler)
    driver.start()
    try:
        agent_id = next_event(scheduler, events.OffersArrived).offers[0]["agent_id"]["value"]
        driver.kill("nobody", agent_id)
        update = next_event(scheduler, events.StatusUpdate)
        assert (update.task_id, update.state) == ("nobody", "TASK_GONE")
        driver.reconcile({"also nobody": agent_id})
        assert next_event(scheduler, events.StatusUpdate).task_id == "also nobody"
    finally:
        driver.stop()
        driver.join()


@pytest.mark.mesos
def test_the_master_lists_its_agents(mesos: EmbeddedCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    # A proxy is for the world outside, not for the cluster.
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    (agent,) = leading_master(mesos).agents() or []
    assert (agent.cpus, agent.gpus, agent.gpu_model, agent.rack, agent.network_gbps) == (1, 2, "K80", "r1", 25)


class FakeMaster:
    """A socket that speaks HTTP and answers every POST in the same way."""

    def __init__(self, status: int, body: bytes = b"no", version: object = None) -> None:
        self.requests: list[tuple[str, dict[str, str]]] = []
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                self.rfile.read(int(self.headers["Content-Length"]))
                outer.requests.append((self.path, dict(self.headers)))
                self.answer(status, body)

            def do_GET(self) -> None:
                self.answer(200, json.dumps(version).encode())

            def answer(self, code: int, content: bytes) -> None:
                self.send_response(code)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, format: str, *args: object) -> None:  # noqa: A002
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.mark.parametrize("status", [404, 503])
def test_a_master_that_is_starting_is_asked_again_without_haste(status: int) -> None:
    master = FakeMaster(status)
    scheduler = EventScheduler()
    driver = Driver(SETTINGS, master.address, scheduler)
    started = time.monotonic()
    driver.start()
    try:
        wait_until(lambda: len(master.requests) >= 4, "four requests")
        assert time.monotonic() - started >= 3 * RECONNECT_PAUSE_S
        assert not driver.aborted
    finally:
        driver.stop()
        driver.join()
        master.close()


def test_a_master_that_is_away_for_hours_is_asked_on_and_on() -> None:
    driver = Driver(SETTINGS, "127.0.0.1:1", EventScheduler())
    # pymesos' own pauses double until they overflow.
    assert 0 < driver._backoff(0) <= driver._backoff(100_000) <= 30


def test_a_host_that_cannot_be_resolved_is_asked_again() -> None:
    scheduler = EventScheduler()
    driver = Driver(SETTINGS, "no-such-host.invalid:5050", scheduler)
    driver.start()
    try:
        for _ in range(2):
            next_event(scheduler, events.Disconnected)
        assert not driver.aborted
        assert driver_failure() == ""
    finally:
        driver.stop()
        driver.join()


def test_a_refused_call_is_told_from_a_lost_one() -> None:
    master = FakeMaster(400, b"no such resource")
    driver = Driver(SETTINGS, master.address, EventScheduler())
    driver._master, driver.stream_id, driver.framework_id = master.address, "stream", "F"
    try:
        with pytest.raises(CallRefusedError, match="no such resource"):
            driver.kill("t", "a")
    finally:
        master.close()


class FakeHangingMaster:
    """A master that takes the framework in, and after that accepts connections and never answers."""

    EVENT = b'{"type":"SUBSCRIBED","subscribed":{"framework_id":{"value":"F"}}}'

    def __init__(self) -> None:
        self.connections: list[socket.socket] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        body = b"%d\n%s" % (len(self.EVENT), self.EVENT)
        head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nMesos-Stream-Id: stream\r\n\r\n"
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            if not self.connections:
                connection.recv(65536)
                connection.sendall(head + b"%x\r\n%s\r\n" % (len(body), body))
            self.connections.append(connection)

    def close(self) -> None:
        # An accept under way does not end by `close` alone.
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for connection in self.connections:
            connection.close()


def test_a_master_that_hangs_holds_up_neither_calls_nor_the_next_subscription(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver_module, "CALL_TIMEOUT_S", 1.0)
    first, second = FakeHangingMaster(), FakeHangingMaster()
    scheduler = EventScheduler()
    driver = Driver(SETTINGS, first.address, scheduler)
    refusals: list[Exception] = []

    def kill_all() -> None:
        for number in range(20):
            try:
                driver.kill(f"t{number}", "a")
            except MasterUnavailableError as error:
                refusals.append(error)

    try:
        for act in (driver.start, kill_all, lambda: driver.change_master(second.address)):
            # On a thread of its own: what hangs must not hang the tests.
            thread = threading.Thread(target=act, daemon=True)
            thread.start()
            thread.join(DEADLINE_S)
            assert not thread.is_alive()
            if act is not kill_all:
                next_event(scheduler, events.Subscribed)
        assert len(refusals) == 20
        # Besides the subscription: one call waits, and the others fail immediately.
        wait_until(lambda: len(first.connections) > 1, "the connection of a call")
        assert len(first.connections) - 1 <= 3
    finally:
        # A call that hangs fails here, so that its caller continues.
        first.close()
        second.close()
        driver.stop(failover=True)
        driver.join()


def test_a_connection_is_not_closed_under_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    master = FakeMaster(202, b"")
    driver = Driver(SETTINGS, master.address, EventScheduler())
    driver._master, driver.stream_id, driver.framework_id = master.address, "stream", "F"
    answer = http.client.HTTPConnection.getresponse
    closing = threading.Thread(target=driver.on_close)

    def meanwhile(connection: http.client.HTTPConnection) -> http.client.HTTPResponse:
        closing.start()
        closing.join(0.5)
        return answer(connection)

    monkeypatch.setattr(http.client.HTTPConnection, "getresponse", meanwhile)
    try:
        driver.kill("t", "a")
        closing.join(DEADLINE_S)
        assert not closing.is_alive()
    finally:
        master.close()


def test_a_call_without_a_connection_is_an_error() -> None:
    driver = Driver(SETTINGS, "127.0.0.1:1", EventScheduler())
    for call in (lambda: driver.acceptOffers([], [{}]), lambda: driver.declineOffer([]), lambda: driver.kill("t", "a")):
        with pytest.raises(MasterUnavailableError):
            call()


def test_the_headers_of_one_driver_do_not_reach_another() -> None:
    master = FakeMaster(202, b"")
    try:
        for credentials in ({"principal": "ann", "secret": "right"}, {}):
            driver = Driver(
                FrameworkSettings(name="test", user="nobody", **credentials), master.address, EventScheduler()
            )
            driver._master, driver.stream_id, driver.framework_id = master.address, "stream", "F"
            driver.kill("t", "a")
        assert [("Authorization" in headers) for _, headers in master.requests] == [True, False]
    finally:
        master.close()


def test_ctrl_c_is_left_to_us() -> None:
    # Whatever started us may ignore it: a shell does so for what it runs in the background.
    program = (
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); import framework.cli; "
        "print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "True"


@pytest.mark.parametrize(
    ("uri", "complaint"),
    [
        ("127.0.0.1:1", "No Mesos master answered at 127.0.0.1:1 within 0.2 s"),
        ("nonsense:port", "is not the address of a master"),
        ("a:b:5050", "is not the address of a master"),
        ("zk://host:abc/x", "is not the address of a master"),
        ("zk://", "is not the address of a master"),
        ("host:99999", "is not the address of a master"),
        ("zk://127.0.0.1:1/mesos", "named no leading Mesos master"),
    ],
)
def test_a_master_that_is_not_there_is_one_sentence(uri: str, complaint: str) -> None:
    with pytest.raises(BadInputError, match=complaint):
        connect(uri, 0.2)


def test_something_else_than_mesos_is_recognised() -> None:
    other = FakeMaster(200, version={"version": "2.0", "name": "something else"})
    try:
        with pytest.raises(BadInputError, match="is not a Mesos master"):
            connect(other.address, DEADLINE_S)
    finally:
        other.close()


@pytest.mark.mesos
def test_an_agent_is_not_taken_for_a_master(mesos: EmbeddedCluster) -> None:
    with pytest.raises(BadInputError, match="is not a Mesos master"):
        connect(f"{mesos.access.address}:{mesos.agents[0].port}", DEADLINE_S)


def test_a_zookeeper_entry_is_read(tmp_path: Path) -> None:
    from framework.mesos.master import _DetectorCallbacks

    found = _DetectorCallbacks()
    found.onNewMasterDetectedMessage(b"not json")
    assert not found.changed.is_set()
    found.onNewMasterDetectedMessage(b'{"address": {"ip": "10.0.0.1", "port": 5050}}')
    assert found.address == ("10.0.0.1", 5050)
