"""Reports of a slot: each is kept, and sent again if necessary, until the framework acknowledges it."""

from __future__ import annotations

import dataclasses
import time

from executor.channel import TaskChannel, TaskEnd
from executor.run_log import Piece, RunLog
from executor.trial_messages import Losses, RunEnd, RunKey, SlotStatus, TrialOutput, Usage, Wanted
from executor.trial_reports import KeptReports
from executor.trial_run import SlotRun

HEARTBEAT_INTERVAL_S = 1.0
LOSSES_INTERVAL_S = 0.5
"""Minimum interval between messages with reports."""
MAX_REPORTS_PER_MESSAGE = 1000
MAX_PIECES_PER_HEARTBEAT = 8
"""Maximum number of pieces of a run's output sent at a heartbeat."""
ACKNOWLEDGE_TIMEOUT_S = 1.0
"""Maximum wait of a leaving slot until its ends are acknowledged; its last status update contains them too."""


class SlotReporter:
    """Sends the ends, the reports and the output of a slot's runs, and the slot's status.

    Attributes:
        ends: of runs, not acknowledged yet.
        ended: all runs that have ended in the slot.
    """

    def __init__(self, channel: TaskChannel) -> None:
        self.ends: list[RunEnd] = []
        self.ended: set[RunKey] = set()
        self._channel = channel
        self._reports: dict[RunKey, KeptReports] = {}
        """Reports of ended runs, until their end is acknowledged."""
        self._printed: dict[RunKey, RunLog] = {}
        """Their output, likewise."""
        self._last_status: SlotStatus | None = None
        self._last_heartbeat_s = self._last_losses_s = 0.0

    @property
    def is_heartbeat_due(self) -> bool:
        return time.monotonic() - self._last_heartbeat_s >= HEARTBEAT_INTERVAL_S

    def deadline_s(self, run: SlotRun | None) -> float:
        """Monotonic time of the next message that no event triggers."""
        heartbeat_s = self._last_heartbeat_s + HEARTBEAT_INTERVAL_S
        has_losses = run is not None and not run.has_ended and run.reports.losses.has_unsent
        return min(heartbeat_s, self._last_losses_s + LOSSES_INTERVAL_S) if has_losses else heartbeat_s

    def add_end(self, end: RunEnd, run: SlotRun | None = None) -> None:
        """Adds the end of a run. `run`: None if it was never started."""
        self.ends.append(end)
        self.ended.add(end.key)
        if run is not None:
            self._reports[end.key] = run.reports.losses
            self._printed[end.key] = run.printed

    def acknowledge(self, wanted: Wanted, run: SlotRun | None) -> None:
        """Forgets what the framework has received, and has the message answered.

        `run`: the run in the slot.
        """
        self.ends = [end for end in self.ends if end.key not in wanted.acknowledged_ends]
        for key in wanted.acknowledged_ends:
            self._reports.pop(key, None)
            self._printed.pop(key, None)
        reports, printed = dict(self._reports), dict(self._printed)
        if run is not None:
            reports[run.key], printed[run.key] = run.reports.losses, run.printed
        for trial, number, count in wanted.acknowledged_reports:
            if (trial, number) in reports:
                reports[trial, number].acknowledge(count)
        for trial, number, size in wanted.acknowledged_output:
            if (trial, number) in printed:
                printed[trial, number].acknowledge(size)
        self._last_status = None

    def send_reports(self, run: SlotRun | None) -> None:
        """Sends the reports and the output of runs that have ended, before their ends, and the reports that are due of
        the run in the slot.
        """
        for key, reports in self._reports.items():
            self._send_losses(key, reports)
        for key, log in self._printed.items():
            while pieces := log.take(MAX_PIECES_PER_HEARTBEAT, has_ended=True):
                self._send_pieces(key, pieces)
        now_s = time.monotonic()
        if run is not None and run.reports.losses.has_unsent and now_s - self._last_losses_s >= LOSSES_INTERVAL_S:
            self._last_losses_s = now_s
            self._send_losses(run.key, run.reports.losses)

    def send_printed(self, run: SlotRun) -> None:
        """Sends some of the output of the run in the slot."""
        self._send_pieces(run.key, run.printed.take(MAX_PIECES_PER_HEARTBEAT, has_ended=False))

    def send_status(self, status: SlotStatus, *, is_due: bool) -> None:
        """Sends the status if it is due or has news."""
        news = dataclasses.replace(status, step=0, usage=Usage())
        if status.run is not None:
            # `paused` can wait for the heartbeat; `unsaved` cannot: those resume nowhere else.
            news = dataclasses.replace(news, paused=())
        if is_due:
            self._last_heartbeat_s = time.monotonic()
        if is_due or news != self._last_status:
            self._last_status = news
            self._channel.send(status.encode())

    def conclude(self, status: SlotStatus, end: TaskEnd) -> None:
        """Sends the last status with all that is not acknowledged, and the end of the task to Mesos."""
        for reports in self._reports.values():
            reports.acknowledge(max(reports.oldest, reports.count - MAX_REPORTS_PER_MESSAGE))
        losses = tuple(self._next_losses(key, reports) for key, reports in self._reports.items() if reports.has_unsent)
        output = tuple(self._output(key, piece) for key, log in self._printed.items() for piece in log.take_tail())
        last = dataclasses.replace(status, losses=losses, output=output).encode()
        self._channel.send(last)
        self._channel.update(end.state, end.message, last)

    def _send_losses(self, key: RunKey, reports: KeptReports) -> None:
        while reports.has_unsent:
            self._channel.send(self._next_losses(key, reports).encode())

    def _next_losses(self, key: RunKey, reports: KeptReports) -> Losses:
        first, taken = reports.take(MAX_REPORTS_PER_MESSAGE)
        return Losses(self._channel.task_id, *key, taken, first, reports.oldest)

    def _send_pieces(self, key: RunKey, pieces: list[Piece]) -> None:
        for piece in pieces:
            self._channel.send(self._output(key, piece).encode())

    def _output(self, key: RunKey, piece: Piece) -> TrialOutput:
        return TrialOutput(self._channel.task_id, *key, piece.offset, piece.data, piece.skipped)
