"""From what a trial reports to what policies and samplers look at, in bounded memory."""

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
"""Databases count no further."""
MAX_REPORTS = 2000
"""Reports of a trial, in memory and in the database; beyond it, neighbours are merged until half as many are left."""


class Objective:
    """Reads a search's objective out of reports (`dike.trial.reports`).

    Args:
        metric: `loss` for the training loss, or the name of another metric.
        mode: whether the least or the greatest value is best.
        value: whether a trial's value is the last one it reported, or the best.
    """

    def __init__(self, metric: str, mode: Mode, value: ValueKind = "last") -> None:
        self._of_losses = metric == "loss"
        self._sign = 1.0 if mode == "min" else -1.0
        self._takes_best = value == "best"

    def reading(self, report: Mapping[str, Any]) -> Reading | None:
        """A policy's reading of a `progress` report; None if the objective is not in it.

        Raises:
            ValueError: if the report is malformed.
        """
        try:
            train_s, step = float(report["train_s"]), int(report["step"])
            if not 0 <= step < MAX_STEP:
                raise ValueError(f"malformed progress report: step {report['step']}")
            if not self._of_losses:
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
        """A policy's readings of `progress` reports, without what a run repeats after going back to a checkpoint."""
        found: list[Reading] = []
        for report in reports:
            reading = self.reading(report)
            if reading is not None and (not found or reading.step > found[-1].step):
                found.append(reading)
        return found

    def take(self, record: TrialRecord, report: Mapping[str, Any]) -> None:
        """Takes a `progress` report into a trial's record.

        What is best of it only gets better, also where a run repeats steps after going back to a checkpoint.

        Args:
            record: is changed. What a run repeats after going back to a checkpoint is left out of its readings.
            report: the report.

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
            self._take_value(record, report)

    def _take_value(self, record: TrialRecord, report: Mapping[str, Any]) -> None:
        try:
            value = float(report["value"])
            # Before the first value that is finite there is no best one.
            best, step = float(report.get("best", value)), int(report.get("best_step", report["step"]))
        except (TypeError, OverflowError) as error:
            raise ValueError(f"malformed progress report: {error!r}") from error
        if report.get("restated"):
            record.best_value = record.best_step = None
        is_better = record.best_value is None or self._sign * best < self._sign * record.best_value
        if math.isfinite(best) and is_better:
            record.best_value, record.best_step = best, step
        record.value = record.best_value if self._takes_best and record.best_value is not None else value

    def news_of(self, record: TrialRecord, last: Mapping[str, Any]) -> dict[str, Any]:
        """What the last report of a run says that has not been taken in, as a report."""
        report = {"step": record.step, "train_s": record.train_s, **last}
        if report["step"] != record.step:
            return report
        # It has arrived already; what the end of the script has added to it has not.
        news = {name: report[name] for name in ("step", "train_s")}
        metrics = {name: x for name, x in report.get("metrics", {}).items() if not _same(record.metrics.get(name), x)}
        if metrics:
            news["metrics"] = metrics
        if not self._is_known(record, last):
            news.update({name: last[name] for name in ("value", "best", "best_step", "restated") if name in last})
        if record.loss is None and "loss" in last:
            news.update({name: last[name] for name in ("loss", "low", "high", "last", "count") if name in last})
        return news

    def _is_known(self, record: TrialRecord, last: Mapping[str, Any]) -> bool:
        """Whether a report would change nothing of a trial's value."""
        if last.get("value") is None:
            return True
        best = _number(last.get("best"))
        if not self._takes_best or best is None or record.best_value is None:
            return _same(record.value, last["value"])
        if last.get("restated"):
            return best == record.best_value and last.get("best_step") == record.best_step
        # The value is not written down where it is not the best.
        return not self._sign * best < self._sign * record.best_value


def thin(record: TrialRecord) -> None:
    """Merges neighbours among a trial's readings, if they are too many, so that each stands for equally many losses.

    The time slices of the trial are numbered anew with them.
    """
    readings = record.readings
    if len(readings) <= MAX_REPORTS:
        return
    ends = even_groups([reading.count for reading in readings], MAX_REPORTS // 2)
    readings[:] = [functools.reduce(_merged, readings[begin:end]) for begin, end in itertools.pairwise([0, *ends])]
    record.slices[:] = [bisect_right(ends, before) for before in record.slices]


def even_groups(weights: Sequence[int], count: int) -> list[int]:
    """Cuts a row of neighbours into about `count` groups of equal weight; where each of these ends."""
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
    # Not the sum of all losses, which may be too large for a number.
    loss = first.loss * (first.count / count) + second.loss * (second.count / count)
    is_nan = any(map(math.isnan, (first.low, first.high, second.low, second.high)))
    low, high = (math.nan, math.nan) if is_nan else (min(first.low, second.low), max(first.high, second.high))
    return Reading(second.train_s, second.step, loss, low, high, count)


def _number(stated: Any) -> float | None:
    """A number of a report, which may be text such as "nan"; None if it is none."""
    try:
        return float(stated)
    except (TypeError, ValueError, OverflowError):
        return None


def _same(known: float | None, stated: Any) -> bool:
    """Whether a number of a report is one that is known; NaN is NaN."""
    value = _number(stated)
    if known is None or value is None:
        return False
    return value == known or (math.isnan(value) and math.isnan(known))


def finite_or_none(value: float | None) -> float | None:
    """The value, if it is a number one can compare."""
    return value if value is not None and math.isfinite(value) else None
