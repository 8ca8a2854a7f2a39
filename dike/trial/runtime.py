"""What the interceptions and `dike.report` share in a trial's process: reports out, requests in, the trial's clock.

One thread trains; it calls `progress` after each step and then asks `suspend_requested`. A thread of its own reads
requests, so that one that arrives in the middle of a step is seen at its end.
"""

from __future__ import annotations

import functools
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NoReturn

from dike import checkpoints
from dike.exceptions import BadInputError
from dike.process import end_process
from dike.reporting import PROGRESS_INTERVAL_S, Reporter
from dike.trial import spec as specs
from dike.trial.spec import EXIT_SUSPENDED, TrialSpec

REPORT_WAIT_S = 5.0
"""How long a report that must not be lost may wait for a slow reader."""

MAX_VALUES = 1000
"""So many values of the objective are kept for one report; of more, every second goes."""

LAST_LOSSES = 100
"""Of so many losses at most the mean is a trial's value where its script reports none."""


class LastLosses:
    """The newest losses of a script that reports none itself: each is of one batch, so their mean is the trial's value.

    It is taken over the last tenth of all losses, `LAST_LOSSES` at most: whenever they were reported, and in however
    many runs they came, the same losses make the same value.

    Args:
        count: how many there have been, in all runs of the trial.
        newest: the newest of them.
    """

    def __init__(self, count: int = 0, newest: Iterable[float] = ()) -> None:
        self._count = count
        self._newest = deque(newest, LAST_LOSSES)

    def add(self, loss: float) -> None:
        """A step has been done."""
        self._count += 1
        self._newest.append(loss)

    @property
    def value(self) -> float | None:
        """Their mean; None before the first."""
        length = min(math.ceil(self._count / 10), len(self._newest))
        return _mean(list(self._newest)[-length:]) if length else None

    def state(self) -> dict[str, Any]:
        """What `LastLosses` has to be given, by name, to go on."""
        return {"count": self._count, "newest": list(self._newest)}


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
    """

    def __init__(self, spec: TrialSpec, clock: Callable[[], float] = time.monotonic) -> None:
        self.spec = spec
        self.suspend_requested = False
        self.save_at_end: Callable[[], object] | None = None
        self._clock = clock
        self._reporter = Reporter(spec.report_fd)
        self._step = 0
        self._trained_before_s = 0.0
        self._training_since_s: float | None = None
        self._checkpoint_s = clock()
        self._reported_s = -math.inf
        self._losses: list[float] = []
        self._metrics: dict[str, float] = {}
        self._value: float | None = None
        self._values: list[tuple[int, float]] = []
        self._names: set[str] = set()
        self._has_objective = spec.resume_from is not None

    def listen(self) -> None:
        """Reads requests from now on."""
        if self.spec.control_fd is not None:
            threading.Thread(target=self._listen, name="dike-control", daemon=True).start()

    def _listen(self) -> None:
        assert self.spec.control_fd is not None
        with os.fdopen(self.spec.control_fd, encoding="utf-8") as requests:
            for request in requests:
                if request.strip() == "suspend":
                    self._request_suspension()

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

    def restored(self, path: str, step: int, train_s: float) -> None:
        """A checkpoint has been restored: counting goes on from there."""
        self._step = step
        self._trained_before_s = train_s
        self._tell({"type": "restored", "path": path, "step": step})

    def training(self, *, preemptible: bool, batch_size: int | None = None) -> None:
        """The first step is about to be taken. Said again only if anything of it changes.

        Args:
            preemptible: whether the trial can be suspended.
            batch_size: samples of a step; None where that is not known.
        """
        if self._training_since_s is None:
            self._training_since_s = self._checkpoint_s = self._clock()
        known = {} if batch_size is None else {"batch_size": int(batch_size)}
        self._tell({"type": "training", "preemptible": preemptible, **known})

    def progress(
        self,
        step: int,
        loss: float | None = None,
        metrics: Mapping[str, float] | None = None,
        value: float | None = None,
    ) -> None:
        """A step has been done; written with those of the next half second.

        Args:
            step: steps done in all runs of the trial.
            loss: the training loss of the step.
            metrics: newest values of other figures.
            value: the objective's value, where it is stated rather than derived from the losses.
        """
        self._step = step
        if loss is not None:
            self._losses.append(loss)
            self._names.add("loss")
        if metrics:
            self._metrics.update(metrics)
            self._names.update(metrics)
        if value is not None:
            self._value = value
            if self.spec.every_value:
                self._values.append((step, value))
                if len(self._values) > MAX_VALUES:
                    del self._values[::2]
        self._has_objective |= value is not None or (loss is not None and self.spec.metric == "loss")
        if self._clock() - self._reported_s >= PROGRESS_INTERVAL_S:
            self.flush_progress(wait_s=0.0)

    def flush_progress(self, wait_s: float = REPORT_WAIT_S) -> None:
        """Writes what has been kept back; see `Reporter.send`."""
        if not self._losses and not self._metrics and self._value is None:
            return
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
            line["value"] = self._value
        if self._values:
            line["values"] = list(self._values)
        self._reporter.send(line, wait_s)
        self._losses.clear()
        self._metrics.clear()
        self._value = None
        self._values.clear()
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
        if checkpoints.unless_full(write):
            return True
        self._checkpoint_s = self._clock()
        if self.suspend_requested:
            self.suspend_requested = False
            again = threading.Timer(checkpoints.ROOM_POLL_S, self._request_suspension)
            again.daemon = True
            again.start()
        return False

    def _request_suspension(self) -> None:
        self.suspend_requested = True

    def suspend(self, path: str, step: int) -> NoReturn:
        """Gives the slot back: the state is in the checkpoint at `path`."""
        self.flush_progress()
        self._tell({"type": "suspended", "path": path, "step": step})
        self.leave(EXIT_SUSPENDED)

    def result(self, value: float | None, values: Mapping[str, float]) -> None:
        """What the function given to `dike.tune` returned."""
        self._has_objective = True
        self.flush_progress()
        self._tell({"type": "result", "value": value, "values": dict(values)})

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

    def _tell(self, line: Mapping[str, object]) -> None:
        self._reporter.send(line, REPORT_WAIT_S)

    def check_reported(self) -> None:
        """To be called at the end of the script.

        Raises:
            BadInputError: if the objective was never reported.
        """
        if self._has_objective:
            return
        if self.spec.metric == "loss":
            raise BadInputError(
                "The script has reported no training loss, neither by fit nor by a session with an optimizer; let it "
                "call dike.report(step, loss=...)."
            )
        self._require_metric(self._names)

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
