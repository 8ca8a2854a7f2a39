"""Families of synthetic learning curves with features of real ones, drawn by seed."""

from __future__ import annotations

import difflib
import math
import zlib
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from benchmarks.simulation.curves import Curve
from dike.exceptions import BadInputError

EVALUATIONS = 120
"""Points of a curve."""
STEPS = 12_000
"""Training steps of a curve."""
LENGTH_S = 12_000.0
"""Median seconds of a curve."""
TRIALS = 200

Array = NDArray[np.float64]
Shape = Callable[[np.random.Generator, Array], Array]
"""Draws one trial: its losses without noise, by progress from 0 to 1."""


def power_law(rng: np.random.Generator, done: Array) -> Array:
    """Falls by a power of the steps from the start; its features are independent."""
    start, floor = rng.normal(6.0, 0.2), 1.0 + rng.exponential(0.8)
    knee, power = 10 ** rng.uniform(-3.0, -1.3), rng.uniform(0.4, 1.2)
    return floor + (start - floor) * (1 + done / knee) ** -power


def plateau(rng: np.random.Generator, done: Array) -> Array:
    """Is flat for up to half of the training, then falls as a sigmoid; a quarter never falls."""
    start, floor = rng.normal(6.9, 0.05), 1.5 + rng.exponential(1.2)
    begins, width = rng.uniform(0.02, 0.5), 10 ** rng.uniform(-2.0, -1.0)
    if rng.random() < 0.25:
        floor = start - rng.uniform(0.0, 0.4)
    fallen = 1 / (1 + np.exp(-np.clip((done - begins) / width - 2.0, -60, 60)))
    return start - (start - floor) * (0.7 * fallen + 0.3 * fallen * done)


def learning_rate_steps(rng: np.random.Generator, done: Array) -> Array:
    """Is flat between cuts of the learning rate; with a greater rate higher before and lower after the cuts."""
    rate = rng.uniform(-1.5, 1.5)
    start, best = rng.normal(4.6, 0.1), 0.4 + 0.9 * abs(rate - 0.4) + rng.exponential(0.25)
    cuts = np.array([0.3, 0.6, 0.85]) + rng.uniform(-0.08, 0.08, 3)
    noise_floor = 0.25 * math.exp(0.9 * rate)
    pace = 40 * math.exp(0.6 * rate)
    level = best + noise_floor * 0.3 ** (done[:, None] > cuts).sum(axis=1)
    loss, losses = start, np.empty_like(done)
    for place, gap in enumerate(np.diff(done, prepend=0.0)):
        loss += (level[place] - loss) * (1 - math.exp(-pace * gap))
        losses[place] = loss
    return losses


def divergence(rng: np.random.Generator, done: Array) -> Array:
    """Falls faster with larger learning rates; the largest make it rise, and for some it ends as NaN."""
    rate = rng.uniform(-3.0, 1.0)
    start, floor = rng.normal(2.3, 0.05), 0.15 + rng.exponential(0.12)
    losses = floor + (start - floor) * (1 + done * 60 * math.exp(1.2 * rate)) ** -0.8
    breaks = rng.exponential(0.8) / max(math.exp(2.5 * (rate - 0.3)), 0.05)
    late = done > breaks
    losses[late] += (start - losses[late]) * np.minimum(1.0, 8 * (done[late] - breaks)) * rng.uniform(0.3, 1.5)
    if rng.random() < 0.4:
        losses[done > breaks + 0.05] = math.nan
    return losses


def crossing(rng: np.random.Generator, done: Array) -> Array:
    """Fast starters stay high, slow starters end low."""
    speed = rng.uniform(0.0, 1.0)
    start = rng.normal(5.0, 0.1)
    floor = 0.8 + 1.6 * speed**2 + rng.exponential(0.35)
    return floor + (start - floor) * np.exp(-done * (3.0 + 40 * speed**2))


def warm_up(rng: np.random.Generator, done: Array) -> Array:
    """The learning rate rises, for some with the loss, then falls as a cosine; the loss falls mostly at the end."""
    start, peak = rng.normal(6.0, 0.15), rng.uniform(-1.0, 1.0)
    warm = rng.uniform(0.02, 0.15)
    rate = np.minimum(done / warm, 0.5 * (1 + np.cos(math.pi * np.clip((done - warm) / (1 - warm), 0, 1))))
    learnt = np.cumsum(rate * np.diff(done, prepend=0.0))
    floor = 1.0 + 0.8 * abs(peak - 0.3) + rng.exponential(0.2)
    base = floor + (start - floor) * (1 + 30 * learnt * math.exp(peak)) ** -0.7
    bump = rng.uniform(0.0, 1.5) * np.exp(-(((done - warm) / (0.6 * warm)) ** 2))
    return base + 0.9 * math.exp(0.5 * peak) * rate * (1 - np.exp(-done / warm)) + bump


