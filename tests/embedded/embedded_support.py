"""What the tests of the embedded Mesos share: a plain scheduler on the v1 HTTP API, and a look at the process table."""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import http.client
import json
import queue
import threading
import time
from collections.abc import Iterable
from typing import Any

import psutil
import pytest

from framework.embedded import settings
from framework.embedded.access import find_access
from framework.embedded.cluster import EmbeddedCluster
from framework.mesos.master import Master, connect
from tests.waiting import is_alive, wait_until

DEADLINE_S = 60.0


def alive(processes: Iterable[psutil.Process]) -> list[psutil.Process]:
    """The processes that still run; zombies do not count."""
    return [process for process in processes if is_alive(process)]


def with_argument(text: str) -> list[psutil.Process]:
    """Running processes one of whose arguments is exactly `text`."""
    return [
        process
        for process in psutil.process_iter(["cmdline", "status"])
        if text in (process.info["cmdline"] or ()) and process.info["status"] != psutil.STATUS_ZOMBIE
    ]


DAEMONS = ("master", "agent", "executor.zygote_server")
"""Kinds of processes that a supervisor looks after: an argument of each."""


def daemons(supervisor: psutil.Process, kind: str) -> list[psutil.Process]:
    """The running daemons of a kind, one of `DAEMONS`."""
    found = []
    for child in supervisor.children():
        # What an agent or a slot has left may end meanwhile.
        with contextlib.suppress(psutil.NoSuchProcess):
            if is_alive(child) and kind in child.cmdline():
                found.append(child)
    return found


def kill_one_daemon(supervisor: psutil.Process, kind: str) -> None:
    """Kills a daemon without its owner's knowledge, as soon as there is one; returns when it has ended."""
    victim = wait_until(lambda: daemons(supervisor, kind), f"a process of the kind {kind}")[0]
    victim.kill()
    wait_until(lambda: not is_alive(victim), "its end")


def leading_master(cluster: EmbeddedCluster) -> Master:
    """The cluster's leading master, with the cluster's credentials."""
    return dataclasses.replace(connect(cluster.master, DEADLINE_S), credentials=cluster.access.credentials)


def basic(principal: str, secret: str) -> str:
    """The header `Authorization` of HTTP basic authentication."""
    return "Basic " + base64.b64encode(f"{principal}:{secret}".encode()).decode()


