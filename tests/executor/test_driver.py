"""The executor's driver against an agent that misbehaves, fake on a bare socket."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from executor import driver as driver_module
from executor.driver import ExecutorDriver, pymesos
from tests.waiting import wait_until

pytestmark = pytest.mark.integration

DEADLINE_S = 120.0


class FakeAgent:
    """Takes a subscription, refuses the first updates, acknowledges the next ones."""

    def __init__(self, refused_updates: int) -> None:
        self.updates: list[dict[str, Any]] = []
        self.subscriptions: list[dict[str, Any]] = []
        self.answers: list[int] = []
        self._events: list[dict[str, Any]] = []
        self._changed = threading.Condition()
        self._closed = False
        self._dropped = 0
        agent = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                if body["type"] == "SUBSCRIBE" and agent.answers:
                    self.send_response(agent.answers.pop(0))
                    self.send_header("Content-Length", "0")
                    self.end_headers()
                    return
                if body["type"] == "SUBSCRIBE":
                    agent.subscriptions.append(body["subscribe"])
                    agent.stream(self)
                    return
                status = body["update"]["status"]
                agent.updates.append(status)
                refused = len(agent.updates) <= refused_updates
                if not refused:
                    # However long the acknowledgement takes.
                    driver_module.RESEND_INTERVAL_S = DEADLINE_S
                self.send_response(500 if refused else 202)
                self.send_header("Content-Length", "0")
                self.end_headers()
                if not refused:
                    acknowledged = {"task_id": status["task_id"], "uuid": status["uuid"]}
                    agent.tell({"type": "ACKNOWLEDGED", "acknowledged": acknowledged})

            def log_message(self, format: str, *args: object) -> None:  # noqa: A002
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def tell(self, event: dict[str, Any]) -> None:
        with self._changed:
            self._events.append(event)
            self._changed.notify_all()

    def stream(self, handler: http.server.BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.send_header("Transfer-Encoding", "chunked")
        handler.end_headers()
        subscribed = {
            "executor_info": {"executor_id": {"value": "E"}},
            "framework_info": {"id": {"value": "F"}},
            "agent_info": {},
        }
        self._record(handler, {"type": "SUBSCRIBED", "subscribed": subscribed})
        number = len(self.subscriptions)
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._events or self._closed or self._dropped >= number, DEADLINE_S)
                if self._closed or self._dropped >= number:
                    handler.close_connection = True
                    return
                events, self._events = self._events, []
            for event in events:
                self._record(handler, event)

    @staticmethod
    def _record(handler: http.server.BaseHTTPRequestHandler, event: dict[str, Any]) -> None:
        text = json.dumps(event).encode()
        record = str(len(text)).encode() + b"\n" + text
        handler.wfile.write(f"{len(record):x}\r\n".encode() + record + b"\r\n")
        handler.wfile.flush()

    def drop(self) -> None:
        """Ends the subscription, as an agent does that is restarted."""
        with self._changed:
            self._dropped = len(self.subscriptions)
            self._changed.notify_all()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def agent(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeAgent]:
    fake = FakeAgent(refused_updates=2)
    monkeypatch.setenv("MESOS_AGENT_ENDPOINT", fake.address)
    monkeypatch.setenv("MESOS_FRAMEWORK_ID", "F")
    monkeypatch.setenv("MESOS_EXECUTOR_ID", "E")
    monkeypatch.setenv("MESOS_CHECKPOINT", "1")
    monkeypatch.setattr(driver_module, "RESEND_INTERVAL_S", 0.1)
    yield fake
    fake.close()


class FakeExecutor(pymesos.Executor):
    def __init__(self) -> None:
        self.heard = threading.Event()

    def frameworkMessage(self, driver: Any, message: str) -> None:  # noqa: N802
        self.heard.set()


def connected_driver(agent: FakeAgent) -> ExecutorDriver:
    """A driver that has done all that it does when it is taken in."""
    agent.tell({"type": "MESSAGE", "message": {"data": ""}})
    executor = FakeExecutor()
    driver = ExecutorDriver(executor)
    driver.start()
    wait_until(executor.heard.is_set, "the first message")
    return driver


def test_an_update_is_sent_until_it_is_acknowledged(agent: FakeAgent) -> None:
    driver = connected_driver(agent)
    driver.sendStatusUpdate({"task_id": {"value": "t"}, "state": "TASK_FINISHED"})
    assert driver.wait_for_acknowledgements(DEADLINE_S)
    assert len(agent.updates) == 3
    assert len({update["uuid"] for update in agent.updates}) == 1
    driver.stop()
    driver.join()


def test_an_unacknowledged_update_goes_with_the_next_subscription(agent: FakeAgent) -> None:
    driver = connected_driver(agent)
    driver.sendStatusUpdate({"task_id": {"value": "t"}, "state": "TASK_RUNNING"})
    (update,) = json.loads(driver.gen_request().partition(b"\r\n\r\n")[2])["subscribe"]["unacknowledged_updates"]
    assert update["status"]["state"] == "TASK_RUNNING"
    driver.stop()
    driver.join()


@pytest.mark.parametrize(("text", "checkpoint"), [("0", False), ("1", True)])
def test_checkpoint_0_means_no(agent: FakeAgent, monkeypatch: pytest.MonkeyPatch, text: str, checkpoint: bool) -> None:
    monkeypatch.setenv("MESOS_CHECKPOINT", text)
    assert ExecutorDriver(pymesos.Executor()).checkpoint is checkpoint


def test_an_agent_that_recovers_is_asked_again_and_gets_what_it_has_missed(
    agent: FakeAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent.answers = [404, 503]
    driver = connected_driver(agent)
    assert agent.answers == []
    agent.drop()
    driver.sendStatusUpdate({"task_id": {"value": "t"}, "state": "TASK_RUNNING"})
    assert driver.wait_for_acknowledgements(DEADLINE_S)
    assert len(agent.subscriptions) == 2
    driver.stop()
    driver.join()


class FakeEndingExecutor(pymesos.Executor):
    def __init__(self) -> None:
        self.event = threading.Event()

    def shutdown(self, driver: Any) -> None:
        self.event.set()


def ending_driver(monkeypatch: pytest.MonkeyPatch) -> tuple[ExecutorDriver, FakeEndingExecutor]:
    # It would kill the process group of the tests.
    monkeypatch.setenv("MESOS_LOCAL", "1")
    executor = FakeEndingExecutor()
    driver = ExecutorDriver(executor)
    driver.start()
    return driver, executor


def test_an_executor_ends_when_its_agent_does_not_come_back_in_time(
    agent: FakeAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MESOS_RECOVERY_TIMEOUT", "500ms")
    driver, executor = ending_driver(monkeypatch)
    wait_until(lambda: driver.connected, "the connection")
    assert not executor.event.wait(1.0)
    agent.close()
    assert executor.event.wait(DEADLINE_S)
    driver.join()


def test_an_executor_ends_that_its_agent_does_not_know(agent: FakeAgent, monkeypatch: pytest.MonkeyPatch) -> None:
    agent.answers = [400]
    driver, executor = ending_driver(monkeypatch)
    assert executor.event.wait(DEADLINE_S)
    driver.join()
