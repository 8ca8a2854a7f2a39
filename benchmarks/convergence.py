"""Measures how well `ConvergenceModel` predicts the end of a training from its first losses."""

from __future__ import annotations

import csv
import gzip
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from solver.calibration.nnls import Floats
from solver.online import ConvergenceModel, LossCurve

TITLE = "When a training will have converged"
DATA = Path(__file__).parent / "data" / "learning_curves"
SEED = 11
CURVES = 100
STEPS = 20_000
REPORT_STEPS = 20
EPOCH_STEPS = 200
THRESHOLD = 0.01
RECORDED_THRESHOLD = 0.02
RECORDS_PER_EPOCH = 5
PATIENCE = 3
PROGRESS = (0.2, 0.4, 0.6, 0.8, 0.95)
SMOOTHING_RADIUS = 2
"""Recorded losses are smoothed by the median of a window of this radius."""

Values = Callable[[Floats, np.random.Generator], Floats]
"""(progress, 0 to 1; random numbers) -> losses without noise."""


@dataclass(frozen=True)
class Curve:
    """Losses of one training.

    Attributes:
        threshold: a smaller relative fall per epoch counts as none.
        end: step of convergence; None if it never converges.
    """

    steps: Floats
    losses: Floats
    epoch_steps: int
    threshold: float
    end: float | None


@dataclass(frozen=True)
class Prediction:
    """One prediction.

    Attributes:
        known: whether the model trusts its curve.
        early: whether it is trusted and predicts an end before the last loss.
        error: relative error of the predicted end; None without a true end or a curve.
    """

    known: bool
    early: bool
    error: float | None
    seconds: float


def measure() -> Iterator[str]:
    yield (
        f"A training has converged when its loss has fallen by less than {THRESHOLD:.0%} per epoch for {PATIENCE} "
        "epochs. Predicted when 20%, 40%, ... of the steps until then are done. *Known*: share of the trainings whose "
        "losses are taken to follow `1 / (b0 k + b1) + b2`. *Error*: of the predicted end, as a share of the true end, "
        "median and 90th percentile over these; in brackets the median over the others, had they been believed."
    )
    yield ""
    yield f"Synthetic losses, {CURVES} trainings each, a report every {REPORT_STEPS} steps, epochs of {EPOCH_STEPS}:"
    yield ""
    yield from _table({name: _model_curves(noise) for name, noise in (("2% noise", 0.02), ("10% noise", 0.1))})
    yield ""
    yield (
        f"Synthetic losses of other forms ({STEPS:,} steps, 2% noise), at these shares of all steps: known, and in "
        "brackets those whose end is predicted before the last step, which is wrong. Those that are known were still "
        "undisturbed:"
    )
    yield ""
    yield from _known_table({name: _disturbed_curves(values) for name, values in DISTURBED.items()})
    yield ""
    yield (
        f"Recorded training losses (`benchmarks/data/learning_curves`), epochs of {RECORDS_PER_EPOCH} records, "
        f"{RECORDED_THRESHOLD:.0%}. The learning rate follows a schedule in all of ImageNet's and most of OGBG's; "
        "trainings that still fall at their last record have no end, and are counted apart, as above:"
    )
    yield ""
    recorded = {name: recorded_curves(name) for name in ("algoperf_imagenet_resnet", "algoperf_ogbg")}
    yield from _table({name: [curve for curve in curves if curve.end] for name, curves in recorded.items()})
    yield ""
    yield from _known_table(
        {f"{name}, no end": [curve for curve in curves if not curve.end] for name, curves in recorded.items()}
    )


def _table(sets: dict[str, list[Curve]]) -> Iterator[str]:
    yield f"| trainings | {' | '.join(f'{share:.0%} done' for share in PROGRESS)} | ms |"
    yield f"|---|{'---|' * len(PROGRESS)}---|"
    for name, curves in sets.items():
        rows = [predictions(curve) for curve in curves]
        ms = 1e3 * statistics.median(prediction.seconds for row in rows for prediction in row)
        cells = [_cell([row[at] for row in rows]) for at in range(len(PROGRESS))]
        yield f"| {name} ({len(curves)}) | {' | '.join(cells)} | {ms:.1f} |"


def _known_table(sets: dict[str, list[Curve]]) -> Iterator[str]:
    yield f"| trainings | {' | '.join(f'known at {share:.0%}' for share in PROGRESS)} |"
    yield f"|---|{'---|' * len(PROGRESS)}"
    for name, curves in sets.items():
        rows = [predictions(curve) for curve in curves]
        shares = [
            [statistics.mean(getattr(row[at], what) for row in rows) for what in ("known", "early")]
            for at in range(len(PROGRESS))
        ]
        cells = [f"{known:.0%} ({early:.0%})" for known, early in shares]
        yield f"| {name} ({len(curves)}) | {' | '.join(cells)} |"


def _cell(predicted: Sequence[Prediction]) -> str:
    known = [one.error for one in predicted if one.known and one.error is not None]
    others = [one.error for one in predicted if not one.known and one.error is not None]
    share = f"{statistics.mean(one.known for one in predicted):.0%}"
    errors = f"{np.median(known):.0%}, {np.percentile(known, 90):.0%}" if known else "-"
    return f"{share}: {errors}" + (f" ({np.median(others):.0%})" if others else "")


