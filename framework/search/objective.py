"""From what a trial reports to what policies and samplers look at."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from framework.policies.interface import Reading
from framework.search.records import Mode, TrialRecord
from framework.search.thinning import thin

MAX_STEP = 2**63
"""Databases count no further."""
TAIL = 0.1
"""Share of a trial's steps, at its end, whose mean loss is its value where the script states none."""


class Objective:
    """Reads a search's objective out of reports (`dike.trial.reports`).

    Args:
        metric: `loss` for the training loss, or the name of another metric.
        mode: whether the least or the greatest value is best.
    """

    def __init__(self, metric: str, mode: Mode) -> None:
        self._of_losses = metric == "loss"
        self._sign = 1.0 if mode == "min" else -1.0

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

    def value_of_tail(self, readings: Sequence[Reading]) -> float | None:
        """The mean of the last tenth of the losses, in the user's sign; None where there are none."""
        if not readings:
            return None
        from_step = readings[-1].step * (1 - TAIL)
        total = count = 0.0
        for reading in reversed(readings):
            if count and reading.step < from_step:
                break
            total += reading.loss * reading.count
            count += reading.count
        return self._sign * total / count

    def take(self, record: TrialRecord, report: Mapping[str, Any], *, has_stated: bool) -> bool:
        """Takes a `progress` report into a trial's record.

        Args:
            record: is changed. What a run repeats after going back to a checkpoint is left out of its readings.
            report: the report.
            has_stated: whether the script has stated the objective before.

        Returns:
            Whether it has now.

        Raises:
            ValueError: if the report is malformed.
        """
        reading = self.reading(report)
        record.step = int(report["step"])
        record.train_s = float(report["train_s"])
        if "loss" in report:
            record.loss = float(report["loss"])
        record.metrics.update({str(name): float(value) for name, value in dict(report.get("metrics", {})).items()})
        if reading is not None and (not record.readings or reading.step > record.readings[-1].step):
            record.readings.append(reading)
            thin(record)
        if "value" in report:
            record.value = float(report["value"])
            return True
        if not has_stated and self._of_losses:
            record.value = self.value_of_tail(record.readings)
        return has_stated


def news_of(record: TrialRecord, last: Mapping[str, Any]) -> dict[str, Any]:
    """What the last report of a run says that has not been taken in, as a report."""
    report = {"step": record.step, "train_s": record.train_s, **last}
    if report["step"] != record.step:
        return report
    # It has arrived already; what the end of the script has added to it has not.
    news = {name: report[name] for name in ("step", "train_s")}
    metrics = {name: x for name, x in report.get("metrics", {}).items() if x != record.metrics.get(name)}
    if metrics:
        news["metrics"] = metrics
    if last.get("value") not in (None, record.value):
        news["value"] = last["value"]
    if record.loss is None and "loss" in last:
        news.update({name: last[name] for name in ("loss", "low", "high", "count") if name in last})
    return news


def finite_or_none(value: float | None) -> float | None:
    """The value, if it is a number one can compare."""
    return value if value is not None and math.isfinite(value) else None
