"""Finds the new readings of a trial."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from framework.policies.trials.interface import Reading


class NewReadings:
    """Finds the readings of one trial that are new, although older ones may have been merged in between."""

    def __init__(self) -> None:
        self._count = 0
        self._last: Reading | None = None

    def new_indices(self, readings: Sequence[Reading]) -> range:
        """Returns the indices of readings since the last call."""
        last, first_new = self._last, self._count
        if last is not None and (first_new > len(readings) or readings[first_new - 1] is not last):
            first_new = bisect_right(readings, last.step, key=lambda reading: reading.step)
        self._count = len(readings)
        self._last = readings[-1] if readings else None
        return range(first_new, len(readings))