def predictions(curve: Curve) -> list[Prediction]:
    """Predicts at each of `PROGRESS`."""
    model = ConvergenceModel(curve.epoch_steps, curve.threshold, PATIENCE)
    last = curve.steps[-1] if curve.end is None else curve.end
    marks = [share * last for share in PROGRESS]
    found: list[Prediction] = []
    for step, loss in zip(curve.steps.tolist(), curve.losses.tolist(), strict=True):
        model.add(int(step), loss)
        while len(found) < len(marks) and step >= marks[len(found)]:
            found.append(_predicted(model, int(step), curve))
    return found


def _predicted(model: ConvergenceModel, step: int, curve: Curve) -> Prediction:
    started = time.perf_counter()
    left = model.steps_left()
    seconds = time.perf_counter() - started
    early = left.known and bool(step + left.steps < curve.steps[-1])
    fitted = model.curve()
    if curve.end is None or fitted is None:
        return Prediction(left.known, early, None, seconds)
    end = max(step, fitted.flat_from(curve.epoch_steps, curve.threshold) + PATIENCE * curve.epoch_steps)
    return Prediction(left.known, early, abs(end - curve.end) / curve.end, seconds)


def _model_curves(noise: float) -> list[Curve]:
    """Draws losses that follow the model's form and converge after 2,000 to 20,000 steps."""
    random = np.random.default_rng(SEED)
    curves: list[Curve] = []
    while len(curves) < CURVES:
        first, floor = random.uniform(1, 10), random.uniform(0, 0.5)
        true = LossCurve(10 ** random.uniform(-4, -1.5), 1 / first, floor)
        end = true.flat_from(EPOCH_STEPS, THRESHOLD) + PATIENCE * EPOCH_STEPS
        if STEPS / 10 <= end <= STEPS:
            steps = np.arange(0.0, STEPS, REPORT_STEPS)
            losses = true.loss(steps) * (1 + noise * random.standard_normal(len(steps)))
            curves.append(Curve(steps, losses, EPOCH_STEPS, THRESHOLD, end))
    return curves


def _rising(progress: Floats, random: np.random.Generator) -> Floats:
    turn = random.uniform(0.1, 0.5)
    return _falling(progress, random) + 3 * np.maximum(progress - turn, 0)


def _stepwise(progress: Floats, random: np.random.Generator) -> Floats:
    return _falling(progress, random) * np.where(progress < 0.5, 1.0, 0.4)


def _late(progress: Floats, random: np.random.Generator) -> Floats:
    start = random.uniform(0.3, 0.5)
    return 2 / (1 + 40 * np.maximum(progress - start, 0)) + 0.2


def _flat(progress: Floats, random: np.random.Generator) -> Floats:
    return np.full_like(progress, random.uniform(0.5, 7))


def _adversarial(progress: Floats, random: np.random.Generator) -> Floats:
    return 1 + 0.4 * np.sin(2 * np.pi * random.uniform(5, 15) * progress) + 0.3 * np.sin(37 * progress)


def _diverging(progress: Floats, random: np.random.Generator) -> Floats:
    return np.where(progress < random.uniform(0.1, 0.18), _falling(progress, random), np.nan)


def _falling(progress: Floats, random: np.random.Generator) -> Floats:
    return 1 / (10 ** random.uniform(1, 2) * progress + 1 / random.uniform(1, 7)) + random.uniform(0, 0.5)


DISTURBED: dict[str, Values] = {
    "rises after 10% to 50%": _rising,
    "learning rate falls at 50%": _stepwise,
    "flat, falls after 30% to 50%": _late,
    "flat": _flat,
    "to and fro, as of adversaries": _adversarial,
    "not a number after 18%": _diverging,
}


def _disturbed_curves(values: Values) -> list[Curve]:
    random = np.random.default_rng(SEED)
    steps = np.arange(0.0, STEPS, REPORT_STEPS)
    return [
        Curve(
            steps,
            values(steps / STEPS, random) * (1 + 0.02 * random.standard_normal(len(steps))),
            EPOCH_STEPS,
            THRESHOLD,
            None,
        )
        for _ in range(CURVES)
    ]


def recorded_curves(name: str) -> list[Curve]:
    """Reads a file of recorded curves; diverged trainings have no end."""
    rows: dict[str, list[tuple[float, float]]] = {}
    with gzip.open(DATA / f"{name}.csv.gz", "rt", encoding="utf-8", newline="") as lines:
        for row in csv.DictReader(lines):
            rows.setdefault(row["trial"], []).append((float(row["step"]), float(row["train_loss"] or "nan")))
    curves = []
    for trial in rows.values():
        steps, losses = np.array(trial).T
        epoch_steps = RECORDS_PER_EPOCH * round(float(np.median(np.diff(steps))))
        curves.append(Curve(steps, losses, epoch_steps, RECORDED_THRESHOLD, _recorded_end(steps, losses, epoch_steps)))
    return curves


def _recorded_end(steps: Floats, losses: Floats, epoch_steps: int) -> float | None:
    """Returns the first epoch at whose end the smoothed loss has been flat for `PATIENCE` epochs."""
    if not np.isfinite(losses).all():
        return None
    smoothed = [
        np.median(losses[max(0, at - SMOOTHING_RADIUS) : at + SMOOTHING_RADIUS + 1]) for at in range(len(losses))
    ]
    epochs = np.arange(steps[0], steps[-1] + 1, epoch_steps)
    at_epoch = np.interp(epochs, steps, smoothed)
    flat = np.diff(at_epoch) > -RECORDED_THRESHOLD * at_epoch[:-1]
    for first in range(len(flat) - PATIENCE + 1):
        if flat[first : first + PATIENCE].all():
            return float(epochs[first + PATIENCE])
    return None
