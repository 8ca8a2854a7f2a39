"""Relaxed problems over the machines of a space: what they reach at most, and where."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from solver.async_rates import LINK_SHARE
from solver.capacity import Ints
from solver.search.machines import ANY_CASE, Case, MachineArrays
from solver.search.optimum import MAX_ROUNDS, RelaxedOptimum, allocate, steps_worth
from solver.search.space import MAX_STEP_RATIO, ROUNDING, Floats, Space

STEP_ROUNDING = 1e-7
"""Relative; margin of ranges of steps, so that no step at their ends is lost."""
MAX_WINDOW_RATIO = 1.25
"""Ratio of the shortest steps of neighbouring cases, where workers without GPUs may have any number of CPUs."""


def windows(space: Space, arrays: MachineArrays) -> list[Case]:
    """Cases such that any workers whose steps differ by at most `MAX_STEP_RATIO` are within one of them."""
    if space.scenario.profile.synchronous:
        return [ANY_CASE]
    # Beside a smaller ps there may be room for workers that do not fit beside one with all variables.
    is_possible = (arrays.room[:, :1] > 0) & np.isfinite(arrays.steps)
    steps = np.unique(arrays.steps[is_possible])
    if not len(steps) or steps[-1] <= MAX_STEP_RATIO * steps[0]:
        return [ANY_CASE]
    lows = list(zip(steps.tolist(), steps.tolist(), strict=True))
    of_cpus = arrays.steps[is_possible & arrays.is_cpu]
    if len(of_cpus):
        # With fewer CPUs a worker's step may have any length.
        shortest = float(of_cpus.min())
        count = math.ceil(math.log(max(1.0, steps[-1] / shortest), MAX_WINDOW_RATIO)) + 1
        points = shortest * MAX_WINDOW_RATIO ** np.arange(count + 1)
        lows = [low for low in lows if low[0] < shortest]
        lows += list(itertools.pairwise(points.tolist()))
    cases, covered = [], 0.0
    for low, next_low in lows:
        high = next_low * MAX_STEP_RATIO * (1 + STEP_ROUNDING)
        slowest = float(steps[np.searchsorted(steps, high, side="right") - 1])
        if slowest <= covered:
            continue
        covered = slowest
        fastest = float(steps[min(len(steps) - 1, np.searchsorted(steps, low * (1 - ROUNDING)))])
        cases.append(Case(steps=(low * (1 - STEP_ROUNDING), high), real_steps=(fastest, fastest * MAX_STEP_RATIO)))
    return cases


def machines_reaching(
    space: Space,
    arrays: MachineArrays,
    load: float,
    samples_per_s: float,
    works: tuple[float, float],
    workers: tuple[int, int],
) -> RelaxedOptimum | None:
    """Synchronous: machines on which a plan of that speed is possible with that number of workers; None if none
    are.

    Args:
        space: the placements.
        arrays: the machines.
        load: of the busiest ps.
        samples_per_s: the speed.
        works: minimum and maximum of the slowest worker's work.
        workers: minimum and maximum workers.
    """
    model, (fewest, most), (least_work_s, most_work_s) = space.model, workers, works
    allowed = arrays.work <= most_work_s * (1 + ROUNDING) + ROUNDING
    room = np.where(allowed, arrays.room, 0)
    if not arrays.samples.size:
        return None
    samples = min(most * arrays.most_samples, float(arrays.counts @ (room * arrays.samples).max(axis=(1, 2))))
    rest_s = model.update_s(load, fewest) + model.dispatch_s(fewest)
    found = None
    for _ in range(MAX_ROUNDS):
        round_s = samples / samples_per_s
        left_s = round_s - rest_s - (0.0 if model.overlap else least_work_s)
        if left_s < 0 or (model.overlap and least_work_s > round_s * (1 + ROUNDING)):
            return None
        found = _within(space, arrays, room, left_s, fewest, most)
        if found is None or found.value <= 0:
            return None
        if found.value >= samples * (1 - ROUNDING):
            return found
        samples = found.value
    return found


def _within(
    space: Space, arrays: MachineArrays, room: Ints, network_s: float, fewest: int, most: int
) -> RelaxedOptimum | None:
    """The most samples of a step with no card busy for longer."""
    half, low, high = network_s * arrays.cards / 2, arrays.ends[0], arrays.ends[-1]
    if arrays.largest and not _can_send_shards(arrays, room, half[:, 0, 0], fewest):
        return None
    with np.errstate(divide="ignore", invalid="ignore"):
        receive = np.where(high < arrays.total, half / (arrays.total - high), np.inf)
        inside = np.where(low > 0, network_s * space.within_bytes_per_s / (2 * low), np.inf)
        send = np.where(low > 0, fewest - half / low, 0.0)
    upper = np.minimum(room, np.floor(np.minimum(np.minimum(receive, inside), 1e9) * (1 + ROUNDING)))
    lower = np.maximum(0, np.ceil(send - ROUNDING * fewest))
    fits = lower <= upper
    value = np.where(fits, upper * arrays.samples, -np.inf)
    lowest = np.broadcast_to(lower, upper.shape)
    value = np.concatenate([value, np.where(fits, lowest * arrays.samples, -np.inf)], axis=2)
    upper = np.concatenate([upper, lowest], axis=2)
    return allocate(arrays, value, upper, (fewest, most))


def rate_optima(
    space: Space, arrays: MachineArrays, at: Sequence[float], prices: Sequence[float] = (0.0,)
) -> Iterator[RelaxedOptimum | None]:
    """Asynchronous: optima with the links evaluated at X steps/s of all workers.

    Args:
        space: the placements.
        arrays: the machines.
        at: values of X.
        prices: prices of a step, subtracted from its samples.

    Yields:
        For each X, and each price in turn, samples less the price of the steps; None if the ps do not fit.
    """
    batches = [np.array(at)] if arrays.are_few else [np.array([steps_per_s]) for steps_per_s in at]
    for batch in batches:
        rates = _link_rates(space, arrays, batch)
        for steps_per_s, most, fewest, workers, possible in zip(batch, *rates, strict=True):
            if not _can_serve_largest(arrays, float(steps_per_s)):
                yield from itertools.repeat(None, len(prices))
                continue
            for price in prices:
                made, worth = steps_worth(arrays, most, fewest, possible, price)
                found = allocate(arrays, worth, workers, (space.min_workers, space.max_workers))
                yield None if found is None else replace(found, made=made)


def _link_rates(space: Space, arrays: MachineArrays, at: Floats) -> tuple[Floats, Floats, Floats, NDArray[np.bool_]]:
    """Rates that the links allow at some X: most and fewest steps/s, workers for the most, and whether it is possible.

    All are X x rows x ps x choices: the most steps; if there is a minimum of workers, also the same with all that fit;
    if there is a maximum, also the most of workers that the link does not slow down, and the fewest steps that it
    needs; the last choice is no workers.
    """
    rates, at, cards = arrays.rates, at[:, None, None, None], arrays.cards * LINK_SHARE
    most = np.full((len(at), *rates.shape), -1.0)
    fewest = np.full(most.shape, np.inf)
    least_stored, half = arrays.ends[0], np.clip(arrays.total / 2, arrays.ends[0], arrays.ends[-1])
    # Of shards between the ends, half of all are best for a link.
    for stored in arrays.ends if len(arrays.ends) == 1 else (*arrays.ends, half):
        left, each = cards - stored * at, arrays.total - 2 * stored
        left = np.where(np.abs(left) <= ROUNDING * cards, 0.0, left)
        with np.errstate(divide="ignore", invalid="ignore"):
            link = np.where(each > 0, left / each, np.where((each < 0) | (left >= 0), np.inf, -1.0))
            least = np.where(each < 0, np.maximum(0.0, left / each), 0.0)
            inside = np.where(least_stored > 0, space.within_bytes_per_s / (2 * least_stored), np.inf)
            link = np.minimum(link, inside)
        made = np.minimum(rates * arrays.room, link)
        keeps_up = (made >= 0) & (made >= least * (1 - ROUNDING))
        most = np.where(keeps_up, np.maximum(most, made), most)
        fewest = np.where(keeps_up, np.minimum(fewest, least), fewest)
    possible, most = most >= 0, np.maximum(most, 0.0)
    with np.errstate(divide="ignore", invalid="ignore"):
        workers = np.where(rates > 0, np.ceil(most / rates * (1 - ROUNDING)), 0)
    workers = np.minimum(workers, arrays.room)
    fewest = np.where(possible, np.minimum(fewest, most), 0.0)
    all_made, all_workers, all_possible = [most], [workers], [possible]
    if space.min_workers > 1:
        all_made.append(most)
        all_workers.append(np.broadcast_to(arrays.room, most.shape).astype(np.float64))
        all_possible.append(possible)
    if arrays.most_workers > space.max_workers:
        with np.errstate(divide="ignore", invalid="ignore"):
            needed = np.where(possible & (rates > 0), np.ceil(fewest / rates * (1 - ROUNDING)), 0)
            whole = np.where(rates > 0, np.floor(most / rates * (1 + ROUNDING)), 0)
        for some in (np.maximum(whole, needed), needed):
            some = np.minimum(np.nan_to_num(some), workers)
            all_made.append(np.minimum(most, some * rates))
            all_workers.append(some)
            all_possible.append(possible)
    idle = np.broadcast_to(arrays.ends[0] * at <= cards * (1 + ROUNDING), (*most.shape[:3], 1))
    none = np.zeros(idle.shape)
    return (
        np.concatenate([*all_made, none], axis=-1),
        np.concatenate([*[fewest] * len(all_made), none], axis=-1),
        np.concatenate([*all_workers, none], axis=-1),
        np.concatenate([*all_possible, idle], axis=-1),
    )


def _can_serve_largest(arrays: MachineArrays, steps_per_s: float) -> bool:
    """Whether some card can send the largest shard at that rate of all workers; asynchronous, optimistic reading.

    A machine with more than half of all bytes can, as its own workers need fewer of them.
    """
    largest = float(arrays.high.max()) if arrays.has_pieces else arrays.largest
    if not arrays.largest or 2 * largest > arrays.total:
        return True
    has_ps = arrays.fits[:, 1:].any(axis=1)
    cards = np.where(has_ps, arrays.cards[:, 0, 0], 0.0).max() * LINK_SHARE
    return bool(arrays.largest * steps_per_s <= cards * (1 + ROUNDING))


def _can_send_shards(arrays: MachineArrays, room: Ints, half: Floats, fewest: int) -> bool:
    """Whether machines can send all shards, the largest from one of them, to the workers elsewhere; synchronous.

    Args:
        arrays: the machines, in the optimistic reading.
        room: maximum workers, rows x ps x choices.
        half: maximum bytes that a machine of each row sends in a step.
        fewest: minimum workers of the job.
    """
    has_ps = arrays.fits[:, 1:].any(axis=1)
    near = np.where(arrays.fits[:, 1:, None], room[:, 1:], 0).max(axis=(1, 2), initial=0)
    far = np.maximum(0, fewest - near)
    with np.errstate(divide="ignore"):
        most = np.where(has_ps, np.where(far > 0, half / far, np.inf), 0.0) * (1 + ROUNDING)
    return bool((most >= arrays.largest).any() and arrays.counts @ np.minimum(most, arrays.total) >= arrays.total)
