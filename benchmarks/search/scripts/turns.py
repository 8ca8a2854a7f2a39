"""Lets two training processes alternate on a machine, several steps each, so that both find it in the same state."""

from __future__ import annotations

import sys
import time


class Turns:
    """A process's side: it waits for a line on standard input before each turn, and then prints how long the turn took.

    It prints two numbers: seconds of wall time, and CPU seconds of all threads of the process.
    """

    def __init__(self) -> None:
        self._begun: tuple[float, float] | None = None

    def next(self) -> None:
        """Ends a turn and waits for the next; exits at the end of the input."""
        if self._begun is not None:
            clock_s, cpu_s = self._begun
            print(time.perf_counter() - clock_s, time.process_time() - cpu_s, flush=True)
        if not sys.stdin.readline():
            sys.exit(0)
        self._begun = (time.perf_counter(), time.process_time())