def overfitting(rng: np.random.Generator, done: Array) -> Array:
    """A validation loss that falls, and rises again earlier for larger models."""
    size = rng.uniform(-1.0, 1.0)
    start, floor = rng.normal(3.0, 0.1), 0.6 + 0.35 * abs(size) + rng.exponential(0.25)
    fall = floor + (start - floor) * (1 + done * 50 * math.exp(size)) ** -1.1
    return fall + np.maximum(done - rng.uniform(0.15, 0.9), 0) * rng.exponential(0.8) * math.exp(size)


def warm_restarts(rng: np.random.Generator, done: Array) -> Array:
    """The learning rate falls as a cosine and restarts, for twice as long each time; the loss jumps up with it."""
    rate, cycles = rng.uniform(-1.0, 1.0), int(rng.integers(2, 5))
    ends = np.cumsum(2.0 ** np.arange(cycles)) / (2**cycles - 1)
    cycle = np.searchsorted(ends, np.minimum(done, ends[-1]))
    begins = np.concatenate([[0.0], ends])[cycle]
    heat = 0.5 * (1 + np.cos(math.pi * (done - begins) / (ends[cycle] - begins)))
    start, floor = rng.normal(5.0, 0.1), 0.7 + 0.7 * abs(rate - 0.2) + rng.exponential(0.25)
    learnt = floor + (start - floor) * (1 + 25 * done * math.exp(rate)) ** -0.8
    return learnt + 0.6 * math.exp(0.7 * rate) * heat


def late_fall(rng: np.random.Generator, done: Array) -> Array:
    """Grokking: the loss falls to a first level and is flat; for half of the trials it falls again late."""
    start, level = rng.normal(4.0, 0.1), 1.8 + rng.exponential(0.4)
    first = level + (start - level) * np.exp(-done * 10 ** rng.uniform(1.0, 2.0))
    if rng.random() < 0.5:
        return first
    comes, width, floor = rng.uniform(0.1, 0.85), 10 ** rng.uniform(-2.0, -1.2), 0.2 + rng.exponential(0.2)
    return first - (first - floor) / (1 + np.exp(-np.clip((done - comes) / width, -60, 60)))


def heavy_noise(rng: np.random.Generator, done: Array) -> Array:
    """A power law, with noise as large as the differences between trials, and spikes."""
    losses = power_law(rng, done)
    losses *= np.exp(rng.uniform(0.02, 0.12) * rng.standard_t(3, len(done)).clip(-8, 8))
    spikes = rng.random(len(done)) < rng.uniform(0.0, 0.05)
    return losses + spikes * rng.exponential(3.0, len(done))


def two_speeds(rng: np.random.Generator, done: Array) -> Array:
    """Falls in part immediately and in part slowly; sizes and speed are independent."""
    floor, fast, slow = 0.5 + rng.exponential(0.3), rng.uniform(0.5, 2.5), rng.uniform(0.5, 2.5)
    return (
        floor + fast * np.exp(-done * 10 ** rng.uniform(1.0, 2.5)) + slow * np.exp(-done * 10 ** rng.uniform(0.0, 1.2))
    )


def double_descent(rng: np.random.Generator, done: Array) -> Array:
    """Falls, rises to a peak, and falls again, mostly lower than before."""
    start, first = rng.normal(3.0, 0.1), 0.9 + rng.exponential(0.3)
    base = first + (start - first) * np.exp(-done * 10 ** rng.uniform(1.0, 1.8))
    place, width = rng.uniform(0.1, 0.6), rng.uniform(0.04, 0.15)
    peak = rng.exponential(0.5) * np.exp(-(((done - place) / width) ** 2))
    second = rng.uniform(-0.2, 0.8) * first / (1 + np.exp(-np.clip((done - place - width) / width * 3, -60, 60)))
    return base + peak - second


