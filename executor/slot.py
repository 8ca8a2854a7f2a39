"""The executor: one slot, holding one process of a training job."""

from __future__ import annotations

import dataclasses
import http.client
import json
import logging
import math
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import pymesos

from dike import task as task_module
from dike._version import __version__
from dike.roles import process
from executor import bundle
from executor.driver import ExecutorDriver
from executor.messages import LaunchOrder, LogChunk, Outcome, Report
from executor.process import ChildProcess, Command

logger = logging.getLogger(__name__)

ACKNOWLEDGE_TIMEOUT_S = 15.0
SHUTDOWN_GRACE_S = 0.5
"""Shorter than the least grace Mesos gives an executor."""


class Slot(pymesos.Executor):
    """Runs the one process of a training job's task, then ends, so that Mesos has its resources back at once.

    The callbacks only hand work over; `main` runs it on the main thread, which lives as long as the child.
    """

    def __init__(self, sandbox: Path) -> None:
        self._sandbox = sandbox
        self._arrived = threading.Event()
        self._lock = threading.Lock()
        self._driver: ExecutorDriver | None = None
        self._task_id = ""
        self._order: LaunchOrder | None = None
        self._child: ChildProcess | None = None
        self._shut_down = False

    def main(self, driver: ExecutorDriver) -> None:
        """Waits for the task, runs it, reports its end and waits until the agent knows.

        Args:
            driver: a started driver that calls this object back.
        """
        self._driver = driver
        self._arrived.wait()
        order = self._order
        if order is None:
            driver.wait_for_acknowledgements(ACKNOWLEDGE_TIMEOUT_S)
            return
        try:
            state, message, outcome = self._run(order)
        except Exception as error:
            # Nobody else would tell the user why the slot ended.
            logger.exception("the slot failed")
            state, message, outcome = "TASK_FAILED", f"the executor failed: {error!r}", self._outcome(None, None)
        self._update(state, message, outcome)
        if not driver.wait_for_acknowledgements(ACKNOWLEDGE_TIMEOUT_S):
            logger.error("the agent did not acknowledge %s", state)

    # Callbacks of pymesos, on its thread.

    def launchTask(self, driver: pymesos.MesosExecutorDriver, task: dict[str, Any]) -> None:  # noqa: N802
        """Takes the slot's task."""
        if self._order is not None:
            driver.sendStatusUpdate(
                {"task_id": task["task_id"], "state": "TASK_FAILED", "message": "this slot has a task already"}
            )
            return
        self._task_id = task["task_id"]["value"]
        try:
            self._order = LaunchOrder.decode(task["data"])
        except (KeyError, TypeError, ValueError) as error:
            message = f"this order is of another version of Dike than the agent's {__version__}: {error!r}"
            driver.sendStatusUpdate({"task_id": task["task_id"], "state": "TASK_FAILED", "message": message})
        self._arrived.set()

    def killTask(self, driver: pymesos.MesosExecutorDriver, task_id: dict[str, Any]) -> None:  # noqa: N802
        """Ends the process, gently first."""
        if task_id["value"] == self._task_id and self._order is not None:
            self._kill(self._order.kill_grace_s)

    def shutdown(self, driver: pymesos.MesosExecutorDriver) -> None:
        """Mesos wants the slot to end: the framework or the agent is gone."""
        self._kill(SHUTDOWN_GRACE_S)
        self._arrived.set()

    def error(self, driver: pymesos.MesosExecutorDriver, message: str) -> None:
        """The agent refuses this executor."""
        logger.error("error from Mesos: %s", message)
        self.shutdown(driver)

    # The task.

    def _run(self, order: LaunchOrder) -> tuple[str, str, Outcome]:
        self._update("TASK_STARTING", "fetching the script")
        folder = self._sandbox / "bundle"
        try:
            bundle.fetch(order.bundle_url, folder)
        except bundle.BundleError as error:
            return "TASK_FAILED", str(error), self._outcome(None, None)
        reader, writer = os.pipe()
        child = ChildProcess(self._command(order, folder, writer), self._on_output)
        reports = threading.Thread(target=self._forward_reports, args=(reader,), daemon=True)
        reports.start()
        with self._lock:
            self._child = child
            if self._shut_down:
                child.kill(0)
        try:
            exit_code = child.run(lambda: self._started(writer))
        except OSError as error:
            os.close(writer)
            return "TASK_FAILED", f"the process could not be started: {error}", self._outcome(child, None)
        if exit_code is None:
            os.close(writer)
        reports.join(2.0)
        outcome = self._outcome(child, exit_code)
        if child.kill_requested:
            return "TASK_KILLED", "killed on request", outcome
        if exit_code == 0:
            return "TASK_FINISHED", "exited with status 0", outcome
        return "TASK_FAILED", describe_exit(exit_code), outcome

    def _started(self, writer: int) -> None:
        os.close(writer)
        self._update("TASK_RUNNING", "running")

    def _command(self, order: LaunchOrder, folder: Path, report_fd: int) -> Command:
        threads = str(max(1, math.ceil(order.cpus)))
        environment = {
            **os.environ,
            "PYTHONUNBUFFERED": "1",
            "TF_CPP_MIN_LOG_LEVEL": "2",
            # Not the threads between ops: a server with too few of them waits for itself.
            "TF_NUM_INTRAOP_THREADS": threads,
            "OMP_NUM_THREADS": threads,
            **order.environment,
            "DIKE_CHECKPOINT_DIR": order.task.checkpoint_dir,
            process.PARENT_VARIABLE: str(os.getpid()),
            task_module.VARIABLE: dataclasses.replace(order.task, report_fd=report_fd).dumps(),
        }
        if order.gpu_devices is not None:
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, order.gpu_devices)) or "-1"
        script = folder / order.script
        # -P: a user's file called solver.py or json.py beside the script must not shadow what we import first.
        arguments = [sys.executable, "-P", "-m", "dike.launch", str(script), *order.arguments]
        return Command(arguments, script.parent, environment, (report_fd,))

    def _kill(self, grace_s: float) -> None:
        with self._lock:
            self._shut_down = True
            if self._child is not None:
                self._child.kill(grace_s)

    def _on_output(self, stream: str, offset: int, data: bytes) -> None:
        if self._order is not None and self._order.stream_logs:
            self._message(LogChunk(self._task_id, stream, offset, data).encode())

    def _forward_reports(self, reader: int) -> None:
        with os.fdopen(reader, encoding="utf-8", errors="replace") as lines:
            for line in lines:
                try:
                    content = json.loads(line)
                except ValueError:
                    logger.warning("not a report: %r", line[:200])
                    continue
                self._message(Report(self._task_id, content).encode())

    def _message(self, data: str) -> None:
        assert self._driver is not None
        try:
            self._driver.sendFrameworkMessage(data)
        except (OSError, RuntimeError, http.client.HTTPException) as error:
            # Mesos promises nothing for messages either; the sandbox has the whole log.
            logger.warning("message not delivered: %s", error)

    def _update(self, state: str, message: str, outcome: Outcome | None = None) -> None:
        assert self._driver is not None
        status: dict[str, Any] = {"task_id": {"value": self._task_id}, "state": state, "message": message}
        if outcome is not None:
            status["data"] = outcome.encode()
        self._driver.sendStatusUpdate(status)

    def _outcome(self, child: ChildProcess | None, exit_code: int | None) -> Outcome:
        return Outcome(
            exit_code=exit_code,
            log_bytes=dict(child.log_bytes) if child else {},
            tail=child.tail if child else "",
            sandbox=str(self._sandbox),
        )


def describe_exit(exit_code: int | None) -> str:
    """An exit code in words: `exited with status 3`, `ended by signal 9 (SIGKILL)`."""
    if exit_code is None:
        return "was never started"
    if exit_code >= 0:
        return f"exited with status {exit_code}"
    try:
        name = signal.Signals(-exit_code).name
    except ValueError:
        name = "unknown"
    return f"ended by signal {-exit_code} ({name})"
