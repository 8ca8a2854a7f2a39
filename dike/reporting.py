"""What a process of a job tells its executor: one JSON object a line, written to a file descriptor.

Lines are `{"type": "started"}`, `{"type": "placement", "variables": {name: device}}`,
`{"type": "progress", "step": n, "loss": x, ...}`, `{"type": "checkpoint", "path": p, "step": n}`,
`{"type": "resumed", "step": n}` once a checkpoint has been restored, `{"type": "total", "steps": n}` where the script
says how long it trains, `{"type": "rates", "workers": {index: steps a second}}` of workers' own speed, not counting
what they wait for (indices are text, as keys are in JSON), and `{"type": "profile", "profile": {...}}` of a model that
is not the planned one. Steps are counted over all workers, restarts and, where the script has several, calls of `fit`;
a later `total` replaces the one before.
A number that JSON cannot hold is written as text: `"nan"`, `"inf"`, `"-inf"`.
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
"""Progress is written at most this often; the last one is always written."""

_QUEUE_LENGTH = 256
_FLUSH_TIMEOUT_S = 5.0


SPEED_WINDOW_S = 10.0
"""The speed is a mean over this time, in which pauses count, such as those for validation."""


class _Speed:
    """Samples a second over the last `SPEED_WINDOW_S`."""

    def __init__(self) -> None:
        self._total = 0.0
        self._known: deque[tuple[float, float]] = deque()
        """Time, and samples until then: the newest before the window first, then at most one each half second."""

    def add(self, samples: float, now_s: float) -> float | None:
        """Counts samples that have been trained since the last call; None before the second."""
        self._total += samples
        if not self._known:
            # What came before includes the start of the process.
            self._known.append((now_s, self._total))
            return None
        begin_s, before = self._known[0]
        rate = (self._total - before) / (now_s - begin_s) if now_s > begin_s else None
        if now_s - self._known[-1][0] >= PROGRESS_INTERVAL_S:
            self._known.append((now_s, self._total))
        while len(self._known) > 1 and now_s - self._known[1][0] >= SPEED_WINDOW_S:
            self._known.popleft()
        return rate


class EpochLosses:
    """The losses of a `fit` as a curve that can be read: Keras gives the mean since the epoch began.

    The first of these in each epoch are those of a few batches, and reports come at any time. So what is reported is a
    mean over about as many batches as an epoch has: of the epoch before, as far as this one has not got.
    """

    def __init__(self) -> None:
        self._before: tuple[float, int] | None = None
        """Loss and batches of the epoch before."""
        self._now: tuple[float, int] | None = None

    def smoothed(self, loss: float, batches: int) -> float:
        """What to report.

        Args:
            loss: the mean since the epoch began.
            batches: how many batches of the epoch are done.
        """
        self._now = loss, batches
        if self._before is None or not math.isfinite(loss):
            return loss
        before, count = self._before
        done = min(1.0, batches / count)
        return done * loss + (1 - done) * before

    def epoch_ended(self) -> None:
        """The epoch is over."""
        if self._now is not None and math.isfinite(self._now[0]):
            self._before = self._now
        self._now = None


class Reporter:
    """Writes lines in a thread of its own, so that a slow or absent reader never holds up training.

    Args:
        fd: where to write; None reports nothing.
        clock: seconds, monotonic.
    """

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
        """The user's script is about to train, or the server serves."""
        self.send({"type": "started"})

    def placement(self, variables: Mapping[str, str]) -> None:
        """Which device each variable really is on."""
        self.send({"type": "placement", "variables": dict(variables)})

    def checkpoint(self, path: str, step: int) -> None:
        """A checkpoint was written."""
        self.send({"type": "checkpoint", "path": path, "step": step})

    def resumed(self, step: int) -> None:
        """A checkpoint has been restored: training goes on from there."""
        self.send({"type": "resumed", "step": int(step)})

    def total(self, steps: int) -> None:
        """The step at which the script will have trained to its end, if nothing stops it earlier."""
        self.send({"type": "total", "steps": int(steps)})

    def rates(self, workers: Mapping[int, float]) -> None:
        """Steps a second of each worker, by its own speed."""
        self.send({"type": "rates", "workers": {str(index): rate for index, rate in workers.items()}})

    def profile(self, profile: ModelProfile) -> None:
        """The script's model, which is not the planned one."""
        self.send({"type": "profile", "profile": profile.to_json()}, wait_s=_FLUSH_TIMEOUT_S)

    def progress(self, step: int, samples: float | None = None, **numbers: float | None) -> None:
        """Where training is; kept back when the last report is younger than `PROGRESS_INTERVAL_S`.

        Args:
            step: training steps done, counted over all workers and restarts.
            samples: trained since the last call, also if its report was kept back; reported as `samples_per_s`, a mean
                over the last `SPEED_WINDOW_S`. None where that is not known.
            numbers: what else is known, such as `loss`; None is left out.
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
        """Writes what was kept back and waits until all is out, for 5 s at most."""
        self._flush_progress()
        if self._thread is not None and self._thread.is_alive():
            deadline = time.monotonic() + _FLUSH_TIMEOUT_S
            try:
                self._lines.put(None, timeout=_FLUSH_TIMEOUT_S)
            except queue.Full:
                return  # nobody reads: the lines are lost on purpose
            self._thread.join(max(0.0, deadline - time.monotonic()))

    def _flush_progress(self) -> None:
        with self._lock:
            if self._pending is not None:
                self.send(self._pending)
                self._pending = None

    def _flush_late(self) -> None:
        """Writes what has been kept back for too long: the script may be hanging."""
        if self._pending is not None and self._clock() - self._last_progress_s >= PROGRESS_INTERVAL_S:
            self._last_progress_s = self._clock()
            self._flush_progress()

    def send(self, message: Mapping[str, Any], wait_s: float = 0.0) -> None:
        """Writes one line; gives it up if nobody has read the lines before it `wait_s` seconds later."""
        if self._fd is None:
            return
        line = (json.dumps(_jsonable(message)) + "\n").encode()
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._write_lines, name="dike-reports", daemon=True)
                self._thread.start()
            # At once: the next line of the script may be the one at which it crashes.
            if self._write_at_once(line):
                return
        try:
            self._lines.put(line, block=wait_s > 0, timeout=wait_s or None)
        except queue.Full:
            return  # nobody reads: training is worth more than its report

    def hint(self, message: Mapping[str, Any]) -> None:
        """Writes one line, unless that would have to wait."""
        if self._fd is not None:
            with self._lock:
                self._write_at_once((json.dumps(_jsonable(message)) + "\n").encode())

    def _write_at_once(self, line: bytes) -> bool:
        """Writes the line if it need not wait: pipes take up to PIPE_BUF bytes as a whole, or are full."""
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
                return  # the reader is gone (EPIPE): training goes on unseen
            self._lines.task_done()


def _jsonable(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _jsonable(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_jsonable(part) for part in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


_reporter: Reporter | None = None


def reporter() -> Reporter:
    """The reporter of this process, which the environment's task names."""
    from dike import task

    global _reporter
    if _reporter is None:
        spec = task.current()
        _reporter = Reporter(spec.report_fd if spec is not None else None)
    return _reporter
