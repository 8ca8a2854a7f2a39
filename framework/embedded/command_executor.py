"""Runs one command task, in place of Mesos' own `mesos-executor`.

A program of its own that needs only the standard library. It speaks the v1 executor API (HTTP and JSON) with its agent:
starts the task's command in its own process group, reports how it ended, kills it on request (SIGTERM, then SIGKILL
after the task's grace period), and exits when the agent has acknowledged the last update. Health checks, task groups
and commands with URIs are not supported.
"""

from __future__ import annotations

import base64
import contextlib
import http.client
import json
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from typing import Any

DEFAULT_GRACE_S = 3.0
ACKNOWLEDGE_TIMEOUT_S = 10.0
REQUEST_TIMEOUT_S = 10.0
RETRY_INTERVAL_S = 0.2
RECOVERY_TIMEOUT_S = 15 * 60.0
"""Maximum time for the agent of a checkpointing framework to return: Mesos' default."""
HEADERS = {"Content-Type": "application/json", "Accept": "application/json"}


class AgentGoneError(Exception):
    """The agent does not answer, or has ended the subscription."""


class AgentClient:
    def __init__(self, environment: dict[str, str]) -> None:
        self._endpoint = environment["MESOS_AGENT_ENDPOINT"]
        self._path = "/" + environment["MESOS_SLAVE_PID"].split("@")[0] + "/api/v1/executor"
        self._identity = {
            "framework_id": {"value": environment["MESOS_FRAMEWORK_ID"]},
            "executor_id": {"value": environment["MESOS_EXECUTOR_ID"]},
        }

    def post(self, message: dict[str, Any], *, timeout_s: float | None = REQUEST_TIMEOUT_S) -> http.client.HTTPResponse:
        """Sends a call; raises AgentGoneError unless the agent accepts it."""
        connection = http.client.HTTPConnection(self._endpoint, timeout=REQUEST_TIMEOUT_S)
        try:
            connection.request("POST", self._path, json.dumps(self._identity | message), HEADERS)
            response = connection.getresponse()
        except (OSError, http.client.HTTPException) as error:
            raise AgentGoneError(str(error)) from error
        if response.status not in (http.client.OK, http.client.ACCEPTED):
            raise AgentGoneError(f"{response.status} {response.read().decode(errors='replace')}")
        if connection.sock is not None:
            connection.sock.settimeout(timeout_s)
        return response