def instabilities(rng: np.random.Generator, done: Array) -> Array:
    """Diverges again and again, more often with larger learning rates, and recovers slowly."""
    rate = rng.uniform(-1.0, 1.0)
    start, floor = rng.normal(8.0, 0.1), 2.0 + 0.8 * abs(rate - 0.3) + rng.exponential(0.3)
    losses = floor + (start - floor) * (1 + done * 40 * math.exp(rate)) ** -0.6
    for begins in np.sort(rng.uniform(0.0, 1.0, rng.poisson(2.5 * math.exp(rate)))):
        after = np.maximum(done - begins, 0.0)
        losses += (done >= begins) * rng.exponential(1.2) * np.exp(-after * 10 ** rng.uniform(1.0, 2.0))
    return losses


def stages(rng: np.random.Generator, done: Array) -> Array:
    """A curriculum: the data become harder at each stage, and the loss jumps up."""
    talent = rng.uniform(0.0, 1.0)
    start, floor = rng.normal(4.0, 0.1), 0.5 + 0.9 * (1 - talent) + rng.exponential(0.2)
    number = int(rng.integers(2, 6))
    stage = np.minimum((done * number).astype(int), number - 1)
    within = done * number - stage
    harder = (0.6 + stage / number) / 1.6
    left = np.exp(-within * rng.uniform(1.5, 6.0)) * np.where(stage == 0, 1.0, rng.uniform(0.1, 0.5))
    return floor * harder + (start - floor) * left * harder


def slow_and_close(rng: np.random.Generator, done: Array) -> Array:
    """Falls with the logarithm of the steps; trials are close together."""
    start, slope = rng.normal(5.0, 0.02), rng.normal(0.55, 0.025)
    return start - slope * np.log1p(done * 10 ** rng.uniform(2.0, 2.6))


FAMILIES: dict[str, tuple[Shape, ...]] = {
    "power-law": (power_law,),
    "plateau": (plateau,),
    "learning-rate-steps": (learning_rate_steps,),
    "divergence": (divergence,),
    "crossing": (crossing,),
    "warm-up": (warm_up,),
    "overfitting": (overfitting,),
    "step-lengths": (power_law, learning_rate_steps),
    "warm-restarts": (warm_restarts,),
    "late-fall": (late_fall,),
    "heavy-noise": (heavy_noise,),
    "two-speeds": (two_speeds,),
    "slow-start": (power_law, crossing, warm_up),
    "double-descent": (double_descent,),
    "instabilities": (instabilities,),
    "stages": (stages,),
    "slow-and-close": (slow_and_close,),
    "mixed": (power_law, plateau, learning_rate_steps, divergence, crossing, warm_up, overfitting),
}
"""Name -> shapes of its trials. Each trial has one of several shapes, scaled to start at about 1."""

_STEP_TIME_RATIOS = {"step-lengths": 8.0, "mixed": 3.0}
"""Maximum ratio of step times between trials of a family; 1.5 by default."""
_FIRST_STEP_SHARES = {"slow-start": 0.15}
"""Maximum duration of the first step as a share of all others; elsewhere the same as any step."""


def draw_family(name: str, seed: int = 0, trials: int = TRIALS) -> tuple[Curve, ...]:
    """Draws the curves of a family; deterministic for a seed.

    Raises:
        BadInputError: if there is no family of that name.
    """
    if name not in FAMILIES:
        near = difflib.get_close_matches(name.lower(), FAMILIES, n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise BadInputError(f"There is no family of curves '{name}'; {hint}choose one of {', '.join(FAMILIES)}.")
    rng = np.random.default_rng([zlib.crc32(name.encode()), seed])
    return tuple(_draw(name, FAMILIES[name], rng, number) for number in range(trials))


def _draw(name: str, shapes: Sequence[Shape], rng: np.random.Generator, number: int) -> Curve:
    done = np.arange(1, EVALUATIONS + 1) / EVALUATIONS
    shape = shapes[int(rng.integers(len(shapes)))]
    losses = shape(rng, done)
    if len(shapes) > 1:
        # Scaled to start at about 1, so that one target fits all shapes.
        losses = losses / losses[0] * rng.normal(1.0, 0.02)
    spread = 10 ** rng.uniform(-3.0, -1.5)
    losses = losses * np.exp(spread * rng.standard_normal(EVALUATIONS))
    length_s = LENGTH_S * _STEP_TIME_RATIOS.get(name, 1.5) ** rng.uniform(-0.5, 0.5)
    start_s = length_s * rng.uniform(0.0, _FIRST_STEP_SHARES[name]) if name in _FIRST_STEP_SHARES else 0.0
    return Curve(f"{name}-{number}", (start_s + done * length_s).tolist(), (done * STEPS).tolist(), losses.tolist())
