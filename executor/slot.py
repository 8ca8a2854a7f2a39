"""The slot of a training job: one process."""

from __future__ import annotations

import dataclasses
import logging
import os
import sys
import threading
from pathlib import Path

from dike import task as task_module
from dike.task import TaskSpec
from executor import bundle
from executor.channel import TaskChannel, TaskEnd
from executor.environment import process_environment
from executor.messages import LaunchOrder, Outcome, WantedOutput
from executor.output import DRAIN_S, OutputSender, forward_reports
from executor.outputs import OUTPUT_DIR_VARIABLE, Outputs
from executor.process import ChildProcess, Command, describe_exit, keep_tails

logger = logging.getLogger(__name__)


class JobSlot:
    """Runs the one process of a training job's task."""

    def __init__(self, channel: TaskChannel, order: LaunchOrder) -> None:
        self._channel = channel
        self._order = order
        self._sender = OutputSender(channel, enabled=order.stream_logs)
        self._lock = threading.Lock()
        self._child: ChildProcess | None = None
        self._outputs: Outputs | None = None
        self._shut_down = False

    def run(self) -> TaskEnd:
        """Fetches the script and runs it to its end."""
        self._channel.update("TASK_STARTING", "fetching the script")
        folder = self._channel.sandbox / "bundle"
        try:
            bundle.fetch(self._order.bundle_url, folder)
        except bundle.BundleError as error:
            return self._end("TASK_FAILED", str(error))
        if self._order.task.is_chief:
            self._outputs = outputs_of(self._order, self._order.task, folder)
            self._outputs.restore()
        reader, writer = os.pipe()
        child = ChildProcess(self._command(folder, writer), self._sender.add)
        saved = self._outputs.save_soon if self._outputs is not None else lambda: None
        reports = forward_reports(os.fdopen(reader, "rb"), self._channel, saved)
        with self._lock:
            self._child = child
            if self._shut_down:
                child.kill(0)
        try:
            exit_code = child.run(lambda: self._started(writer))
        except OSError as error:
            os.close(writer)
            return self._end("TASK_FAILED", f"the process could not be started: {error}")
        if exit_code is None:
            os.close(writer)
        reports.join(DRAIN_S)
        if self._outputs is not None:
            self._outputs.finish(is_killed=child.kill_requested)
        if child.kill_requested:
            return self._end("TASK_KILLED", "killed on request", exit_code)
        if exit_code == 0:
            return self._end("TASK_FINISHED", "exited with status 0", exit_code)
        return self._end("TASK_FAILED", describe_exit(exit_code), exit_code)

    def kill(self, grace_s: float | None = None) -> None:
        """Ends the process, gently first."""
        with self._lock:
            self._shut_down = True
            if self._child is not None:
                self._child.kill(self._order.kill_grace_s if grace_s is None else grace_s)

    def told(self, data: str) -> None:
        """The framework wants output again."""
        try:
            self._sender.resend(WantedOutput.decode(data))
        except ValueError as error:
            logger.warning("message ignored: %s", error)

    def _started(self, writer: int) -> None:
        os.close(writer)
        self._channel.update("TASK_RUNNING", "running")

    def _command(self, folder: Path, report_fd: int) -> Command:
        order = self._order
        environment = {
            **process_environment(order.cpus, order.environment, order.gpu_devices),
            **variables_of(order.task, folder),
            task_module.VARIABLE: dataclasses.replace(order.task, report_fd=report_fd).dumps(),
        }
        # -P: a user's file called solver.py or json.py beside the script must not shadow what we import first.
        arguments = [sys.executable, "-P", "-m", "dike.launch", order.script, *order.arguments]
        return Command(arguments, folder, environment, (report_fd,))

    def _end(self, state: str, message: str, exit_code: int | None = None) -> TaskEnd:
        self._sender.drain()
        child = self._child
        outcome = Outcome(
            exit_code=exit_code,
            log_bytes=dict(child.log_bytes) if child else {},
            tail=child.tail if child else "",
            sandbox=place_of_output(self._channel, self._order.task, failed=state == "TASK_FAILED"),
        )
        return TaskEnd(state, message, outcome.encode(self._sender.last_output))


def outputs_of(order: LaunchOrder, task: TaskSpec, workspace: Path) -> Outputs:
    """The outputs of a chief, which go to its job's checkpoint folder."""
    return Outputs(workspace, task.checkpoint_dir, task.job_id, task.attempt, order.environment)


def place_of_output(channel: TaskChannel, task: TaskSpec, *, failed: bool) -> str:
    """Where all that a task has written is: of one that has failed, where it outlasts Mesos' sandbox."""
    if not failed:
        return str(channel.sandbox)
    kept = Path(task.checkpoint_dir, "failed", f"{task.role}-{task.index}-attempt-{task.attempt}")
    copies = {channel.sandbox / stream: kept / stream for stream in ("stdout", "stderr")}
    return str(kept if keep_tails(task.checkpoint_dir, copies) else channel.sandbox)


def variables_of(task: TaskSpec, workspace: Path) -> dict[str, str]:
    """Variables that tell a script where its checkpoints and its outputs go."""
    return {"DIKE_CHECKPOINT_DIR": task.checkpoint_dir, OUTPUT_DIR_VARIABLE: str(workspace)}
