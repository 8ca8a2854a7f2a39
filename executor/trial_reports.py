"""What the report lines of a trial's run add up to."""

from __future__ import annotations

import itertools
import json
import logging
from collections import deque
from typing import Any

from dike.trial.spec import EXIT_BAD_INPUT, EXIT_SUSPENDED, TrialSpec, step_of_checkpoint

logger = logging.getLogger(__name__)


KEPT_REPORTS = 50_000
"""So many reports of a run are kept while nobody takes them in; beyond it the oldest go."""
KEPT_VALUES = 100_000
"""So many `values` are kept in them; beyond it the oldest go."""
VALUES_LIMIT = 5000
"""So many `values` go into one message, unless one report has more."""


class KeptReports:
    """`progress` reports of one run, until they are known to be written down.

    They are numbered from 0, in the order in which they came.

    Attributes:
        oldest: number of the oldest that is kept.
    """

    def __init__(self) -> None:
        self._kept: deque[dict[str, Any]] = deque()
        self._unsent = 0
        self._values = 0
        self._bare = 0
        """Number below which no report holds values."""
        self.oldest = 0

    @property
    def count(self) -> int:
        """How many have come."""
        return self.oldest + len(self._kept)

    @property
    def has_unsent(self) -> bool:
        return self._unsent < self.count

    def add(self, report: dict[str, Any]) -> None:
        """One has come."""
        self._kept.append(report)
        self._values += _value_count(report)
        if len(self._kept) > KEPT_REPORTS:
            self._forget(self.oldest + 1)
        while self._values > KEPT_VALUES:
            self._bare = max(self._bare, self.oldest)
            place = self._bare - self.oldest
            self._values -= _value_count(self._kept[place])
            self._kept[place] = _without_values(self._kept[place])
            self._bare += 1

    def take(self, limit: int) -> tuple[int, tuple[dict[str, Any], ...]]:
        """Those that are to be sent next, at most so many: number of the first, and they."""
        first = max(self._unsent, self.oldest)
        taken: list[dict[str, Any]] = []
        values = 0
        for report in itertools.islice(self._kept, first - self.oldest, first - self.oldest + limit):
            values += _value_count(report)
            if taken and values > VALUES_LIMIT:
                break
            taken.append(report)
        self._unsent = first + len(taken)
        return first, tuple(taken)

    def known(self, count: int) -> None:
        """So many are written down; those behind them are to be sent, again if they were before."""
        self._forget(min(count, self.count))
        self._unsent = min(count, self._unsent)

    def _forget(self, below: int) -> None:
        while self.oldest < below:
            self._values -= _value_count(self._kept.popleft())
            self.oldest += 1


def _value_count(report: dict[str, Any]) -> int:
    values = report.get("values")
    return len(values) if isinstance(values, list) else 0


def _without_values(report: dict[str, Any]) -> dict[str, Any]:
    return {name: content for name, content in report.items() if name != "values"}


class RunReports:
    """Takes the lines of one run in (see `dike.trial.reports`); what is no report is logged and otherwise ignored.

    Args:
        trial: the run's trial.

    Attributes:
        training: whether its first step has been taken.
        preemptible: whether it can be saved, and so suspended.
        was_preemptible: whether it ever could.
        step: its last step.
        checkpoint: the newest checkpoint that the trial has; None if there is none.
        checkpoint_step: steps done at that checkpoint.
        batch_size: samples of a step; None if the run has not said.
        paused: whether its process waits to be stopped.
        is_unsaved: whether it does so with steps that no checkpoint holds.
        last: content of the last `progress` report but its `values`, with what a `result` said in place of its
            `value`, `best` and `metrics`.
        losses: contents of `progress` reports.
    """

    def __init__(self, trial: TrialSpec) -> None:
        self.training = False
        self.preemptible = False
        self.batch_size: float | None = None
        self.was_preemptible = False
        self.checkpoint = trial.resume_from
        self.checkpoint_step = step_of_checkpoint(trial.resume_from) if trial.resume_from else 0
        self.step = self.checkpoint_step
        self.last: dict[str, Any] = {}
        self.losses = KeptReports()
        self.paused = False
        self.is_unsaved = False
        self._suspended = False
        self._refusal = ""
        self._failure = ""
        self._rest = b""
        self._kept_back: dict[str, Any] | None = None

    def feed(self, data: bytes) -> None:
        """Takes bytes in as they come; a line may come in pieces."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            try:
                self._take(json.loads(line))
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                logger.warning("not a report: %r (%s)", line[:200], error)

    def outcome(self, exit_code: int | None, how: str, stopped: str) -> tuple[str, str]:
        """How the run ended.

        Args:
            exit_code: minus the signal's number if one ended it; None if it was never started or nobody knows.
            how: its process' end in words.
            stopped: why we have ended it; empty if we have not.

        Returns:
            `RunEnd.outcome` and `RunEnd.message`.
        """
        if self.paused or (exit_code == EXIT_SUSPENDED and self._suspended):
            return "suspended", ""
        if exit_code == 0:
            return "finished", ""
        if exit_code == EXIT_BAD_INPUT and self._refusal:
            return "bad_input", self._refusal
        if stopped:
            return "stopped", stopped
        return "failed", self._failure or how

    def _take(self, content: dict[str, Any]) -> None:
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
                self._kept_back = {**content, "type": "progress"}
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
                self._refusal = str(content["message"])
            case "failed":
                self._failure = str(content["message"])
            case "started":
                pass
            case other:
                logger.warning("unknown report %r", other)

    def settle(self) -> None:
        """The process has ended: what it has kept back until then counts, as it will not report it any more."""
        if self._kept_back is not None:
            self._progress(self._kept_back)

    def _progress(self, content: dict[str, Any]) -> None:
        self._kept_back = None
        self.step = int(content["step"])
        self.last = _without_values(content)
        self.losses.add(content)

    def _checkpoint(self, content: dict[str, Any]) -> None:
        step = int(content["step"])
        self.checkpoint, self.checkpoint_step = str(content["path"]), step
