"""Good trials, and the bins of trials that policies are compared on."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

from benchmarks.simulation.curves import Curve
from benchmarks.simulation.throughputs import Job
from dike.exceptions import BadInputError

BEST_SHARE = 0.02
TARGET_SHARE = 0.9


@dataclass(frozen=True)
class Bin:
    """Trials that arrive one after the other.

    Attributes:
        curves: in order of arrival; the index is the trial's number.
        target_s: seconds of training until the target; infinity for trials that are not good.
        jobs: each trial's speed by GPU type; empty if slots are alike.
    """

    curves: tuple[Curve, ...]
    target_s: tuple[float, ...]
    jobs: tuple[Job, ...] = ()

    @property
    def good(self) -> int:
        """The number of trials that reach the target."""
        return sum(map(math.isfinite, self.target_s))


def default_target(curves: Sequence[Curve], share: float = TARGET_SHARE) -> float:
    """The loss at `share` of the way from the median first loss to the final loss that the best 2% reach.

    Raises:
        BadInputError: if the best do not end below the median first loss.
    """
    firsts = [curve.first_loss for curve in curves if math.isfinite(curve.first_loss)]
    finals = sorted(curve.final_loss for curve in curves if math.isfinite(curve.final_loss))
    if not firsts or not finals:
        raise BadInputError("No trial begins or none ends with a finite loss; give the loss to reach by --target.")
    first = median(firsts)
    best = finals[min(math.ceil(BEST_SHARE * len(curves)), len(finals)) - 1]
    if best >= first:
        raise BadInputError(
            f"The best trials end at {best:g}, and trials begin at {first:g}: nothing is learned; check --metric and "
            "--mode, or give the loss to reach by --target."
        )
    return first + share * (best - first)


def count_good(curves: Sequence[Curve], target: float) -> int:
    return sum(math.isfinite(curve.time_to(target)) for curve in curves)


def draw_bin(curves: Sequence[Curve], target: float, jobs: int, good: int, seed: int) -> Bin:
    """Draws trials of which exactly `good` reach the target, in random order; deterministic for a seed.

    Raises:
        BadInputError: if there are too few good or other trials.
    """
    times_s = [curve.time_to(target) for curve in curves]
    kinds: dict[bool, list[int]] = {True: [], False: []}
    for place, time_s in enumerate(times_s):
        kinds[math.isfinite(time_s)].append(place)
    for kind, wanted in ((True, good), (False, jobs - good)):
        if len(kinds[kind]) < wanted:
            raise BadInputError(
                f"{len(kinds[True])} of the {len(curves)} trials reach the target {target:g}, so there is no bin of "
                f"{jobs} with {good} good ones; change --jobs, --good, --target or --target-share."
            )
    rng = np.random.default_rng(seed)
    chosen = [
        *rng.choice(kinds[True], good, replace=False).tolist(),
        *rng.choice(kinds[False], jobs - good, replace=False).tolist(),
    ]
    rng.shuffle(chosen)
    return Bin(tuple(curves[place] for place in chosen), tuple(times_s[place] for place in chosen))
