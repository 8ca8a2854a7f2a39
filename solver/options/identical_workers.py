"""Rule 1: all workers are identical."""

from __future__ import annotations

import dataclasses

from solver.options.space import OptionSpace, Pruning


def identical_workers(space: OptionSpace) -> Pruning:
    """Keeps one shape for all workers; unequal ones would wait for each other or train on unequal shares."""
    ranges = [
        dataclasses.replace(entry, shapes=(shape,), mixed=False, ways=1)
        for entry in space.ranges
        for shape in entry.shapes
    ]
    return Pruning.of("identical_workers", space, ranges, "All workers are alike.")
