"""A trial's process: sends reports, receives requests, measures training time. Used by interceptions and `dike.report`.

One thread trains: it calls `progress` after each step and then reads `suspend_requested`. Another thread reads
requests, so a request that arrives during a step takes effect at its end.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

from dike import checkpoints, process
from dike.exceptions import BadInputError
from dike.process import end_process, flush_output
from dike.reporting import PROGRESS_INTERVAL_S, Reporter
from dike.trial import folders
from dike.trial import spec as specs
from dike.trial.spec import EXIT_SUSPENDED, TrialSpec

if TYPE_CHECKING:
    from dike.roles.gang import Gang

BEST_MODEL_FREE_S, BEST_MODEL_TIME_FRACTION = 5.0, 0.1
"""Maximum time to write best models: some seconds, plus a fraction of the training time. A script may report after each
batch, and each may be the best."""

HINT_INTERVAL_S = 0.05
"""Interval of hints of pending reports, which count if the process crashes before it sends them."""

REPORT_WAIT_S = 5.0
"""Maximum time to wait for a slow reader of a report that must not be lost."""

MAX_VALUES = 1000
"""Maximum number of the objective's values in a report. Beyond it, only every 2nd, 4th, 8th, ... value is kept."""

_ONLY_BATCHES = (
    "--stop has not judged this trial: it has only losses of single batches; call dike.report(step, loss=...) in the "
    "script."
)


@dataclass
class Standing:
    """A trial's objective to date: values that the script reports, or losses of batches if it reports none.

    Attributes:
        last: newest value.
        best, best_step: best finite value and its step.
        is_reported: whether the script has reported a value. From then on, losses of batches are ignored: a single
            batch says little.
        stated: number of values that the script has reported.
        epochs: number of finished epochs of `fit`, or of reports with the objective.
    """

    last: float | None = None
    best: float | None = None
    best_step: int | None = None
    is_reported: bool = False
    stated: int = 0
    epochs: int = 0

    def record(self, step: int, value: float, mode: str) -> bool:
        """Returns whether the value is the best one."""
        self.last = value
        if not math.isfinite(value):
            return False
        if self.best is not None and (value >= self.best if mode == "min" else value <= self.best):
            return False
        self.best, self.best_step = value, step
        return True

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def _mean(losses: Sequence[float]) -> float:
    """NaN if a loss is NaN; the newest loss if one is infinite."""
    if any(map(math.isnan, losses)):
        return math.nan
    if any(map(math.isinf, losses)):
        return losses[-1]
    try:
        return math.fsum(losses) / len(losses)
    except OverflowError:
        return math.fsum(loss / len(losses) for loss in losses)


