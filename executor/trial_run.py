"""One run of a trial in a slot: its process, its files and pipes, its end."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import signal
import time
from pathlib import Path

from dike.trial import spec as specs
from executor.monitor import RunMonitor
from executor.process import signal_group, tail_of, wait_readable
from executor.trial_messages import RunEnd, RunKey, TrialRun
from executor.trial_reports import RunReports
from executor.zygote import ForkRequest

logger = logging.getLogger(__name__)

REPORT_FD, CONTROL_FD = 3, 4
"""Where a trial's process finds its pipes."""
READ_BYTES = 1 << 16


class SlotRun:
    """A run, from the decision to start it until nothing of it is left.

    It waits until a zygote has forked it, then it is alive, then over. All methods belong to one thread.

    Args:
        order: what to run.
        sandbox: folder for its output, a file of its own.
        monitor: watches it.

    Attributes:
        monitor: the one given.
        reports: what it has reported.
        pid: its process, which leads its process group; None while it waits.
        over_s: when it was over, on the monotonic clock; None before.
        asked_s: when it was first asked to end; None before.
    """

    def __init__(self, order: TrialRun, sandbox: Path, monitor: RunMonitor) -> None:
        self.monitor = monitor
        self.reports = RunReports(order.trial)
        self.pid: int | None = None
        self.over_s: float | None = None
        self.asked_s: float | None = None
        self._order = order
        self._sandbox = sandbox
        self._log = sandbox / f"trial-{order.trial.number}-run-{order.trial.run}.out"
        self._output = os.open(self._log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self._report_reader, self._report_writer = os.pipe()
        self._control_reader, self._control_writer = os.pipe()
        os.set_blocking(self._report_reader, False)
        os.set_blocking(self._control_writer, False)
        self._pidfd: int | None = None
        self._can_report = True
        self._since_s = 0.0
        self._exit_code: int | None = None
        self._kill_s: float | None = None
        self._terminated = False
        self._stopped = False
        self._reason = ""
        self._failure = ""

    @property
    def key(self) -> RunKey:
        return self._order.key

    @property
    def is_over(self) -> bool:
        return self.over_s is not None

    @property
    def due_s(self) -> float | None:
        """When it will be killed unless it ends before, on the monotonic clock; None if that is not planned."""
        return self._kill_s

    @property
    def watched(self) -> tuple[int, ...]:
        """File descriptors that can be read when there is something to `poll`."""
        if self._pidfd is None:
            return ()
        return (self._pidfd, self._report_reader) if self._can_report else (self._pidfd,)

    def request(self, folder: Path, script: str) -> tuple[ForkRequest, tuple[int, int, int, int]]:
        """What a zygote is to be asked for, and the file descriptors that go with it.

        Args:
            folder: the unpacked bundle.
            script: path of the script inside.
        """
        trial = dataclasses.replace(self._order.trial, report_fd=REPORT_FD, control_fd=CONTROL_FD)
        path = folder / script
        request = ForkRequest(path, self._order.arguments, path.parent, {specs.VARIABLE: trial.dumps()})
        return request, (self._output, self._output, self._report_writer, self._control_reader)

    def started(self, pid: int) -> None:
        """Its process exists, as a child of ours."""
        self.pid = pid
        self._pidfd = os.pidfd_open(pid)
        self._since_s = time.monotonic()
        self._close_its_ends()

    def not_started(self, reason: str, *, failed: bool = False) -> None:
        """It is over without ever having begun.

        Args:
            reason: why.
            failed: whether that is a failure of the run.
        """
        self._stopped, self._reason = True, reason
        self._failure = reason if failed else ""
        self._since_s = self.over_s = time.monotonic()
        self._close_its_ends()

    def poll(self) -> None:
        """Takes in what it has reported, and its end."""
        if self._pidfd is None:
            return
        has_ended = bool(wait_readable([self._pidfd], 0))
        if has_ended:
            self._reap(self._pidfd)
        try:
            while data := os.read(self._report_reader, READ_BYTES):
                self.reports.feed(data)
            self._can_report = False
        except BlockingIOError:
            return

    def _reap(self, pidfd: int) -> None:
        assert self.pid is not None
        # Before its own process is reaped no other group can have its number.
        signal_group(self.pid, signal.SIGKILL)
        self.over_s = time.monotonic()
        try:
            _, status, resources = os.wait4(self.pid, 0)
            self._exit_code = os.waitstatus_to_exitcode(status)
            busy_s = resources.ru_utime + resources.ru_stime
            self.monitor.ended(resources.ru_maxrss << 10, busy_s / max(self.over_s - self._since_s, 1e-3))
        except ChildProcessError:
            self._failure = "its process was not a child of the executor, so nobody knows its exit code"
        os.close(pidfd)
        self._pidfd = None

    def suspend(self, timeout_s: float) -> None:
        """Asks it to save its state and end; asks once.

        Args:
            timeout_s: it is killed if it has not ended by then.
        """
        if self.asked_s is not None:
            return
        self.asked_s = time.monotonic()
        self._kill_s = self.asked_s + timeout_s
        self._reason = f"it did not save and end within {timeout_s:g} s of the request to suspend"
        with contextlib.suppress(BrokenPipeError):
            os.write(self._control_writer, b"suspend\n")

    def terminate(self, grace_s: float, reason: str) -> None:
        """Ends it: SIGTERM at the first call, SIGKILL `grace_s` seconds later."""
        if self._terminated:
            return
        now_s = time.monotonic()
        self.asked_s = self.asked_s or now_s
        self._kill_s = now_s + grace_s
        self._terminated = self._stopped = True
        self._reason = reason
        self._signal(signal.SIGTERM)

    def kill_if_due(self) -> None:
        """Kills it if its time is up."""
        if self._kill_s is not None and time.monotonic() >= self._kill_s:
            logger.warning("trial %d, run %d is killed: %s", *self.key, self._reason)
            self._stopped = True
            self._kill_s = None
            self._signal(signal.SIGKILL)

    def end(self) -> RunEnd:
        """How it ended; to be called once, when nothing of it is left."""
        assert self.over_s is not None
        os.close(self._report_reader)
        os.close(self._control_writer)
        reports = self.reports
        outcome, message = reports.outcome(self._exit_code, self._reason if self._stopped else "")
        if self._failure:
            outcome, message = "failed", self._failure
        trial, number = self.key
        return RunEnd(
            trial=trial,
            run=number,
            outcome=outcome,
            exit_code=self._exit_code,
            checkpoint=reports.checkpoint,
            step=reports.checkpoint_step,
            message=message,
            tail=tail_of(self._log),
            last=reports.last,
            preemptible=reports.was_preemptible,
            suspend_s=None if self.asked_s is None else time.monotonic() - self.asked_s,
            seconds=self.over_s - self._since_s,
            usage=self.monitor.peak,
            sandbox=str(self._sandbox),
        )

    def _signal(self, number: signal.Signals) -> None:
        assert self.pid is not None
        assert self._pidfd is not None
        signal_group(self.pid, number)
        # It may not have come to leading a group yet.
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, number)

    def _close_its_ends(self) -> None:
        for descriptor in (self._output, self._report_writer, self._control_reader):
            os.close(descriptor)