def be_patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has the daemons that are started from now on wait for each other: long enough for a busy machine.

    Otherwise an agent that is not back after three seconds is given up by the master, and an executor that has not
    come back two seconds later by the agent.
    """
    master, agent = settings.master_environment, settings.agent_environment
    monkeypatch.setattr(
        settings, "master_environment", lambda *of: master(*of) | {"MESOS_MAX_AGENT_PING_TIMEOUTS": "300"}
    )
    monkeypatch.setattr(
        settings, "agent_environment", lambda *of: agent(*of) | {"MESOS_EXECUTOR_REREGISTRATION_TIMEOUT": "8secs"}
    )


class RawFramework:
    """A framework without a driver: subscribes, takes any offer, and keeps the events.

    Without `headers` it authenticates with what the cluster has left for this account.
    """

    def __init__(self, master: str, *, headers: dict[str, str] | None = None, **info: Any) -> None:
        self._host, _, port = master.rpartition(":")
        self._port = int(port)
        access = find_access(self._host)
        if headers is None and access is not None:
            headers = {"Authorization": basic(*access.credentials)}
            info = {"principal": access.credentials[0], **info}
        self._headers = {"Content-Type": "application/json", "Accept": "application/json", **(headers or {})}
        framework = {
            "user": "nobody",
            "name": "raw",
            "roles": ["*"],
            "capabilities": [{"type": "MULTI_ROLE"}, {"type": "GPU_RESOURCES"}],
            **info,
        }
        self.connection, self.stream = self._post({"type": "SUBSCRIBE", "subscribe": {"framework_info": framework}})
        if self.stream.status != http.client.OK:
            raise PermissionError(f"{self.stream.status} {self.stream.read().decode()}")
        self._headers["Mesos-Stream-Id"] = self.stream.headers["Mesos-Stream-Id"]
        self.events: queue.Queue[dict[str, Any]] = queue.Queue()
        self.updates: list[dict[str, Any]] = []
        threading.Thread(target=self._read, daemon=True).start()
        self.framework_id = self.next_event("SUBSCRIBED")["framework_id"]

    def _post(self, body: dict[str, Any]) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        connection = http.client.HTTPConnection(self._host, self._port, timeout=DEADLINE_S)
        connection.request("POST", "/api/v1/scheduler", json.dumps(body), self._headers)
        return connection, connection.getresponse()

    def _read(self) -> None:
        with contextlib.suppress(OSError, ValueError, http.client.HTTPException, AttributeError):
            while length := self.stream.readline():
                event = json.loads(self.stream.read(int(length)))
                self.events.put({"type": event["type"], **event.get(event["type"].lower(), {})})

    def call(self, kind: str, **values: Any) -> None:
        body = {"type": kind, "framework_id": self.framework_id, **({kind.lower(): values} if values else {})}
        _, response = self._post(body)
        assert response.status == http.client.ACCEPTED, response.read()

    def next_event(self, kind: str) -> dict[str, Any]:
        """The next event of a kind; others are dropped, except that status updates are acknowledged."""
        end = time.monotonic() + DEADLINE_S
        while True:
            event = self.events.get(timeout=max(0.01, end - time.monotonic()))
            if event["type"] == "UPDATE":
                self._acknowledge(event["status"])
            if event["type"] == kind:
                return event

    def _acknowledge(self, status: dict[str, Any]) -> None:
        # An agent sends a status again that is not acknowledged soon.
        if "uuid" not in status or all(status["uuid"] != known.get("uuid") for known in self.updates):
            self.updates.append(status)
        if "uuid" in status:
            self.call("ACKNOWLEDGE", agent_id=status["agent_id"], task_id=status["task_id"], uuid=status["uuid"])

    def launch(self, task_id: str, command: dict[str, Any], agent: str | None = None, **task: Any) -> str:
        """Starts a command task on the next offer (of the agent, if one is named); returns the agent's id."""
        taken = ""
        while not taken:
            for offer in self.next_event("OFFERS")["offers"]:
                if not taken and agent in (None, offer["hostname"]):
                    taken = self._accept(offer, task_id, command, task)
                else:
                    self.call("DECLINE", offer_ids=[offer["id"]], filters={"refuse_seconds": 0.0})
        return taken

    def _accept(self, offer: dict[str, Any], task_id: str, command: dict[str, Any], task: dict[str, Any]) -> str:
        resources = [
            {"name": name, "type": "SCALAR", "scalar": {"value": value}, "allocation_info": {"role": "*"}}
            for name, value in (("cpus", 0.1), ("mem", 32.0))
        ]
        info = {
            "name": task_id,
            "task_id": {"value": task_id},
            "agent_id": offer["agent_id"],
            "resources": resources,
            "command": command,
            **task,
        }
        operations = [{"type": "LAUNCH", "launch": {"task_infos": [info]}}]
        self.call("ACCEPT", offer_ids=[offer["id"]], operations=operations, filters={"refuse_seconds": 0.0})
        return str(offer["agent_id"]["value"])

    def wait_for(self, task_id: str, *states: str) -> dict[str, Any]:
        """The first status of the task that is one of `states`."""
        while True:
            for status in self.updates:
                if status["task_id"]["value"] == task_id and status["state"] in states:
                    return status
            self.next_event("UPDATE")

    def kill(self, task_id: str, agent_id: str) -> None:
        self.call("KILL", task_id={"value": task_id}, agent_id={"value": agent_id})

    def close(self) -> None:
        self.call("TEARDOWN")
        self.connection.close()
