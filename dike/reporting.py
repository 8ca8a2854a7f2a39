"""Reports of a job's process to its executor: one JSON object a line, written to a file descriptor.

Lines are `{"type": "started"}`, `{"type": "placement", "variables": {name: device}}`,
`{"type": "progress", "step": n, "loss": x, ...}`, `{"type": "checkpoint", "path": p, "step": n}`,
`{"type": "resumed", "step": n}` after a restore, `{"type": "total", "steps": n}` if the script has a last step,
`{"type": "rates", "workers": {index: steps a second}}` of each worker's own speed without waiting (indices are text),
and `{"type": "profile", "profile": {...}}` of a model that is not the planned one. Steps are counted over all workers,
restarts and calls of `fit`; a later `total` replaces the earlier one. NaN and infinity are text: `"nan"`, `"inf"`,
`"-inf"`.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import queue
import select
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dike.profile import ModelProfile

PROGRESS_INTERVAL_S = 0.5
"""Minimum interval between progress reports; the last report is always written."""

_QUEUE_LENGTH = 256
_FLUSH_TIMEOUT_S = 5.0


SPEED_WINDOW_S = 10.0
"""Speeds are means over this window, including pauses such as validation."""


class _Speed:
    def __init__(self) -> None:
        self._total = 0.0
        self._points: deque[tuple[float, float]] = deque()
        """(time, samples until then): the last one before the window, then at most one each half second."""

    def add(self, samples: float, now_s: float) -> float | None:
        """Adds samples trained since the last call and returns the speed; None at the first call."""
        self._total += samples
        if not self._points:
            # The first samples include the start of the process.
            self._points.append((now_s, self._total))
            return None
        begin_s, before = self._points[0]
        rate = (self._total - before) / (now_s - begin_s) if now_s > begin_s else None
        if now_s - self._points[-1][0] >= PROGRESS_INTERVAL_S:
            self._points.append((now_s, self._total))
        while len(self._points) > 1 and now_s - self._points[1][0] >= SPEED_WINDOW_S:
            self._points.popleft()
        return rate


class EpochLosses:
    """Smooths the losses of a `fit`: Keras gives the mean since the epoch began, which jumps at each epoch's start.

    The previous epoch's loss fills in for the batches of the epoch still to come.
    """

    def __init__(self) -> None:
        self._before: tuple[float, int] | None = None
        """Loss and batches of the previous epoch."""
        self._now: tuple[float, int] | None = None

    def smoothed(self, loss: float, batches: int) -> float:
        """Smooths `loss`, the mean over the first `batches` of the epoch."""
        self._now = loss, batches
        if self._before is None or not math.isfinite(loss):
            return loss
        before, count = self._before
        done = min(1.0, batches / count)
        return done * loss + (1 - done) * before

    def epoch_ended(self) -> None:
        if self._now is not None and math.isfinite(self._now[0]):
            self._before = self._now
        self._now = None


class Reporter:
    """Writes lines to `fd`, if any, in a thread of its own, so that a slow or absent reader does not block training."""

    def __init__(self, fd: int | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._fd = fd
        self._clock = clock
        self._lines: queue.Queue[bytes | None] = queue.Queue(_QUEUE_LENGTH)
        self._thread: threading.Thread | None = None
        self._last_progress_s = -math.inf
        self._pending: dict[str, Any] | None = None
        self._lock = threading.RLock()
        self._speed = _Speed()

    def started(self) -> None:
        self.send({"type": "started"})

    def placement(self, variables: Mapping[str, str]) -> None:
        """Reports each variable's actual device."""
        self.send({"type": "placement", "variables": dict(variables)})

    def checkpoint(self, path: str, step: int) -> None:
        self.send({"type": "checkpoint", "path": path, "step": step})

    def resumed(self, step: int) -> None:
        self.send({"type": "resumed", "step": int(step)})

    def total(self, steps: int) -> None:
        """Reports the step at which the training ends unless stopped earlier."""
        self.send({"type": "total", "steps": int(steps)})

    def rates(self, workers: Mapping[int, float]) -> None:
        self.send({"type": "rates", "workers": {str(index): rate for index, rate in workers.items()}})

    def profile(self, profile: ModelProfile) -> None:
        self.send({"type": "profile", "profile": profile.to_json()}, wait_s=_FLUSH_TIMEOUT_S)

    def progress(self, step: int, samples: float | None = None, **numbers: float | None) -> None:
        """Reports the progress of training, at most every `PROGRESS_INTERVAL_S`; an early report is delayed.

        Args:
            step: training steps done, counted over all workers and restarts.
            samples: trained since the last call, from which `samples_per_s` is computed; None if unknown.
            numbers: other values, such as `loss`; None is left out.
        """
        known = {name: float(number) for name, number in numbers.items() if number is not None}
        with self._lock:
            now_s = self._clock()
            if samples is not None and (rate := self._speed.add(samples, now_s)) is not None:
                known["samples_per_s"] = rate
            self._pending = {"type": "progress", "step": int(step), **known}
            if now_s - self._last_progress_s >= PROGRESS_INTERVAL_S:
                self._last_progress_s = now_s
                self._flush_progress()

    def close(self) -> None:
        """Writes a delayed report and waits up to 5 s until all lines are written."""
        self._flush_progress()
        if self._thread is not None and self._thread.is_alive():
            deadline = time.monotonic() + _FLUSH_TIMEOUT_S
            try:
                self._lines.put(None, timeout=_FLUSH_TIMEOUT_S)
            except queue.Full:
                return  # the reader is stuck: drop the lines
            self._thread.join(max(0.0, deadline - time.monotonic()))

    def _flush_progress(self) -> None:
        with self._lock:
            if self._pending is not None:
                self.send(self._pending)
                self._pending = None

    def _flush_late(self) -> None:
        """Writes an overdue report: the script may be hanging."""
        if self._pending is not None and self._clock() - self._last_progress_s >= PROGRESS_INTERVAL_S:
            self._last_progress_s = self._clock()
            self._flush_progress()

    def send(self, message: Mapping[str, Any], wait_s: float = 0.0) -> None:
        """Writes one line; drops it if the queue stays full for `wait_s` seconds."""
        if self._fd is None:
            return
        line = (json.dumps(_jsonable(message)) + "\n").encode()
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._write_lines, name="dike-reports", daemon=True)
                self._thread.start()
            # Immediately if possible: the script may crash at its next line.
            if self._try_write(line):
                return
        try:
            self._lines.put(line, block=wait_s > 0, timeout=wait_s or None)
        except queue.Full:
            return  # the reader is stuck: training matters more than its report

    def try_send(self, message: Mapping[str, Any]) -> None:
        """Writes one line if that does not block."""
        if self._fd is not None:
            with self._lock:
                self._try_write((json.dumps(_jsonable(message)) + "\n").encode())

    def _try_write(self, line: bytes) -> bool:
        """A pipe takes up to PIPE_BUF bytes atomically."""
        assert self._fd is not None
        if self._lines.unfinished_tasks or len(line) > select.PIPE_BUF:
            return False
        poll = select.poll()
        poll.register(self._fd, select.POLLOUT)
        if not poll.poll(0):
            return False
        with contextlib.suppress(OSError):  # the reader is gone
            os.write(self._fd, line)
        return True

    def _write_lines(self) -> None:
        assert self._fd is not None
        while True:
            try:
                line = self._lines.get(timeout=PROGRESS_INTERVAL_S)
            except queue.Empty:
                self._flush_late()
                continue
            if line is None:
                self._lines.task_done()
                return
            try:
                while line:
                    line = line[os.write(self._fd, line) :]
            except OSError:
                return  # the reader is gone (EPIPE): training continues without reports
            self._lines.task_done()


def _jsonable(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _jsonable(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_jsonable(part) for part in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


_reporter: Reporter | None = None


def reporter() -> Reporter:
    from dike import task

    global _reporter
    if _reporter is None:
        spec = task.current()
        _reporter = Reporter(spec.report_fd if spec is not None else None)
    return _reporter
