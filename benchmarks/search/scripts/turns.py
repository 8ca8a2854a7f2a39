"""Lets two trainings take turns on a machine, a stretch of steps each, so that both see it in the same state."""

from __future__ import annotations

import sys
import time


class Turns:
    """A training's side: it waits for a line on its standard input before each stretch, and says how long that took."""

    def __init__(self) -> None:
        self._begun_s: float | None = None

    def next(self) -> None:
        """A stretch is over, and another may begin; ends the script if nobody asks for another."""
        if self._begun_s is not None:
            print(time.perf_counter() - self._begun_s, flush=True)
        if not sys.stdin.readline():
            sys.exit(0)
        self._begun_s = time.perf_counter()
