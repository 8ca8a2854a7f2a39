"""Whether a job changes its size, and to which (Optimus, EuroSys 2018, section 4.2; its costs: section 5.4).

A change is worth while if the time it saves exceeds what it costs: the job is saved, stopped and started again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass

WORTH = 0.05
"""Another size must be faster by this share: less is within the error of what is known of speeds."""
ALIKE = 0.02
"""Of sizes whose speeds differ by less, the one with fewer tasks is taken."""


@dataclass(frozen=True, order=True)
class Size:
    """Counts of a job's tasks."""

    workers: int
    ps: int

    def __str__(self) -> str:
        return f"{self.workers} worker{'s' if self.workers > 1 else ''} and {self.ps} ps"


@dataclass(frozen=True)
class Situation:
    """What a decision depends on.

    Attributes:
        now: the job's size.
        sizes: other sizes that there is room for, all between the user's bounds.
        samples_left: samples still to train; as many as were trained already where nobody knows.
        cost_s: what a change costs, in seconds.
        fair_workers: most workers of a fair share, where other frameworks want resources; None where none does.
        waiting: names of frameworks that hold nothing at all and wait.
    """

    now: Size
    sizes: Collection[Size]
    samples_left: float
    cost_s: float
    fair_workers: int | None = None
    waiting: tuple[str, ...] = ()


@dataclass(frozen=True)
class Decision:
    """A size to change to, and why, as a sentence for the user."""

    size: Size
    reason: str


def decide(situation: Situation, samples_per_s: Callable[[Size], float]) -> Decision | None:
    """The size to change to; None to stay.

    While others wait, a job that holds more than its fair share gives the rest up, whatever that costs it. Otherwise it
    grows, up to its share as long as others want anything, or shrinks, where that saves time.

    Args:
        situation: what is known.
        samples_per_s: predicted speed of a size.
    """
    now, fair = situation.now, situation.fair_workers
    if situation.waiting and fair is not None and fair < now.workers:
        return _shrink(situation, fair, samples_per_s)
    most = math.inf if fair is None else max(fair, now.workers)
    speeds = {size: samples_per_s(size) for size in situation.sizes if size.workers <= most}
    present = samples_per_s(now)
    worth = {size: speed for size, speed in speeds.items() if speed >= (1 + WORTH) * present}
    if not worth:
        return None
    best = max(worth.values())
    size = min((size for size in worth if worth[size] >= (1 - ALIKE) * best), key=lambda s: (s.workers + s.ps, s))
    saving_s = situation.samples_left * (1 / present - 1 / worth[size])
    if saving_s <= situation.cost_s:
        return None
    return Decision(
        size,
        f"{worth[size] / present:.2g} times as fast is predicted, which saves {saving_s:.0f} s of the time left; the "
        f"change costs about {situation.cost_s:.1f} s",
    )


def _shrink(situation: Situation, fair: int, samples_per_s: Callable[[Size], float]) -> Decision | None:
    now = situation.now
    fitting = [size for size in situation.sizes if size.workers < now.workers and size.ps <= now.ps]
    # Where nothing is as small as the fair share, the smallest comes nearest to it.
    small = [size for size in fitting if size.workers <= fair] or sorted(fitting)[:1]
    if not small:
        return None
    size = max(small, key=lambda s: (samples_per_s(s), -s.ps))
    names = ", ".join(situation.waiting)
    return Decision(size, f"{names} waits for resources, and this job holds more than its fair share")


def evenness(replicas: int | None, size: Size) -> float:
    """Share of their time in which a synchronous job's workers compute if a step is a fixed number of gradients.

    Where the workers do not divide it evenly, some compute one gradient more than others, who wait for them.

    Args:
        replicas: gradients of one step; None for a job without such steps.
        size: how many workers there are.
    """
    if replicas is None:
        return 1.0
    each = replicas / size.workers
    return each / math.ceil(each)
