"""Recorded learning curves: their files, and the reports of trials that follow them."""

from __future__ import annotations

import csv
import gzip
import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Literal, TextIO

from dike.exceptions import BadInputError
from framework.policies.trials.interface import Reading

LONG_METRIC = "train_loss"
WIDE_METRIC = "acc"
_WIDE_EVALUATION_S = 1.0

Mode = Literal["min", "max"]


class Curve:
    """The loss of one training run over its training time.

    Loss and step are interpolated linearly between two points; before the first point the loss is the first one. A NaN
    or infinite loss lasts until the next point.

    Args:
        times_s: seconds of training, ascending; the last is above 0.
    """

    def __init__(self, name: str, times_s: Sequence[float], steps: Sequence[float], losses: Sequence[float]) -> None:
        self.name = name
        if times_s[0] > 0:
            times_s, steps, losses = [0.0, *times_s], [0.0, *steps], [losses[0], *losses]
        self._times_s = list(times_s)
        self._steps = list(steps)
        self._losses = list(losses)
        # The loss at the end of each interval: the next point, or constant if either is not finite.
        self._ends = [
            following if math.isfinite(loss) and math.isfinite(following) else loss
            for loss, following in pairwise(self._losses)
        ]
        areas = (
            (after - before) * (loss + end) / 2 if math.isfinite(loss) else 0.0
            for (before, after), loss, end in zip(pairwise(self._times_s), self._losses, self._ends, strict=False)
        )
        self._areas = list(accumulate(areas, initial=0.0))

    @property
    def length_s(self) -> float:
        return self._times_s[-1]

    @property
    def first_loss(self) -> float:
        return self._losses[0]

    @property
    def final_loss(self) -> float:
        return self._losses[-1]

    @property
    def points(self) -> tuple[Sequence[float], Sequence[float]]:
        """Steps, ascending, and the losses after them."""
        return self._steps, self._losses

    @property
    def lowest_loss(self) -> float:
        """The minimum of its finite losses; infinity if there is none."""
        return min(filter(math.isfinite, self._losses), default=math.inf)

    def time_to(self, target: float) -> float:
        """Seconds of training until the loss is at most `target`; infinity if it never is."""
        for place, loss in enumerate(self._losses):
            if loss <= target:
                return self._times_s[place]
            if place < len(self._ends) and self._ends[place] <= target:
                share = (loss - target) / (loss - self._ends[place])
                return self._times_s[place] + share * (self._times_s[place + 1] - self._times_s[place])
        return math.inf

    def reading(self, begin_s: float, end_s: float, train_s: float | None = None) -> Reading:
        """Returns the report on the training from `begin_s` to `end_s`, with one loss for each step.

        Args:
            begin_s: seconds trained before.
            end_s: seconds trained now, more than `begin_s` and at most `length_s`.
            train_s: reported training time, if it is not the curve's.
        """
        first = bisect_right(self._times_s, begin_s)
        last = bisect_right(self._times_s, end_s)
        begin = self._at(first - 1, begin_s)
        end = self._at(last - 1, end_s)
        losses = [begin[0], *self._losses[first:last], end[0]]
        total = sum(losses)
        step = round(end[1])
        if math.isfinite(total):
            low, high = min(losses), max(losses)
            loss = min(max((end[2] - begin[2]) / (end_s - begin_s), low), high)
        elif math.isnan(total):
            loss = low = high = math.nan
        else:
            loss, low, high = total, min(losses), max(losses)
        return Reading(end_s if train_s is None else train_s, step, loss, low, high, max(1, step - round(begin[1])))

    def _at(self, place: int, time_s: float) -> tuple[float, float, float]:
        """Loss, step and area under the curve at a time after point number `place`."""
        if place >= len(self._ends):
            return self._losses[-1], self._steps[-1], self._areas[-1]
        passed_s = time_s - self._times_s[place]
        share = passed_s / (self._times_s[place + 1] - self._times_s[place])
        loss, step = self._losses[place], self._steps[place]
        if not math.isfinite(loss):
            return loss, step + share * (self._steps[place + 1] - step), self._areas[place]
        now = loss + share * (self._ends[place] - loss)
        area = self._areas[place] + passed_s * (loss + now) / 2
        return now, step + share * (self._steps[place + 1] - step), area


@dataclass(frozen=True)
class _Point:
    time_s: float
    step: float
    loss: float


