"""The best states of machines with a given number of parameter servers (ps) in all and a limit on the workers.

Each machine has no ps or one, so the m ps go to the machines that gain most by one. A price for each worker replaces
the limit on the workers (Lagrangian relaxation): for any price the value is an upper bound.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from solver.capacity import Ints
from solver.search.machines import MachineArrays
from solver.search.space import ROUNDING, Floats

MAX_ROUNDS = 12
MIN_BONUS_SHARE = 1e-3
"""First bonus for a worker, if there are too few, as a share of the largest value of a machine; ..."""
BONUS_FACTOR = 4.0
"""... it rises by this factor ..."""
MAX_BONUSES = 12
"""... at most this number of times."""

Numbers = tuple[Ints, Ints, Ints]
"""Rows, ps on a machine, and number of machines with these."""


@dataclass(frozen=True)
class State:
    """Machines of one row with as many ps and the same workers."""

    row: int
    machines: int
    ps: int
    choice: int
    workers: int


@dataclass(frozen=True)
class RelaxedOptimum:
    """A relaxed optimum: an upper bound of the value, and machines with that value, or almost.

    Attributes:
        value: the bound.
        numbers: the machines by row and number of ps.
        worth: value of a machine, rows x ps x choices: each has the best choice.
        workers_of: workers on it.
        made: steps/s of its workers (asynchronous).
    """

    value: float
    numbers: Numbers
    worth: Floats
    workers_of: Floats
    made: Floats = field(default_factory=lambda: np.zeros((1, 1, 1)))

    @functools.cached_property
    def choices(self) -> Ints:
        rows, ps, _ = self.numbers
        return self.worth[rows, ps].argmax(axis=1)

    def each(self, values: Floats) -> Floats:
        """Entries of the machines in a rows x ps x choices array."""
        rows, ps, _ = self.numbers
        return values[rows, ps, self.choices % values.shape[2]]

    @property
    def workers(self) -> float:
        return float(self.numbers[2] @ self.each(self.workers_of))

    @property
    def steps(self) -> float:
        """Steps/s of all workers (asynchronous)."""
        return float(self.numbers[2] @ self.each(self.made))

    def kept(self, value: Floats, limit: float) -> float:
        """Approximate value without workers above the limit."""
        worth, count = float(self.numbers[2] @ self.each(value)), self.workers
        return worth * min(1.0, limit / count) if count else worth

    @functools.cached_property
    def states(self) -> tuple[State, ...]:
        """The machines, one entry for identical ones."""
        columns = (*self.numbers, self.choices, self.each(self.workers_of).astype(np.int64))
        return tuple(
            State(row, machines, ps, choice, workers)
            for row, ps, machines, choice, workers in zip(*(column.tolist() for column in columns), strict=True)
        )


def allocate(
    arrays: MachineArrays, value: Floats, workers: Floats, limits: tuple[float, float]
) -> RelaxedOptimum | None:
    """The best state for each machine with all ps placed and as many workers as the limits allow.

    `value`: value of a machine, rows x ps x choices; -inf if it is impossible. `limits`: minimum and maximum workers of
    all machines.

    Returns:
        None if the ps do not fit.
    """
    fewest, limit = limits
    total, numbers = _best_ps_counts(arrays, value.max(axis=2))
    if numbers is None or not math.isfinite(total):
        return None
    found, bound = RelaxedOptimum(total, numbers, value, workers), total
    if found.workers < fewest:
        return _with_more_workers(arrays, found, fewest)
    if found.workers <= limit:
        return found
    with np.errstate(invalid="ignore", divide="ignore"):
        price = float(np.nanmax(np.where(workers > 0, value / workers, 0.0), initial=0.0))
    # As a function of the price the bound is convex and piecewise linear: the next price is where two pieces meet.
    within_limit, low, high = None, (total, found.workers), (0.0, 0.0)
    for _ in range(MAX_ROUNDS):
        worth = value - price * workers
        total, numbers = _best_ps_counts(arrays, worth.max(axis=2))
        assert numbers is not None
        bound = min(bound, total + price * limit)
        priced = RelaxedOptimum(total, numbers, worth, workers)
        piece = total + price * priced.workers, priced.workers
        if priced.workers > limit:
            found, low = priced, piece
        else:
            within_limit, high = priced, piece
        before, price = price, (low[0] - high[0]) / (low[1] - high[1])
        if within_limit is None or price <= 0 or abs(price - before) <= ROUNDING * before:
            break
    best = found if within_limit is None else max((found, within_limit), key=lambda each: each.kept(value, limit))
    return replace(best, value=bound)


def _with_more_workers(arrays: MachineArrays, found: RelaxedOptimum, fewest: float) -> RelaxedOptimum | None:
    """Pays a bonus for each worker, until there are at least `fewest`; with any bonus the value is an upper bound."""
    value, bound = found.worth, found.value
    bonus = max(abs(float(np.where(np.isfinite(value), value, 0.0).max(initial=0.0))), 1.0) * MIN_BONUS_SHARE
    for _ in range(MAX_BONUSES):
        worth = value + bonus * found.workers_of
        total, numbers = _best_ps_counts(arrays, worth.max(axis=2))
        assert numbers is not None
        bound = min(bound, total - bonus * fewest)
        found = RelaxedOptimum(bound, numbers, worth, found.workers_of)
        if found.workers >= fewest:
            return replace(found, value=bound)
        bonus *= BONUS_FACTOR
    # The bonus outweighs all else, and the minimum of workers does not fit.
    return None


def steps_worth(
    arrays: MachineArrays, most: Floats, fewest: Floats, possible: NDArray[np.bool_], price: float
) -> tuple[Floats, Floats]:
    """The best steps/s of each machine, and their samples less their price; -inf if they are impossible.

    Args:
        arrays: the machines.
        most: maximum steps/s, rows x ps x choices; the choices are those of the arrays, repeated, and no workers.
        fewest: minimum steps/s.
        possible: whether they are possible.
        price: price of a step: steps with fewer samples are not worth it.
    """
    samples = np.tile(arrays.samples, (most.shape[-1] - 1) // max(1, len(arrays.samples)))
    gain = np.append(samples, price) - price
    made = np.where(gain >= 0, most, fewest)
    return made, np.where(possible, gain * made, -np.inf)


def _best_ps_counts(arrays: MachineArrays, worth: Floats) -> tuple[float, Numbers | None]:
    """Distributes the ps over the rows for the greatest total value.

    Args:
        arrays: the machines.
        worth: value of one machine, rows x ps.

    Returns:
        An upper bound of the value, and the machines; -inf and None if the ps do not fit.
    """
    worth = np.where(arrays.fits, worth, -np.inf)
    if arrays.has_pieces:
        return _by_concave_hulls(arrays, worth)
    without, beside = worth.T
    if np.isneginf(without).any():
        # Only machines with the chief or the largest shard may be impossible without another ps; these get none.
        return -math.inf, None
    gain = beside - without
    order = np.argsort(-gain, kind="stable")
    counts = arrays.counts[order]
    given = np.clip(arrays.ps - (np.cumsum(counts) - counts), 0, np.where(np.isfinite(gain[order]), counts, 0))
    if given.sum() < arrays.ps:
        return -math.inf, None
    placed = np.zeros((len(worth), 2), dtype=np.int64)
    placed[order, 1] = given
    placed[:, 0] = arrays.counts - placed[:, 1]
    total = float(arrays.counts @ without + given[given > 0] @ gain[order][given > 0])
    rows, ps = np.nonzero(placed)
    return total, (rows, ps, placed[rows, ps])


def _by_concave_hulls(arrays: MachineArrays, worth: Floats) -> tuple[float, Numbers | None]:
    """Pieces of the bytes along the concave hulls of each machine's value; fractions of them bound whole ones."""
    count, most = worth.shape
    at, here = np.zeros(count, dtype=np.int64), worth[:, 0].copy()
    slopes, lengths, of_row, to = [], [], [], []
    numbers = np.arange(most)
    while True:
        ahead = numbers[None, :] > at[:, None]
        with np.errstate(invalid="ignore"):
            slope = np.where(ahead, (worth - here[:, None]) / np.maximum(1, numbers[None, :] - at[:, None]), -np.inf)
        # The farthest of equally steep corners.
        corner = most - 1 - slope[:, ::-1].argmax(axis=1)
        steepest = slope[np.arange(count), corner]
        on = np.flatnonzero(np.isfinite(steepest))
        if not len(on):
            break
        slopes.append(steepest[on])
        lengths.append((corner - at)[on])
        of_row.append(on)
        to.append(corner[on])
        at[on] = corner[on]
        here = np.full(count, np.nan)
        here[on] = worth[on, corner[on]]
    total = float((worth[:, 0] * arrays.counts).sum())
    placed = np.zeros((count, most), dtype=np.int64)
    placed[:, 0] = arrays.counts
    if not slopes:
        return -math.inf, None
    slope, length, row, corner = (np.concatenate(parts) for parts in (slopes, lengths, of_row, to))
    order = np.argsort(-slope, kind="stable")
    slope, length, row, corner = slope[order], length[order], row[order], corner[order]
    each = length * arrays.counts[row]
    left = np.clip(arrays.ps - (np.cumsum(each) - each), 0, each)
    if left.sum() < arrays.ps:
        return -math.inf, None
    total += float(left @ slope)
    machines = left // length
    np.add.at(placed, (row, corner), machines)
    np.subtract.at(placed, (row, corner - length), machines)
    rows, numbers_of = np.nonzero(placed)
    return total, (rows, numbers_of, placed[rows, numbers_of])