class CommandExecutor:
    """One command, from its launch to the acknowledgement of its last status."""

    def __init__(self, agent: AgentClient, *, checkpoint: bool) -> None:
        self._agent = agent
        self._checkpoint = checkpoint
        self._task: dict[str, Any] | None = None
        self._child: subprocess.Popen[bytes] | None = None
        self._kill_requested = False
        self._shutting_down = False
        self._changed = threading.Condition()
        self._unacknowledged: dict[str, dict[str, Any]] = {}

    def run(self) -> int:
        last_seen = time.monotonic()
        while True:
            try:
                self._follow(self._subscribe())
                last_seen = time.monotonic()
            except AgentGoneError as error:
                print(f"mesos-executor: {error}", file=sys.stderr, flush=True)
            # Only an agent with checkpointing can recover this executor.
            gone_s = time.monotonic() - last_seen
            if not self._checkpoint or self._shutting_down or gone_s > RECOVERY_TIMEOUT_S:
                self._kill(0.0)
                return 1
            time.sleep(RETRY_INTERVAL_S)

    def _subscribe(self) -> http.client.HTTPResponse:
        with self._changed:
            updates = list(self._unacknowledged.values())
            tasks = [self._task] if self._task and updates else []
        subscribe = {"unacknowledged_tasks": tasks, "unacknowledged_updates": updates}
        return self._agent.post({"type": "SUBSCRIBE", "subscribe": subscribe}, timeout_s=None)

    def _follow(self, events: http.client.HTTPResponse) -> None:
        """Handles events until the stream ends. Each is a line with its length in bytes, then its JSON."""
        while True:
            try:
                length = events.readline()
                if not length:
                    return
                event = json.loads(events.read(int(length)))
            except (OSError, http.client.HTTPException, ValueError) as error:
                print(f"mesos-executor: the agent is gone: {error!r}", file=sys.stderr, flush=True)
                return
            self._handle(event)

    def _handle(self, event: dict[str, Any]) -> None:
        kind = event["type"]
        if kind == "LAUNCH":
            self._task = event["launch"]["task"]
            threading.Thread(target=self._run_task, args=(self._task,), daemon=True).start()
        elif kind == "KILL":
            self._start_killing(_grace_s(event["kill"].get("kill_policy") or (self._task or {}).get("kill_policy")))
        elif kind == "SHUTDOWN":
            with self._changed:
                self._shutting_down = True
                self._changed.notify_all()
            if self._task is None:
                os._exit(0)
            self._start_killing(_grace_s(self._task.get("kill_policy")))
        elif kind == "ACKNOWLEDGED":
            with self._changed:
                self._unacknowledged.pop(event["acknowledged"]["uuid"], None)
                self._changed.notify_all()

    def _run_task(self, task: dict[str, Any]) -> None:
        self._report(task, "TASK_STARTING")
        try:
            with self._changed:
                if not self._kill_requested:
                    self._child = _start(task["command"])
        except (OSError, ValueError) as error:  # ValueError: a NUL in the command.
            state, message = "TASK_FAILED", f"Command could not be started: {error}"
        else:
            state, message = self._await_child(task)
        self._report(task, state, message)
        self._await_acknowledgement()
        os._exit(0)

    def _await_child(self, task: dict[str, Any]) -> tuple[str, str]:
        child = self._child
        if child is None:
            return "TASK_KILLED", "Command was not started"
        self._report(task, "TASK_RUNNING")
        status = child.wait()
        _signal_group(child.pid, signal.SIGKILL)  # Remaining children of the command.
        if status >= 0:
            message = f"Command exited with status {status}"
        else:
            message = f"Command terminated with signal {_signal_name(-status)}"
        if self._kill_requested:
            return "TASK_KILLED", message
        return ("TASK_FINISHED" if status == 0 else "TASK_FAILED"), message

    def _start_killing(self, grace_s: float) -> None:
        threading.Thread(target=self._kill, args=(grace_s,), daemon=True).start()

    def _kill(self, grace_s: float) -> None:
        with self._changed:
            self._kill_requested = True
            child = self._child
        if child is None:
            return
        if grace_s > 0:
            _signal_group(child.pid, signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(grace_s)
        _signal_group(child.pid, signal.SIGKILL)

    def _report(self, task: dict[str, Any], state: str, message: str = "") -> None:
        """Sends a status update, which is stored until the agent acknowledges it."""
        identity = base64.b64encode(uuid.uuid4().bytes).decode()
        status = {
            "task_id": task["task_id"],
            "state": state,
            "source": "SOURCE_EXECUTOR",
            "timestamp": time.time(),
            "uuid": identity,
            "message": message,
        }
        with self._changed:
            self._unacknowledged[identity] = {"status": status}
        try:
            self._agent.post({"type": "UPDATE", "update": {"status": status}})
        except AgentGoneError as error:  # Sent again with the next subscription.
            print(f"mesos-executor: {state} was not accepted: {error}", file=sys.stderr, flush=True)

    def _await_acknowledgement(self) -> None:
        """Waits for the last acknowledgement, which an agent that shuts its executors down does not send."""
        timeout_s = RECOVERY_TIMEOUT_S if self._checkpoint else ACKNOWLEDGE_TIMEOUT_S
        with self._changed:
            self._changed.wait_for(lambda: self._shutting_down or not self._unacknowledged, timeout_s)


def _start(command: dict[str, Any]) -> subprocess.Popen[bytes]:
    variables = command.get("environment", {}).get("variables", [])
    environment = os.environ | {variable["name"]: variable.get("value", "") for variable in variables}
    value = command.get("value", "")
    if command.get("shell", True):
        return subprocess.Popen(["/bin/sh", "-c", value], env=environment, start_new_session=True)
    arguments = command.get("arguments") or [value]
    return subprocess.Popen(arguments, executable=value, env=environment, start_new_session=True)


def _grace_s(policy: dict[str, Any] | None) -> float:
    nanoseconds = ((policy or {}).get("grace_period") or {}).get("nanoseconds")
    return DEFAULT_GRACE_S if nanoseconds is None else int(nanoseconds) / 1e9


def _signal_name(number: int) -> str:
    """Such as `SIGKILL (Killed)`; real-time signals only have numbers."""
    try:
        return f"{signal.Signals(number).name} ({signal.strsignal(number)})"
    except ValueError:
        return str(number)


def _signal_group(leader: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(leader, number)


if __name__ == "__main__":
    executor = CommandExecutor(AgentClient(dict(os.environ)), checkpoint=os.environ.get("MESOS_CHECKPOINT") == "1")
    os._exit(executor.run())
