"""The process of one attempt of a training job, in its slot."""

from __future__ import annotations

import dataclasses
import os
import signal
from pathlib import Path

from dike import process
from dike import task as tasks
from dike.task import TaskSpec
from executor.channel import TaskChannel
from executor.forked import ForkedProcess
from executor.limits import Group, Groups
from executor.messages import LaunchOrder
from executor.monitor import RunMonitor
from executor.output import DRAIN_S, OutputCopier, forward_reports
from executor.outputs import OUTPUT_DIR_VARIABLE, Outputs
from executor.zygote import ForkRequest

REPORT_FD = 3
"""Where a zygote puts the third file descriptor that comes with a request."""
STOPPED_CODES = (0, process.EXIT_CODE_TERMINATED, -signal.SIGTERM)
"""How a process may end that was asked to; -SIGTERM is how servers and workers do."""


class AttemptProcess:
    """From the decision to start it until nothing of it is left: it waits for a zygote, is alive, then over.

    Args:
        task: what it has to know of the job and of itself.
        output: copies what it writes.
        channel: its slot's task.
        monitor: knows the GPU memory that it leaves behind.
        outputs: what its script writes, restored already; None where nothing is brought back.

    Attributes:
        task: the one given.
        monitor: the one given.
        asked: whether a zygote was asked for its process.
        process: its process, once there is one.
        stopped: whether that is to make place.
        group: its process' control group; None before that is asked for.
    """

    def __init__(
        self,
        task: TaskSpec,
        output: OutputCopier,
        channel: TaskChannel,
        monitor: RunMonitor,
        outputs: Outputs | None = None,
    ) -> None:
        self.task = task
        self.monitor = monitor
        self.asked = False
        self.process: ForkedProcess | None = None
        self.stopped = False
        self.group: Group | None = None
        self._output = output
        self._channel = channel
        self._outputs = outputs
        pipes = [os.pipe() for _ in range(3)]
        stdout, stderr, reports = (os.fdopen(reader, "rb") for reader, _ in pipes)
        self._writers = tuple(writer for _, writer in pipes)
        output.follow(stdout, stderr)
        self._reports = forward_reports(reports, channel, outputs.save_soon if outputs is not None else lambda: None)

    def __str__(self) -> str:
        return f"attempt {self.task.attempt}"

    @property
    def over_s(self) -> float | None:
        """When its process ended, on the monotonic clock; None before."""
        return None if self.process is None else self.process.over_s

    @property
    def is_over(self) -> bool:
        return self.over_s is not None

    @property
    def watched(self) -> tuple[int, ...]:
        """File descriptors that can be read when there is something to `poll`."""
        return () if self.process is None else self.process.watched

    def poll(self) -> None:
        """Takes in its end."""
        if self.process is not None:
            self.process.poll()

    @property
    def ended_as_asked(self) -> bool:
        """Whether it was to make place, and did; not whether it has saved.

        How a process ends that has nothing to save does not matter.
        """
        assert self.process is not None
        in_order = self.process.exit_code in STOPPED_CODES or self.process.killed
        return self.stopped and (in_order or not self.task.is_chief)

    def request(self, order: LaunchOrder, folder: Path, groups: Groups) -> tuple[ForkRequest, tuple[int, ...]]:
        """What a zygote is to be asked for, and the file descriptors that go with it.

        Args:
            order: of its slot.
            folder: the unpacked bundle.
            groups: makes the control group that the process enters.
        """
        environment = {
            # Tell a script where its checkpoints and its outputs go.
            "DIKE_CHECKPOINT_DIR": self.task.checkpoint_dir,
            OUTPUT_DIR_VARIABLE: str(folder),
            tasks.VARIABLE: dataclasses.replace(self.task, report_fd=REPORT_FD).dumps(),
        }
        self.group = self.group or groups.make()
        request = ForkRequest(
            Path(order.script),
            order.arguments,
            folder,
            environment,
            groups=self.group.folders,
            processes=self.group.most_processes,
        )
        return request, self._writers

    def started(self, pid: int) -> None:
        """Its process exists, as a child of ours."""
        self.process = ForkedProcess(pid)
        self._channel.started(pid)
        self._close_writers()

    def abandon(self) -> None:
        """It will never have a process."""
        if self.group is not None:
            self.group.remove()
        self._close_writers()
        self.drain()

    def drain(self, *, is_killed: bool = False) -> None:
        """Waits until what it has written and reported is on its way; nothing of it must be left by then.

        Args:
            is_killed: whether its slot is to end at once.
        """
        self._output.drain()
        self._reports.join(DRAIN_S)
        if self._outputs is not None and self.process is not None:
            self._outputs.finish(is_killed=is_killed)

    def _close_writers(self) -> None:
        for descriptor in self._writers:
            os.close(descriptor)
