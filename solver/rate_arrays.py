"""`solver.async_rates.total_rate` for many placements at once, as array arithmetic.

At a given X each machine's rate lies in an interval [low_i(X), high_i(X)] (`solver.async_rates`). All limits on X are
independent of the others but two: the machines' high ends must add up to X, and those of a rack with more than half of
the bytes to the rack's low end. Both differences are concave and piecewise linear in X and at least 0 at X = 0.
Tangents of such a function lie above it, so the roots of tangents converge to X* from above: Newton's method, exact
after one step per kink passed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from solver.async_rates import LINK_SHARE, ROUNDING, Shared
from solver.capacity import Ints

Floats = NDArray[np.float64]

CONVERGED = 1e-14
"""Relative step of Newton's method that counts as rounding."""


@dataclass(frozen=True)
class PlacementArrays:
    """Placements; the last axis of all arrays is the machines, arrays broadcast.

    Attributes:
        own_rates: steps/s of one machine's workers together if nothing but themselves limits them.
        stored: shard bytes on one machine.
        counts: number of such machines.
        racks: for each rack the indices of its machines; empty if racks do not matter.
    """

    own_rates: Floats
    stored: Floats
    cards: Floats
    shared: Shared
    counts: Floats | Ints = field(default_factory=lambda: np.ones(1))
    racks: Sequence[Ints] = ()


def total_rates(placements: PlacementArrays, least: float = 0.0) -> Floats:
    """X* of each placement: the maximum steps/s of all workers together.

    Args:
        placements: the placements.
        least: slower placements may get any rate between their own and this.
    """
    p, total = placements, placements.shared.total_bytes
    shape = np.broadcast_shapes(p.own_rates.shape, p.stored.shape, p.cards.shape, p.counts.shape)

    def rows(values: Floats | Ints) -> Floats:
        # Copying an array costs numpy as much as computing with it.
        wide = values if values.shape == shape else np.broadcast_to(values, shape)
        return wide.reshape(-1, shape[-1]).astype(np.float64, copy=False)

    own, stored, cards, counts = map(rows, (p.own_rates, p.stored, p.cards, p.counts))
    with np.errstate(divide="ignore"):
        own = np.minimum(own, p.shared.within / (2 * stored))
    rates = np.minimum(p.shared.max_steps_per_s, (own * counts).sum(axis=-1))
    ceilings = link_ceilings(own, stored, cards, total)
    rates = np.minimum(rates, np.where(counts > 0, ceilings, np.inf).min(axis=-1))
    level, slope = _high_ends(stored, cards, total)
    behind = [(stored[:, members] * counts[:, members]).sum(axis=-1) for members in p.racks]
    for here in behind:
        rates = np.minimum(rates, link_ceilings(np.inf, here, p.shared.uplink, total))
    active = np.flatnonzero(rates >= least)
    while len(active):
        before = rates[active]
        constant, steep = level[active], slope[active]
        limited = constant + steep * before[:, None] < own[active]
        constant = np.where(limited, constant, own[active]) * counts[active]
        steep = np.where(limited, steep, 0.0) * counts[active]
        if p.racks:
            after = _roots_with_racks(p, before, constant, steep, [here[active] for here in behind])
        else:
            after = constant.sum(axis=-1) / (1 - steep.sum(axis=-1))
        rates[active] = np.minimum(before, after)
        active = active[(after < before * (1 - CONVERGED)) & (after >= least)]
    return rates.reshape(shape[:-1])


def waits_s(stored: Floats, cards: Floats, slowest_s: Floats | float) -> Floats:
    """`solver.async_rates.wait_s` for arrays."""
    return np.where(stored / cards < slowest_s * (1 - ROUNDING), slowest_s, 0.0)


def link_ceilings(own_rates: Floats | float, stored: Floats, links: Floats | float, total_bytes: float) -> Floats:
    """X above which a link cannot keep up, whatever the rates of the workers behind it."""
    excess = 2 * stored - total_bytes
    with np.errstate(divide="ignore", invalid="ignore"):
        links = links * LINK_SHARE
        # With most of the bytes here, every step of a local worker saves traffic; at best they make all of the steps.
        busy = np.minimum((links + own_rates * excess) / stored, links / np.maximum(total_bytes - stored, 0.0))
        ceilings: Floats = np.where(excess > 0, busy, links / stored)
    return ceilings


def _high_ends(stored: Floats, links: Floats | float, total_bytes: float) -> tuple[Floats, Floats]:
    """The maximum that a link allows the workers behind it, as constant and slope of a line in X."""
    each = total_bytes - 2 * stored
    limits = each > 0
    each = np.where(limits, each, 1.0)
    return np.where(limits, links * LINK_SHARE / each, np.inf), np.where(limits, -stored / each, 0.0)


def _roots_with_racks(
    p: PlacementArrays, rates: Floats, constant: Floats, steep: Floats, behind: Sequence[Floats]
) -> Floats:
    """The first root of the tangents at `rates`.

    Args:
        p: the placements.
        rates: points of the tangents.
        constant: the machines' high ends are this ...
        steep: ... and this times X.
        behind: for each rack the shard bytes in it.
    """
    total, roots = p.shared.total_bytes, np.full(len(rates), np.inf)
    sums = np.zeros((2, len(rates)))
    for members, stored in zip(p.racks, behind, strict=True):
        here = np.stack([constant[:, members].sum(axis=-1), steep[:, members].sum(axis=-1)])
        capped = np.stack(_high_ends(stored, p.shared.uplink, total))
        sums += np.where(capped[0] + capped[1] * rates < here[0] + here[1] * rates, capped, here)
        excess = 2 * stored - total
        # The low end is (stored X - uplink) / excess.
        with np.errstate(divide="ignore", invalid="ignore"):
            low = (here[0] * excess + p.shared.uplink * LINK_SHARE) / (stored - here[1] * excess)
        roots = np.where(excess > 0, np.minimum(roots, low), roots)
    return np.minimum(roots, sums[0] / (1 - sums[1]))
