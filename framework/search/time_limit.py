"""How long a search may take (`--timeout`)."""

from __future__ import annotations

import time
from collections.abc import Callable


class TimeLimit:
    """The time that a search may take.

    Args:
        limit_s: how long; None for as long as it takes.
        since_s: from when on, seconds since the epoch; None: from its first slot on.
        clock: seconds, monotonic.
        wall_clock: seconds since the epoch.

    Attributes:
        since_s: from when on it counts, seconds since the epoch; None before.
    """

    def __init__(
        self,
        limit_s: float | None,
        since_s: float | None,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self.since_s = since_s
        self._limit_s = limit_s
        self._clock = clock
        self._wall = wall_clock
        self._begun_s = clock() - (wall_clock() - since_s) if since_s is not None else None

    @property
    def runs(self) -> bool:
        """Whether it will be over by time alone."""
        return self._limit_s is not None and self._begun_s is not None

    def is_over(self, *, has_slots: bool) -> bool:
        """Whether the search, which has slots now or has none, has taken so long."""
        if self._begun_s is None and has_slots:
            self.since_s, self._begun_s = self._wall(), self._clock()
        if self._limit_s is None or self._begun_s is None:
            return False
        return self._clock() - self._begun_s >= self._limit_s
