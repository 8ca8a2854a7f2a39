"""What the interceptions and `dike.report` share in a trial's process: reports out, requests in, the trial's clock.

One thread trains; it calls `progress` after each step and then asks `suspend_requested`. A thread of its own reads
requests, so that one that arrives in the middle of a step is seen at its end.
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
from typing import Any, NoReturn

from dike import checkpoints, process
from dike.exceptions import BadInputError
from dike.process import end_process, flush_output
from dike.reporting import PROGRESS_INTERVAL_S, Reporter
from dike.trial import folders
from dike.trial import spec as specs
from dike.trial.spec import EXIT_SUSPENDED, TrialSpec

KEEPING_FREE_S, KEEPING_SHARE = 5.0, 0.1
"""To keep best models may take so many seconds of a trial, and such a share of the time it trains: a script may report
after each batch, and each may be the best.
"""

HINT_INTERVAL_S = 0.05
"""What is kept back is hinted at as often: it counts if the process crashes before it is reported."""

REPORT_WAIT_S = 5.0
"""How long a report that must not be lost may wait for a slow reader."""

MAX_VALUES = 1000
"""So many values of the objective are kept for one report; of more, only those whose number 2, 4, 8, ... divides."""

_ONLY_BATCHES = (
    "--stop has not judged this trial, as its losses of batches are all there is; let the script call "
    "dike.report(step, loss=...)."
)


@dataclass
class Standing:
    """What a trial's numbers come to: those its script reports, or its losses where it reports none.

    Attributes:
        last: the objective's value as it was said last; None before the first.
        best, best_step: the best so far that is finite, and the step at which it was said; None before the first.
        is_reported: whether the script has reported one. From then on the losses that Dike reads of its batches count
            no more: one batch says less.
        stated: how many its script has reported.
    """

    last: float | None = None
    best: float | None = None
    best_step: int | None = None
    is_reported: bool = False
    stated: int = 0

    def take(self, step: int, value: float, mode: str) -> bool:
        """A value has been said; whether it is the best so far.

        Args:
            step: steps done in all runs of the trial.
            value: the objective's value.
            mode: `min` or `max`.
        """
        self.last = value
        if not math.isfinite(value):
            return False
        if self.best is not None and (value >= self.best if mode == "min" else value <= self.best):
            return False
        self.best, self.best_step = value, step
        return True

    def to_json(self) -> dict[str, Any]:
        """What `Standing` has to be given, by name, to go on."""
        return dataclasses.asdict(self)


def _mean(losses: Sequence[float]) -> float:
    """NaN if one of them is; the newest if one is infinite."""
    if any(map(math.isnan, losses)):
        return math.nan
    if any(map(math.isinf, losses)):
        return losses[-1]
    try:
        return math.fsum(losses) / len(losses)
    except OverflowError:
        return math.fsum(loss / len(losses) for loss in losses)


class TrialRuntime:
    """The trial this process is a run of.

    Args:
        spec: the trial.
        clock: seconds, monotonic.

    Attributes:
        suspend_requested: whether the slot is wanted back; to be asked between two steps.
        save_at_end: writes the last checkpoint of a script that has run to its end; None where nothing can be saved.
        keep_best: called when the script has reported the best value so far, to keep the model as it is; None where
            nothing can be kept.
        standing: what its numbers come to.
        gpus: how many share its batches.
        smooths_losses: whether losses are reported for people alone, so that an epoch's first batches say little.
    """

    smooths_losses = False

    def __init__(self, spec: TrialSpec, clock: Callable[[], float] = time.monotonic) -> None:
        self.spec = spec
        self.suspend_requested = False
        self.save_at_end: Callable[[], object] | None = None
        self.keep_best: Callable[[], object] | None = None
        self.standing = Standing()
        self.gpus = 1
        self._clock = clock
        self._lock = threading.RLock()
        self._kept_back = threading.Event()
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
        self._keeping_s = 0.0
        self._names: set[str] = set()
        self._has_objective = spec.resume_from is not None
        self._may_stay = False
        self._next_runs: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._said_of_training: dict[str, Any] = {}

    def listen(self) -> None:
        """Reads requests from now on, and reports in time."""
        self.report_in_time()
        if self.spec.control_fd is not None:
            threading.Thread(target=self._listen, name="dike-control", daemon=True).start()

    def report_in_time(self) -> None:
        """Writes from now on what was kept back even if the script hangs or calls `os._exit`."""
        threading.Thread(target=self._flush_late, name="dike-progress", daemon=True).start()
        process.before_exit(self._finish_reports)

    def _flush_late(self) -> None:
        while self._kept_back.wait():
            self._kept_back.clear()
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

    def _listen(self) -> None:
        assert self.spec.control_fd is not None
        with os.fdopen(self.spec.control_fd, encoding="utf-8") as requests:
            for request in requests:
                match request.split():
                    case ["suspend"]:
                        self._may_stay = False
                        self._request_suspension()
                    case ["pause"]:
                        self._may_stay = True
                        self._request_suspension()
                    case ["continue", number]:
                        self._next_runs.put(int(number))
        self._next_runs.put(None)

    @property
    def step(self) -> int:
        """Steps done in all runs of the trial."""
        return self._step

    @property
    def is_training(self) -> bool:
        """Whether the first step of this run has been announced."""
        return self._training_since_s is not None

    @property
    def train_s(self) -> float:
        """Seconds of training in all runs of the trial, up to the checkpoint each went on from."""
        since = self._training_since_s
        return self._trained_before_s + (0.0 if since is None else self._clock() - since)

    def started(self) -> None:
        """The script is about to run."""
        self._tell({"type": "started"})

    def found_model(self, variables: Callable[[], Iterable[tuple[str, Any]]]) -> None:
        """The model that is trained is known; told before the first checkpoint is written.

        Args:
            variables: gives unique name and variable of all that a profile would hold.
        """

    def cannot_suspend(self, why: str) -> None:
        """The script does what no checkpoint can hold."""
        print(f"dike: this trial cannot be saved: {why}.", file=sys.stderr, flush=True)
        if self.is_training:
            self.training(preemptible=False)

    def restored(self, path: str, step: int, train_s: float, standing: Mapping[str, Any]) -> None:
        """A checkpoint has been restored: counting goes on from there.

        Args:
            path: its folder.
            step: steps done.
            train_s: seconds trained.
            standing: `Standing.to_json` then.
        """
        self._step = step
        self._trained_before_s = train_s
        self.standing = Standing(**standing)
        self._tell({"type": "restored", "path": path, "step": step})

    def training(self, *, preemptible: bool, batch_size: int | None = None) -> None:
        """The first step is about to be taken. Said again only if anything of it changes.

        Args:
            preemptible: whether the trial can be saved. One that cannot may be suspended in memory alone.
            batch_size: samples of a step; None where that is not known.
        """
        if self._training_since_s is None:
            if self.spec.run == 0:
                folders.clear_best(self.spec.folder)
            self._training_since_s = self._checkpoint_s = self._clock()
        known = {} if batch_size is None else {"batch_size": int(batch_size)}
        self._said_of_training = {"type": "training", "preemptible": preemptible, **known}
        self._tell(self._said_of_training)

    def progress(
        self,
        step: int,
        loss: float | None = None,
        metrics: Mapping[str, float] | None = None,
        value: float | None = None,
        *,
        is_reported: bool = True,
    ) -> None:
        """A step has been done; written with those of the next half second.

        A trial that cannot be saved waits here while it is suspended.

        Args:
            step: steps done in all runs of the trial.
            loss: the training loss of the step.
            metrics: newest values of other figures.
            value: the objective's value, where there is a new one.
            is_reported: whether the script has reported that; else Dike has read it of a batch.
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
                self._kept_back.set()
                if self._clock() - self._hinted_s >= HINT_INTERVAL_S:
                    self._hinted_s = self._clock()
                    self._reporter.try_send({**self._kept_line(), "type": "kept_back", "values": []})
        if is_best and self.keep_best is not None:
            self.keep_best()
        if self._may_stay and self.suspend_requested and not self._said_of_training.get("preemptible", True):
            self._stay(None, step)

    def _take_value(self, step: int, value: float, *, is_reported: bool) -> bool:
        """Takes a value of the objective in; whether the script has reported it and it is the best so far."""
        if self.standing.is_reported and not is_reported:
            return False
        if is_reported and not self.standing.is_reported:
            self._is_restated = self.standing.best is not None
            self.standing = Standing(is_reported=True)
        self._value = value
        if is_reported:
            self._add_value(step, value)
        return self.standing.take(step, value, self.spec.mode) and is_reported

    def _add_value(self, step: int, value: float) -> None:
        """The script has reported one, by which the trial may be stopped; losses of batches are no match for those."""
        self.standing.stated += 1
        if not self.spec.every_value:
            return
        if len(self._values) >= MAX_VALUES:
            # The same ones in each trial.
            self._stride *= 2
            self._values = [each for each in self._values if each[0] % self._stride == 0]
        self._values.append((self.standing.stated, step, value))

    def keep(self, write: Callable[[], object]) -> None:
        """Writes the best model so far, if the disk has room for it and that has not taken too long before."""
        if self._keeping_s > KEEPING_FREE_S + KEEPING_SHARE * self.train_s:
            return
        begun_s = self._clock()
        checkpoints.skip_if_disk_full(write)
        self._keeping_s += self._clock() - begun_s

    def _best(self) -> dict[str, Any]:
        """What a report says of the best value."""
        best = {"best": self.standing.best, "best_step": self.standing.best_step}
        restated = {"restated": True} if self._is_restated else {}
        return {**best, **restated} if self.standing.best is not None else restated

    def _kept_line(self) -> dict[str, Any]:
        """What has been kept back, as a report."""
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
            line |= {"value": self._value, **self._best()}
        if self._values:
            line["values"] = list(self._values)
        return line

    def flush_progress(self, wait_s: float = REPORT_WAIT_S) -> None:
        """Writes what has been kept back; see `Reporter.send`."""
        with self._lock:
            if not self._losses and not self._metrics and self._value is None:
                return
            line = self._kept_line()
            self._is_restated = self._is_restated and self._value is None
            self._tell(line, wait_s)
            self._losses.clear()
            self._metrics.clear()
            self._value = None
            self._values.clear()
            self._stride = 1
            self._reported_s = self._clock()

    @property
    def checkpoint_due(self) -> bool:
        """Whether the last checkpoint is older than the search's interval."""
        return self._clock() - self._checkpoint_s >= self.spec.checkpoint_interval_s

    def checkpoint_written(self, path: str, step: int) -> None:
        """A checkpoint is complete."""
        self._checkpoint_s = self._clock()
        self.flush_progress()
        self._tell({"type": "checkpoint", "path": path, "step": step, "train_s": self.train_s})

    def unless_full(self, write: Callable[[], object]) -> bool:
        """Writes a checkpoint, if the disk has room for it, else tries again later; whether it was written."""
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
        """Gives the slot back: the state is in the checkpoint at `path`.

        Returns only if the process was left in memory, and the trial goes on in it: as the trial's next run.
        """
        if not self._may_stay:
            self.flush_progress()
            self._tell({"type": "suspended", "path": path, "step": step})
            self.leave(EXIT_SUSPENDED)
        self._stay(path, step)

    def _stay(self, path: str | None, step: int) -> None:
        """Waits in memory until the trial goes on, as its next run.

        Args:
            path: the checkpoint that holds the trial's state; None if none does.
            step: steps done.
        """
        self.flush_progress()
        flush_output()
        paused_s = self._clock()
        self.suspend_requested = False
        self._tell({"type": "paused", "path": path, "step": step})
        number = self._next_runs.get()
        if number is None:
            self.leave(EXIT_SUSPENDED)  # whoever could let it go on is gone
        self.spec = dataclasses.replace(self.spec, run=number, resume_from=path or self.spec.resume_from)
        self._checkpoint_s, self._reported_s = self._clock(), -math.inf
        if self._training_since_s is not None:
            self._training_since_s += self._checkpoint_s - paused_s
        if path is not None:
            self._tell({"type": "restored", "path": path, "step": step})
        self._tell(self._said_of_training)

    def result(self, value: float, values: Mapping[str, float]) -> None:
        """What the function given to `dike.tune` returned.

        Args:
            value: the objective's value.
            values: all figures by name, where it returned names.
        """
        self._has_objective = True
        self.flush_progress()
        known = self.standing
        if self.spec.metric not in values and known.best is not None and value not in (known.last, known.best):
            # A number without a name that none of the epochs had is something else: it alone counts.
            self.standing, self._is_restated = Standing(is_reported=True), True
            print(
                f"dike: the number that the function returned counts as its {self.spec.metric}, not what training has "
                "reported until now, by which trials were compared; give it a name of its own: metric='NAME'.",
                file=sys.stderr,
                flush=True,
            )
        self.standing.take(self._step, value, self.spec.mode)
        self._tell({"type": "result", "value": value, "values": dict(values), **self._best()})

    def refuse(self, message: str) -> None:
        """The input cannot be used."""
        self.flush_progress()
        self._tell({"type": "bad_input", "message": message})

    def failed(self, message: str) -> None:
        """The script has ended with an exception."""
        self.flush_progress()
        self._tell({"type": "failed", "message": message})

    def check_metric(self, reported: Collection[str]) -> None:
        """To be called with the names of what an epoch has reported.

        Raises:
            BadInputError: if the search's metric is not among them, nor can a function return it.
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

    def _tell(self, line: Mapping[str, Any], wait_s: float = REPORT_WAIT_S) -> None:
        self._reporter.send(line, wait_s)

    def check_reported(self) -> None:
        """To be called at the end of the script.

        Raises:
            BadInputError: if the objective was never reported.
        """
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
        """The script has run to its end: writes its last checkpoint, if it has left that to us."""
        if self.save_at_end is not None:
            self.save_at_end()
        self.flush_progress()

    def leave(self, code: int) -> NoReturn:
        """Ends the process at once, its reports and output written."""
        self.flush_progress()
        self._reporter.close()
        end_process(code)


@functools.cache
def runtime() -> TrialRuntime | None:
    """The runtime of this process; None where it is no trial."""
    spec = specs.current()
    return None if spec is None else TrialRuntime(spec)


job_runtime: Callable[[], TrialRuntime] | None = None
"""Gives the runtime of a job that is one plain task; None where this process is none."""
