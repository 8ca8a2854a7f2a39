"""The process of one attempt of a training job."""

from __future__ import annotations

import dataclasses
import logging
import os
import signal
from pathlib import Path

from dike import process
from dike import task as tasks
from dike.task import TaskSpec
from executor.channel import TaskChannel
from executor.forked import ForkedProcess
from executor.limits import ControlGroup, ControlGroups
from executor.messages import LaunchOrder
from executor.mirror import KILLED_PATIENCE_S, PATIENCE_S, Mirror, Writer
from executor.monitor import RunMonitor
from executor.outputs import OUTPUT_DIR_VARIABLE, Outputs
from executor.streams import DRAIN_TIMEOUT_S, OutputCopier, forward_reports
from executor.zygote import ForkRequest

logger = logging.getLogger(__name__)

REPORT_FD = 3
"""File descriptor of the report pipe in a forked process."""
STOPPED_EXIT_CODES = (0, process.EXIT_CODE_TERMINATED, -signal.SIGTERM)
"""Exit codes of a process that stopped on request; servers and workers end by SIGTERM."""


class AttemptProcess:
    """A job's process, from the request to the zygote until nothing of it is left.

    Args:
        task: what the process is to run.
        output: copies its standard output and error.
        channel: the slot's task.
        monitor: records its GPU memory.
        outputs: the files that its script writes, already restored; None if none are saved.
        mirror: the copy of its checkpoint folder, if it does not see that itself.

    Attributes:
        is_requested: whether a zygote has been asked to fork it.
        process: None before the fork.
        stop_requested: whether it was asked to stop, because the job is resized.
        group: its control group; None before the request.
    """

    def __init__(
        self,
        task: TaskSpec,
        output: OutputCopier,
        channel: TaskChannel,
        monitor: RunMonitor,
        outputs: Outputs | None = None,
        mirror: Mirror | None = None,
    ) -> None:
        self.task = task if mirror is None else dataclasses.replace(task, checkpoint_dir=str(mirror.local))
        self.monitor = monitor
        self.is_requested = False
        self.process: ForkedProcess | None = None
        self.stop_requested = False
        self.group: ControlGroup | None = None
        self._output = output
        self._channel = channel
        self._outputs = outputs
        pipes = [os.pipe() for _ in range(3)]
        stdout, stderr, reports = (os.fdopen(reader, "rb") for reader, _ in pipes)
        self._writers = tuple(writer for _, writer in pipes)
        output.follow(stdout, stderr)
        self._mirror = mirror
        saved = lambda: None  # noqa: E731 (a task that is not the chief saves nothing)
        if outputs is not None:
            saved = outputs.save_soon if mirror is None else self._save_and_push
        self._reports = forward_reports(reports, channel, saved, mirror)

    def __str__(self) -> str:
        return f"attempt {self.task.attempt}"

    @property
    def ended_at_s(self) -> float | None:
        """Monotonic time of the end of the process; None before."""
        return None if self.process is None else self.process.ended_at_s

    @property
    def has_ended(self) -> bool:
        return self.ended_at_s is not None

    @property
    def watched_fds(self) -> tuple[int, ...]:
        return () if self.process is None else self.process.watched_fds

    def poll(self) -> None:
        if self.process is not None:
            self.process.poll()

    @property
    def ended_as_requested(self) -> bool:
        """Whether the process stopped on request. Only a chief has to end in order; how others end does not matter."""
        assert self.process is not None
        in_order = self.process.exit_code in STOPPED_EXIT_CODES or self.process.killed
        return self.stop_requested and (in_order or not self.task.is_chief)

    def make_fork_request(
        self, order: LaunchOrder, folder: Path, groups: ControlGroups
    ) -> tuple[ForkRequest, tuple[int, ...]]:
        """Returns the request to the zygote, and the file descriptors to pass. Creates the control group."""
        environment = {
            # Read by scripts.
            "DIKE_CHECKPOINT_DIR": self.task.checkpoint_dir,
            OUTPUT_DIR_VARIABLE: str(folder),
            tasks.VARIABLE: dataclasses.replace(self.task, report_fd=REPORT_FD).dumps(),
            **({} if self._mirror is None else self._mirror.environment),
        }
        self.group = self.group or groups.make()
        request = ForkRequest(
            Path(order.script),
            order.arguments,
            folder,
            environment,
            groups=self.group.folders,
            processes=self.group.max_processes,
        )
        return request, self._writers

    def adopt(self, pid: int) -> None:
        """Takes over the forked process, which is a child of this one."""
        self.process = ForkedProcess(pid)
        self._channel.process_started(pid)
        self._close_writers()

    def abandon(self) -> None:
        """Releases everything; no process will be forked."""
        if self.group is not None:
            self.group.remove()
        self._close_writers()
        self.drain()

    def drain(self, *, is_killed: bool = False) -> None:
        """Waits until output, reports and files are sent or saved; briefly if `is_killed`. Its process has ended."""
        self._output.drain()
        self._reports.join(DRAIN_TIMEOUT_S)
        if self._outputs is not None and self.process is not None:
            self._outputs.finish(is_killed=is_killed)
            self._push(KILLED_PATIENCE_S if is_killed else PATIENCE_S)

    def _save_and_push(self) -> None:
        assert self._outputs is not None
        self._outputs.save()
        self._push(PATIENCE_S)

    def _push(self, patience_s: float) -> None:
        if self._mirror is None:
            return
        try:
            self._mirror.push(Writer(self.task.job_id, self.task.attempt), patience_s)
        except OSError as error:
            logger.error("%s could not be copied to the store: %s", self.task.checkpoint_dir, error)

    def _close_writers(self) -> None:
        for descriptor in self._writers:
            os.close(descriptor)
