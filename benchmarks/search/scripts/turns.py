"""Lets two trainings take turns on a machine, a stretch of steps each, so that both see it in the same state."""

from __future__ import annotations

import sys
import time


class Turns:
    """A training's side: it waits for a line on its standard input before each stretch, and says how long that took.

    It says two numbers: seconds on the clock, and seconds of a CPU that all threads of the process have had.
    """

    def __init__(self) -> None:
        self._begun: tuple[float, float] | None = None

    def next(self) -> None:
        """A stretch is over, and another may begin; ends the script if nobody asks for another."""
        if self._begun is not None:
            clock_s, cpu_s = self._begun
            print(time.perf_counter() - clock_s, time.process_time() - cpu_s, flush=True)
        if not sys.stdin.readline():
            sys.exit(0)
        self._begun = (time.perf_counter(), time.process_time())
