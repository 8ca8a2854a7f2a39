"""Reports of a trial's run: parsed, aggregated, and stored until acknowledged."""

from __future__ import annotations

import itertools
import json
import logging
from collections import deque
from typing import Any

from dike.trial.spec import EXIT_BAD_INPUT, EXIT_SUSPENDED, TrialSpec, step_of_checkpoint

logger = logging.getLogger(__name__)


MAX_KEPT_REPORTS = 50_000
"""Maximum number of unacknowledged reports of a run; beyond it the oldest are dropped."""
MAX_KEPT_VALUES = 100_000
"""Maximum number of `values` in them; beyond it the oldest are dropped."""
MAX_VALUES_PER_MESSAGE = 5000
"""Maximum number of `values` in a message, unless a single report has more."""


class KeptReports:
    """`progress` reports of one run, stored until acknowledged. They are numbered from 0.

    Attributes:
        oldest: number of the oldest that is stored.
    """

    def __init__(self) -> None:
        self._kept: deque[dict[str, Any]] = deque()
        self._unsent = 0
        self._values = 0
        self._first_with_values = 0
        """Number below which no report holds values."""
        self.oldest = 0

    @property
    def count(self) -> int:
        """Number of all reports, those dropped included."""
        return self.oldest + len(self._kept)

    @property
    def has_unsent(self) -> bool:
        return self._unsent < self.count

    def add(self, report: dict[str, Any]) -> None:
        self._kept.append(report)
        self._values += _value_count(report)
        if len(self._kept) > MAX_KEPT_REPORTS:
            self._drop_below(self.oldest + 1)
        while self._values > MAX_KEPT_VALUES:
            self._first_with_values = max(self._first_with_values, self.oldest)
            place = self._first_with_values - self.oldest
            self._values -= _value_count(self._kept[place])
            self._kept[place] = _without_values(self._kept[place])
            self._first_with_values += 1

    def take(self, limit: int) -> tuple[int, tuple[dict[str, Any], ...]]:
        """Returns the number of the next report to send, and up to `limit` reports from there."""
        first = max(self._unsent, self.oldest)
        taken: list[dict[str, Any]] = []
        values = 0
        for report in itertools.islice(self._kept, first - self.oldest, first - self.oldest + limit):
            values += _value_count(report)
            if taken and values > MAX_VALUES_PER_MESSAGE:
                break
            taken.append(report)
        self._unsent = first + len(taken)
        return first, tuple(taken)

    def acknowledge(self, count: int) -> None:
        """Drops the first `count` reports, which the framework has recorded; resends all others."""
        self._drop_below(min(count, self.count))
        self._unsent = min(count, self._unsent)

    def _drop_below(self, below: int) -> None:
        while self.oldest < below:
            self._values -= _value_count(self._kept.popleft())
            self.oldest += 1


def _value_count(report: dict[str, Any]) -> int:
    values = report.get("values")
    return len(values) if isinstance(values, list) else 0


def _without_values(report: dict[str, Any]) -> dict[str, Any]:
    return {name: content for name, content in report.items() if name != "values"}


class RunReports:
    """State of one run, from its report lines (see `dike.trial.reports`). Other lines are logged and ignored.

    Attributes:
        training: whether it has done its first step.
        preemptible: whether it can be checkpointed, and so suspended.
        was_preemptible: whether it could be at any time.
        newest_checkpoint: the trial's newest checkpoint and the steps done at it; None and 0 if there is none.
        batch_size: samples per step; None if unknown.
        paused: whether its process waits to be frozen.
        is_unsaved: whether it then has steps without a checkpoint.
        last: content of the last `progress` report without `values`; a `result` replaces its `value`, `best` and
            `metrics`.
    """

    def __init__(self, trial: TrialSpec) -> None:
        self.training = False
        self.preemptible = False
        self.batch_size: float | None = None
        self.was_preemptible = False
        self.newest_checkpoint = (trial.resume_from, step_of_checkpoint(trial.resume_from or ""))
        self.step = self.checkpoint_step
        self.last: dict[str, Any] = {}
        self.losses = KeptReports()
        self.paused = False
        self.is_unsaved = False
        self._suspended = False
        self._bad_input_message = ""
        self._failure_message = ""
        self._partial_line = b""
        self._withheld: dict[str, Any] | None = None

    def feed(self, data: bytes) -> None:
        """Parses bytes as they arrive; a line may be split."""
        *lines, self._partial_line = (self._partial_line + data).split(b"\n")
        for line in lines:
            try:
                self._apply(json.loads(line))
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                logger.warning("not a report: %r (%s)", line[:200], error)

    def outcome(self, exit_code: int | None, how: str, stopped: str) -> tuple[str, str]:
        """The outcome of the run.

        Args:
            exit_code: minus the signal's number if one ended it; None if it was never started, or unknown.
            how: description of its exit.
            stopped: why the slot ended it; empty if it did not.

        Returns:
            `RunEnd.outcome` and `RunEnd.message`.
        """
        if self.paused or (exit_code == EXIT_SUSPENDED and self._suspended):
            return "suspended", ""
        if exit_code == 0:
            return "finished", ""
        if exit_code == EXIT_BAD_INPUT and self._bad_input_message:
            return "bad_input", self._bad_input_message
        if stopped:
            return "killed", stopped
        return "failed", self._failure_message or how

    def _apply(self, content: dict[str, Any]) -> None:
        match content["type"]:
            case "restored":
                self._checkpoint(content)
                self.step = self.checkpoint_step
            case "training":
                self.training = True
                self.preemptible = bool(content["preemptible"])
                self.was_preemptible = self.was_preemptible or self.preemptible
                if content.get("batch_size") is not None:
                    self.batch_size = float(content["batch_size"])
            case "progress":
                self._progress(content)
            case "kept_back":
                self._withheld = {**content, "type": "progress"}
            case "checkpoint":
                self._checkpoint(content)
            case "suspended":
                self._checkpoint(content)
                self._suspended = True
            case "paused":
                self.paused = True
                if content["path"] is None:
                    self.is_unsaved = True
                else:
                    self._checkpoint(content)
            case "result":
                metrics = {**self.last.get("metrics", {}), **content.get("values", {})}
                best: dict[str, Any] = {
                    name: content[name] for name in ("best", "best_step", "restated") if name in content
                }
                self.last = {**self.last, "value": content["value"], **best, "metrics": metrics}
            case "bad_input":
                self._bad_input_message = str(content["message"])
            case "failed":
                self._failure_message = str(content["message"])
            case "started":
                pass
            case other:
                logger.warning("unknown report %r", other)

    def finish(self) -> None:
        """Counts the report that the process withheld until its end."""
        if self._withheld is not None:
            self._progress(self._withheld)

    def _progress(self, content: dict[str, Any]) -> None:
        self._withheld = None
        self.step = int(content["step"])
        self.last = _without_values(content)
        self.losses.add(content)

    @property
    def checkpoint(self) -> str | None:
        return self.newest_checkpoint[0]

    @property
    def checkpoint_step(self) -> int:
        return self.newest_checkpoint[1]

    def _checkpoint(self, content: dict[str, Any]) -> None:
        self.newest_checkpoint = (str(content["path"]), int(content["step"]))