def read_curves(path: Path, metric: str | None = None, mode: Mode = "min") -> tuple[Curve, ...]:
    """Reads a file of curves, plain or gzipped, in one of two forms; other columns are ignored.

    Long: columns `trial`, `step`, `seconds` (of training) and the metric, one row for each evaluation, in any order.
    Wide: columns `METRIC_0`, `METRIC_1`, ..., one row for each trial, one second and one step from an evaluation to the
    next. An empty cell is a NaN; at the end of a wide row it is no evaluation.

    Args:
        path: the CSV file.
        metric: the column; by default `train_loss`, in the wide form `acc`, an accuracy: the loss is 1 - acc.
        mode: whether to minimise or maximise the metric; for `max` the losses are negated.

    Raises:
        BadInputError: if there is no such file or column, or a cell is not a number.
    """
    try:
        with _open(path) as file:
            rows = csv.DictReader(file)
            columns = rows.fieldnames or []
            is_wide = f"{metric or WIDE_METRIC}_0" in columns
            if is_wide:
                curves = tuple(_read_wide(path, rows, columns, metric, mode))
            else:
                curves = tuple(_read_long(path, rows, columns, metric or LONG_METRIC, mode))
    except (OSError, EOFError, UnicodeDecodeError, csv.Error) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else "it is not CSV text"
        raise BadInputError(f"The curves in {path} cannot be read: {reason}.") from error
    if not curves:
        raise BadInputError(f"There is no trial in {path}; give a file of recorded learning curves.")
    return curves


def _open(path: Path) -> TextIO:
    if path.suffix == ".gz":
        return gzip.open(path, "rt", encoding="utf-8", newline="")
    return path.open(encoding="utf-8", newline="")


def _read_long(
    path: Path, rows: csv.DictReader[str], columns: Sequence[str], metric: str, mode: Mode
) -> Iterator[Curve]:
    for column in ("trial", "step", "seconds", metric):
        if column not in columns:
            known = ", ".join(columns) or "none"
            raise BadInputError(f"There is no column '{column}' in {path}; there are {known}.")
    points: dict[str, dict[float, _Point]] = {}
    for row in rows:
        time_s = _number(path, rows.line_num, "seconds", row["seconds"])
        step = _number(path, rows.line_num, "step", row["step"])
        if not (0 <= time_s < math.inf and 0 <= step < math.inf):
            raise BadInputError(f"Line {rows.line_num} of {path}: seconds and step must be finite and not negative.")
        value = _number(path, rows.line_num, metric, row[metric], empty=math.nan)
        points.setdefault(row["trial"], {})[time_s] = _Point(time_s, step, value if mode == "min" else -value)
    for name, by_time in points.items():
        recorded = sorted(by_time.values(), key=lambda point: point.time_s)
        if recorded[-1].time_s <= 0:
            raise BadInputError(f"Trial {name} in {path} has no evaluation after second 0; leave it out.")
        yield _curve(name, recorded)


def _read_wide(
    path: Path, rows: csv.DictReader[str], columns: Sequence[str], metric: str | None, mode: Mode
) -> Iterator[Curve]:
    prefix = f"{metric or WIDE_METRIC}_"
    known = set(columns)
    evaluations: list[str] = []
    while (column := f"{prefix}{len(evaluations)}") in known:
        evaluations.append(column)
    for number, row in enumerate(rows):
        values = [_number(path, rows.line_num, column, row[column], empty=math.nan) for column in evaluations]
        while values and not row[evaluations[len(values) - 1]]:
            values.pop()
        if not values:
            raise BadInputError(f"Line {rows.line_num} of {path} has no evaluation; leave it out.")
        losses = (
            [1 - value for value in values] if metric is None else values if mode == "min" else [-v for v in values]
        )
        recorded = [_Point(place * _WIDE_EVALUATION_S, place, loss) for place, loss in enumerate(losses, start=1)]
        yield _curve(str(number), recorded)


def _curve(name: str, points: Sequence[_Point]) -> Curve:
    return Curve(
        name, [point.time_s for point in points], [point.step for point in points], [point.loss for point in points]
    )


def _number(path: Path, line: int, column: str, text: str | None, empty: float | None = None) -> float:
    if not text and empty is not None:
        return empty
    try:
        return float(text or "")
    except ValueError:
        raise BadInputError(f"Line {line} of {path}: '{text or ''}' in column {column} is not a number.") from None