class TrialRuntime:
    """The trial that this process is a run of.

    Attributes:
        suspend_requested: whether the slot is needed back; checked between two steps.
        save_at_end: writes the last checkpoint after the script has ended; None if nothing can be saved.
        save_best: stores the model when the script has reported its best value; None if it cannot be stored.
        standing: the objective to date.
        is_chief: whether it reports and writes; of several processes of a trial or a job, only the first does.
        has_ended: whether the script has ended, or the process is about to.
        gang: the workers that share each batch; None for one process.
        smooths_losses: whether losses are for display only, so that an epoch's first batches should be smoothed.
    """

    smooths_losses = False

    def __init__(self, spec: TrialSpec, clock: Callable[[], float] = time.monotonic) -> None:
        self.spec = spec
        self.suspend_requested = False
        self.save_at_end: Callable[[], object] | None = None
        self.save_best: Callable[[], object] | None = None
        self.standing = Standing()
        self.is_chief = True
        self.has_ended = False
        self.gang: Gang | None = None
        self._clock = clock
        self._lock = threading.RLock()
        self._has_pending = threading.Event()
        self._reporter = Reporter(spec.report_fd)
        self._step = 0
        self._trained_before_s = 0.0
        self._training_since_s: float | None = None
        self._checkpoint_s = clock()
        self._reported_s = self._hinted_s = -math.inf
        self._losses: list[float] = []
        self._metrics: dict[str, float] = {}
        self._value: float | None = None
        self._values: list[tuple[int, int, float]] = []
        self._stride = 1
        self._is_restated = False
        self._best_model_s = 0.0
        self._names: set[str] = set()
        self._has_objective = spec.resume_from is not None
        self._may_pause = False
        self._next_runs: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._training_message: dict[str, Any] = {}

    def follow(self) -> None:
        """Makes this process one of several of its trial or job of which another one reports and writes."""
        self.is_chief = False
        self.spec = dataclasses.replace(self.spec, report_fd=None, control_fd=None)
        self._reporter = Reporter(None)

    def listen(self) -> None:
        """Starts the threads that read requests and flush reports."""
        self.start_background_flush()
        if self.spec.control_fd is not None:
            threading.Thread(target=self._read_requests, name="dike-control", daemon=True).start()

    def start_background_flush(self) -> None:
        """Starts a thread that sends pending reports even if the script hangs or calls `os._exit`."""
        threading.Thread(target=self._flush_in_background, name="dike-progress", daemon=True).start()
        process.before_exit(self._finish_reports)

    def _flush_in_background(self) -> None:
        while self._has_pending.wait():
            self._has_pending.clear()
            threading.Event().wait(PROGRESS_INTERVAL_S)
            self.flush_progress(wait_s=0.0)

    def _finish_reports(self) -> None:
        # A thread that hangs may hold the lock.
        if self._lock.acquire(timeout=REPORT_WAIT_S):
            try:
                self.flush_progress()
            finally:
                self._lock.release()
        self._reporter.close()

    def _read_requests(self) -> None:
        assert self.spec.control_fd is not None
        with os.fdopen(self.spec.control_fd, encoding="utf-8") as requests:
            for request in requests:
                match request.split():
                    case ["suspend"]:
                        self._may_pause = False
                        self._request_suspension()
                    case ["pause"]:
                        self._may_pause = True
                        self._request_suspension()
                    case ["continue", number]:
                        self._next_runs.put(int(number))
        self._next_runs.put(None)

    @property
    def step(self) -> int:
        """Steps in all runs of the trial."""
        return self._step

    @property
    def is_training(self) -> bool:
        return self._training_since_s is not None

    @property
    def train_s(self) -> float:
        """Seconds of training in all runs of the trial, without the time after a checkpoint that a run resumed from."""
        since = self._training_since_s
        return self._trained_before_s + (0.0 if since is None else self._clock() - since)

    def started(self) -> None:
        self._send({"type": "started"})

    def check_model(self, variables: Callable[[], Iterable[tuple[str, Any]]]) -> None:
        """No-op for trials; a job compares its model with the plan before its first checkpoint.

        `variables` returns unique name and variable of everything that a profile would contain.
        """

    def epoch_begins(self, model: Any, step: int) -> None:
        """No-op for one process; workers that share batches compare the values of the model.

        Called before the first batch of an epoch, or the first one after a restore, when `step` batches are done.
        """

    def write_last(self, write: Callable[[], object]) -> None:
        """Writes a checkpoint that cannot be left out; waits while the disk is full."""
        if self.is_chief:
            checkpoints.retry_while_disk_full(write)

    def disable_suspension(self, why: str) -> None:
        print(f"dike: this trial cannot be saved: {why}.", file=sys.stderr, flush=True)
        if self.is_training:
            self.training(preemptible=False)

    def restored(self, path: str, step: int, train_s: float, standing: Mapping[str, Any]) -> None:
        """Reports that a checkpoint is restored; continues its counts. `standing` is its `Standing.to_json`."""
        self._step = step
        self._trained_before_s = train_s
        self.standing = Standing(**standing)
        self._send({"type": "restored", "path": path, "step": step})

    def training(self, *, preemptible: bool, batch_size: int | None = None) -> None:
        """Reports that the first step is about to start. Call again only if an argument changes.

        A trial that is not `preemptible` cannot be saved, only paused in memory. `batch_size` is None if unknown.
        """
        if self._training_since_s is None:
            if self.spec.run == 0:
                folders.clear_best(self.spec.folder)
            self._training_since_s = self._checkpoint_s = self._clock()
        known = {} if batch_size is None else {"batch_size": int(batch_size)}
        self._training_message = {"type": "training", "preemptible": preemptible, **known}
        self._send(self._training_message)

    def progress(
        self,
        step: int,
        loss: float | None = None,
        metrics: Mapping[str, float] | None = None,
        value: float | None = None,
        *,
        is_reported: bool = True,
    ) -> None:
        """Reports a step; sent with those of the next half second.

        A trial that cannot be saved waits here while it is paused.

        Args:
            step: steps done in all runs of the trial.
            loss: training loss of the step.
            metrics: newest values of other metrics.
            value: the objective's value, if there is a new one.
            is_reported: whether the script reported the value; False if Dike read it from a batch.
        """
        with self._lock:
            self._step = step
            if loss is not None:
                self._losses.append(loss)
                self._names.add("loss")
            if metrics:
                self._metrics.update(metrics)
                self._names.update(metrics)
            is_best = value is not None and self._take_value(step, value, is_reported=is_reported)
            self._has_objective |= value is not None or (loss is not None and self.spec.metric == "loss")
            if self._clock() - self._reported_s >= PROGRESS_INTERVAL_S:
                self.flush_progress(wait_s=0.0)
            else:
                self._has_pending.set()
                if self._clock() - self._hinted_s >= HINT_INTERVAL_S:
                    self._hinted_s = self._clock()
                    self._reporter.try_send({**self._pending_message(), "type": "kept_back", "values": []})
        if is_best and self.save_best is not None and self.is_chief:
            self.save_best()
        if self._may_pause and self.suspend_requested and not self._training_message.get("preemptible", True):
            self._pause(None, step)

    def _take_value(self, step: int, value: float, *, is_reported: bool) -> bool:
        """Returns whether the script reported the value and it is the best one."""
        if self.standing.is_reported and not is_reported:
            return False
        if is_reported and not self.standing.is_reported:
            self._is_restated = self.standing.best is not None
            self.standing = Standing(is_reported=True, epochs=self.standing.epochs)
        self._value = value
        if is_reported:
            self._add_value(step, value)
        return self.standing.record(step, value, self.spec.mode) and is_reported

    def _add_value(self, step: int, value: float) -> None:
        """Adds a value that the script reported, by which a pruner may stop the trial. Not for losses of batches."""
        self.standing.stated += 1
        if not self.spec.every_value:
            return
        if len(self._values) >= MAX_VALUES:
            # The same values in each trial.
            self._stride *= 2
            self._values = [each for each in self._values if each[0] % self._stride == 0]
        self._values.append((self.standing.stated, step, value))

    def is_over(self, step: int) -> bool:
        """Returns whether the trial has trained as many steps or epochs as the search lets it."""
        spec, epochs = self.spec, self.standing.epochs
        return (spec.max_steps is not None and step >= spec.max_steps) or (
            spec.max_epochs is not None and epochs >= spec.max_epochs
        )

    def end_if_over(self) -> None:
        """Ends a script with a training loop of its own, as `sys.exit(0)` does, once the trial is over.

        Raises:
            SystemExit: if it is.
        """
        if self.is_over(self.step):
            print(f"dike: this trial ends here, after step {self.step}.", file=sys.stderr, flush=True)
            raise SystemExit(0)

    def write_best(self, write: Callable[[], object]) -> None:
        """Writes the best model, if the disk has space and the time limit for best models is not used up."""
        if self._best_model_s > BEST_MODEL_FREE_S + BEST_MODEL_TIME_FRACTION * self.train_s:
            return
        begun_s = self._clock()
        checkpoints.skip_if_disk_full(write)
        self._best_model_s += self._clock() - begun_s

    def _best_fields(self) -> dict[str, Any]:
        best = {"best": self.standing.best, "best_step": self.standing.best_step}
        restated = {"restated": True} if self._is_restated else {}
        return {**best, **restated} if self.standing.best is not None else restated

    def _pending_message(self) -> dict[str, Any]:
        line: dict[str, Any] = {"type": "progress", "step": self._step, "train_s": self.train_s}
        if self._losses:
            line["loss"] = _mean(self._losses)
            # NaN is contagious in a sum, but not in min and max.
            is_nan = math.isnan(line["loss"])
            line["low"] = math.nan if is_nan else min(self._losses)
            line["high"] = math.nan if is_nan else max(self._losses)
            line["last"], line["count"] = self._losses[-1], len(self._losses)
        if self._metrics:
            line["metrics"] = dict(self._metrics)
        if self._value is not None:
            line |= {"value": self._value, **self._best_fields()}
        if self._values:
            line["values"] = list(self._values)
        return line

    def flush_progress(self, wait_s: float = REPORT_WAIT_S) -> None:
        """See `Reporter.send`."""
        with self._lock:
            if not self._losses and not self._metrics and self._value is None:
                return
            line = self._pending_message()
            self._is_restated = self._is_restated and self._value is None
            self._send(line, wait_s)
            self._losses.clear()
            self._metrics.clear()
            self._value = None
            self._values.clear()
            self._stride = 1
            self._reported_s = self._clock()

    @property
    def checkpoint_due(self) -> bool:
        return self.is_chief and self._clock() - self._checkpoint_s >= self.spec.checkpoint_interval_s

    def checkpoint_written(self, path: str, step: int) -> None:
        self._checkpoint_s = self._clock()
        self.flush_progress()
        self._send({"type": "checkpoint", "path": path, "step": step, "train_s": self.train_s})

    def unless_full(self, write: Callable[[], object]) -> bool:
        """Writes a checkpoint if the disk has space, else schedules a retry; returns whether it was written."""
        if checkpoints.skip_if_disk_full(write):
            return True
        self._checkpoint_s = self._clock()
        if self.suspend_requested:
            self.suspend_requested = False
            again = threading.Timer(checkpoints.DISK_FULL_RETRY_S, self._request_suspension)
            again.daemon = True
            again.start()
        return False

    def _request_suspension(self) -> None:
        self.suspend_requested = True

    def suspend(self, path: str, step: int) -> None:
        """Suspends the trial, whose state is in the checkpoint at `path`.

        Returns only if the process was paused and resumes as the trial's next run; else the process ends.
        """
        if not self._may_pause:
            self.flush_progress()
            self._send({"type": "suspended", "path": path, "step": step})
            self.leave(EXIT_SUSPENDED)
        self._pause(path, step)

    def _pause(self, path: str | None, step: int) -> None:
        """Pauses until the trial resumes in this process, as its next run. `path` is None without a checkpoint."""
        self.flush_progress()
        flush_output()
        paused_s = self._clock()
        self.suspend_requested = False
        self._send({"type": "paused", "path": path, "step": step})
        number = self._next_runs.get()
        if number is None:
            self.leave(EXIT_SUSPENDED)  # the executor is gone
        self.spec = dataclasses.replace(self.spec, run=number, resume_from=path or self.spec.resume_from)
        self._checkpoint_s, self._reported_s = self._clock(), -math.inf
        if self._training_since_s is not None:
            self._training_since_s += self._checkpoint_s - paused_s
        if path is not None:
            self._send({"type": "restored", "path": path, "step": step})
        self._send(self._training_message)

    def result(self, value: float, values: Mapping[str, float]) -> None:
        """Reports the return value of the function given to `dike.tune`, and all returned numbers by name."""
        self._has_objective = True
        self.flush_progress()
        known = self.standing
        if self.spec.metric not in values and known.best is not None and value not in (known.last, known.best):
            # An unnamed number that no epoch reported is another quantity: only this one counts.
            self.standing, self._is_restated = Standing(is_reported=True, epochs=known.epochs), True
            print(
                f"dike: the function's return value replaces the {self.spec.metric} of training, by which trials were "
                "compared until now; give it another name: metric='NAME'.",
                file=sys.stderr,
                flush=True,
            )
        self.standing.record(self._step, value, self.spec.mode)
        self._send({"type": "result", "value": value, "values": dict(values), **self._best_fields()})

    def refuse(self, message: str) -> None:
        self.flush_progress()
        self._send({"type": "bad_input", "message": message})

    def failed(self, message: str) -> None:
        self.flush_progress()
        self._send({"type": "failed", "message": message})

    def check_metric(self, reported: Collection[str]) -> None:
        """Checks that the search's metric is among the names that an epoch reports.

        Raises:
            BadInputError: if it is not, and no function can return it.
        """
        if self.spec.call is None:
            self._require_metric(reported)

    def _require_metric(self, reported: Collection[str]) -> None:
        metric = self.spec.metric
        if metric not in reported:
            names = ", ".join(sorted(reported)) or "nothing"
            raise BadInputError(
                f"The script does not report a metric '{metric}', only {names}; name what it reports with --metric."
            )

    def _send(self, line: Mapping[str, Any], wait_s: float = REPORT_WAIT_S) -> None:
        self._reporter.send(line, wait_s)

    def check_reported(self) -> None:
        """Raises BadInputError at the end of a script that never reported the objective."""
        if self._has_objective:
            if self.spec.every_value and self.standing.last is not None and not self.standing.is_reported:
                print(f"dike: {_ONLY_BATCHES}", file=sys.stderr, flush=True)
            return
        if self.spec.metric == "loss":
            raise BadInputError(
                "The script has reported no training loss, neither by fit nor by a session with an optimizer; let it "
                "call dike.report(step, loss=...)."
            )
        self._require_metric(self._names)

    def end(self) -> None:
        """Writes the last checkpoint of a script that has ended, unless the script wrote it."""
        if self.save_at_end is not None:
            self.save_at_end()
        self.flush_progress()

    def leave(self, code: int) -> NoReturn:
        """Sends pending reports, flushes output and ends the process."""
        self.has_ended = True
        self.flush_progress()
        self._reporter.close()
        end_process(code)


@functools.cache
def runtime() -> TrialRuntime | None:
    """Returns None if this process is not a trial."""
    spec = specs.current()
    return None if spec is None else TrialRuntime(spec)


job_runtime: Callable[[], TrialRuntime] | None = None
"""Returns the runtime of a job of one plain task; None if this process is not one."""
