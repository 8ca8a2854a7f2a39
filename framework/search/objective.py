"""Turns reports of trials into readings for policies and values for samplers, in bounded memory."""

from __future__ import annotations

import functools
import itertools
import math
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from framework.policies.trials.interface import Reading
from framework.search.records import Mode, TrialRecord, ValueKind

MAX_STEP = 2**63
"""Larger integers do not fit into database columns."""
MAX_REPORTS = 2000
"""Maximum number of reports per trial, in memory and in the database; beyond it neighbours are merged to half."""


class Objective:
    """Extracts a search's objective from reports (`dike.trial.reports`).

    Args:
        metric: `loss` for the training loss, or the name of another metric.
        mode: whether to minimize or maximize.
        value: whether a trial's value is the last or the best reported.
    """

    def __init__(self, metric: str, mode: Mode, value: ValueKind = "last") -> None:
        self._is_training_loss = metric == "loss"
        self._sign = 1.0 if mode == "min" else -1.0
        self._takes_best = value == "best"

    def reading(self, report: Mapping[str, Any]) -> Reading | None:
        """Returns the reading in a `progress` report; None if it lacks the objective.

        Raises:
            ValueError: if the report is malformed.
        """
        try:
            train_s, step = float(report["train_s"]), int(report["step"])
            if not 0 <= step < MAX_STEP:
                raise ValueError(f"malformed progress report: step {report['step']}")
            if not self._is_training_loss:
                if "value" not in report:
                    return None
                value = self._sign * float(report["value"])
                return Reading(train_s, step, value, value, value)
            if "loss" not in report:
                return None
            low, high = sorted(self._sign * float(report[name]) for name in ("low", "high"))
            return Reading(train_s, step, self._sign * float(report["loss"]), low, high, max(1, int(report["count"])))
        except (KeyError, TypeError, OverflowError) as error:
            raise ValueError(f"malformed progress report: {error!r}") from error

    def readings(self, reports: Iterable[Mapping[str, Any]]) -> list[Reading]:
        """Returns the readings in `progress` reports, without steps repeated after a return to a checkpoint."""
        found: list[Reading] = []
        for report in reports:
            reading = self.reading(report)
            if reading is not None and (not found or reading.step > found[-1].step):
                found.append(reading)
        return found

    def apply(self, record: TrialRecord, report: Mapping[str, Any]) -> None:
        """Applies a `progress` report to a trial's record.

        Steps repeated after a return to a checkpoint add no reading, and the best value never gets worse.

        Raises:
            ValueError: if the report is malformed.
        """
        reading = self.reading(report)
        record.step = int(report["step"])
        record.train_s = float(report["train_s"])
        if "loss" in report:
            record.loss = float(report.get("last", report["loss"]))
        record.metrics.update({str(name): float(value) for name, value in dict(report.get("metrics", {})).items()})
        if reading is not None and (not record.readings or reading.step > record.readings[-1].step):
            record.readings.append(reading)
            thin(record)
        if "value" in report:
            self._apply_value(record, report)

    def _apply_value(self, record: TrialRecord, report: Mapping[str, Any]) -> None:
        try:
            value = float(report["value"])
            # Absent before the first finite value.
            best, step = float(report.get("best", value)), int(report.get("best_step", report["step"]))
        except (TypeError, OverflowError) as error:
            raise ValueError(f"malformed progress report: {error!r}") from error
        if report.get("restated"):
            record.best_value = record.best_step = None
        is_better = record.best_value is None or self._sign * best < self._sign * record.best_value
        if math.isfinite(best) and is_better:
            record.best_value, record.best_step = best, step
        record.value = record.best_value if self._takes_best and record.best_value is not None else value

    def unapplied(self, record: TrialRecord, last: Mapping[str, Any]) -> dict[str, Any]:
        """Returns, as a report, what the last report of a run adds to the record."""
        report = {"step": record.step, "train_s": record.train_s, **last}
        if report["step"] != record.step:
            return report
        # The report was applied before the end of the script added to it.
        news = {name: report[name] for name in ("step", "train_s")}
        metrics = {name: x for name, x in report.get("metrics", {}).items() if not _same(record.metrics.get(name), x)}
        if metrics:
            news["metrics"] = metrics
        if not self._is_applied(record, last):
            news.update({name: last[name] for name in ("value", "best", "best_step", "restated") if name in last})
        if record.loss is None and "loss" in last:
            news.update({name: last[name] for name in ("loss", "low", "high", "last", "count") if name in last})
        return news

    def _is_applied(self, record: TrialRecord, last: Mapping[str, Any]) -> bool:
        """Returns whether a report would leave a trial's value unchanged."""
        if last.get("value") is None:
            return True
        best = _number(last.get("best"))
        if not self._takes_best or best is None or record.best_value is None:
            return _same(record.value, last["value"])
        if last.get("restated"):
            return best == record.best_value and last.get("best_step") == record.best_step
        # A value that is not the best is not stored.
        return not self._sign * best < self._sign * record.best_value


def thin(record: TrialRecord) -> None:
    """Merges neighbouring readings of a trial with too many, so that each stands for equally many losses.

    The indices of its time slices are updated.
    """
    readings = record.readings
    if len(readings) <= MAX_REPORTS:
        return
    ends = even_groups([reading.count for reading in readings], MAX_REPORTS // 2)
    readings[:] = [functools.reduce(_merged, readings[begin:end]) for begin, end in itertools.pairwise([0, *ends])]
    record.slices[:] = [bisect_right(ends, before) for before in record.slices]


def even_groups(weights: Sequence[int], count: int) -> list[int]:
    """Cuts a sequence into about `count` groups of equal weight; returns the end of each."""
    share = math.ceil(sum(weights) / count)
    ends: list[int] = []
    group = 0
    for end, weight in enumerate(weights, 1):
        if ends and group + weight <= share:
            ends[-1], group = end, group + weight
        else:
            ends.append(end)
            group = weight
    return ends


def _merged(first: Reading, second: Reading) -> Reading:
    count = first.count + second.count
    # The sum of all losses could overflow.
    loss = first.loss * (first.count / count) + second.loss * (second.count / count)
    is_nan = any(map(math.isnan, (first.low, first.high, second.low, second.high)))
    low, high = (math.nan, math.nan) if is_nan else (min(first.low, second.low), max(first.high, second.high))
    return Reading(second.train_s, second.step, loss, low, high, count)


def _number(stated: Any) -> float | None:
    """Converts a reported number, which may be text such as "nan"; None if it is none."""
    try:
        return float(stated)
    except (TypeError, ValueError, OverflowError):
        return None


def _same(known: float | None, stated: Any) -> bool:
    """Returns whether a reported number equals a stored one; NaN equals NaN."""
    value = _number(stated)
    if known is None or value is None:
        return False
    return value == known or (math.isnan(value) and math.isnan(known))


def finite_or_none(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
