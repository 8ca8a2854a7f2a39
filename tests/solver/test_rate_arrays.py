"""Rates of asynchronous workers on arrays of placements are those of one placement at a time."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest

from solver.async_rates import Machine, Shared, total_rate
from solver.rate_arrays import PlacementArrays, total_rates

CASES, MACHINES = 1500, 5


def _placements(generator: random.Random, shared: Shared) -> list[list[Machine]]:
    """Placements of the same shards, with and without a machine that stores half of all bytes or more."""
    placements = []
    for _ in range(CASES // 25):
        sizes = [generator.choice([0, 0, 1, 5, 10, 30]) for _ in range(MACHINES - 1)]
        last = shared.total_bytes - sum(sizes)
        placements.append(
            [
                Machine(
                    own_rate=generator.choice([0.0, 1.0, 3.3, 10.0]) * generator.random(),
                    stored=stored,
                    card=[1.0, 5.0, 10.0, 30.0, 100.0][index],
                    rack=f"r{index % 3}" if math.isfinite(shared.uplink) else None,
                    count=generator.randint(1, 3) if stored == 0 else 1,
                )
                for index, stored in enumerate([*sizes, last])
            ]
        )
    return placements


def _arrays(placements: list[list[Machine]], shared: Shared) -> PlacementArrays:
    def column(name: str) -> np.ndarray:
        return np.array([[float(getattr(machine, name)) for machine in row] for row in placements])

    racks = [np.array([0, 3]), np.array([1, 4]), np.array([2])] if math.isfinite(shared.uplink) else []
    cards = np.array([machine.card for machine in placements[0]])
    return PlacementArrays(column("own_rate"), column("stored"), cards, shared, column("count"), racks)


@pytest.mark.parametrize("seed", range(25))
def test_many_placements_at_once_have_the_rates_of_each_alone(seed: int) -> None:
    generator = random.Random(seed)
    shared = Shared(
        total_bytes=generator.choice([150, 240]),
        within=generator.choice([math.inf, 500.0, 50.0]),
        uplink=generator.choice([math.inf, 20.0, 60.0]),
        max_steps_per_s=generator.choice([math.inf, 1.0]),
    )
    placements = _placements(generator, shared)
    expected = np.array([total_rate(machines, shared) for machines in placements])
    found = total_rates(_arrays(placements, shared))
    assert found == pytest.approx(expected, rel=1e-9)
    # Of those that are too slow to matter it says no more than that.
    least = float(np.median(expected))
    hasty = total_rates(_arrays(placements, shared), least)
    assert hasty[expected > least] == pytest.approx(expected[expected > least], rel=1e-9)
    assert (hasty >= expected * (1 - 1e-9)).all()
    assert (hasty[expected < least] <= least * (1 + 1e-9)).all()
