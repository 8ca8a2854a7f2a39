"""Shows progress of planning after the first second."""

from __future__ import annotations

import threading
from types import TracebackType

from rich.console import Console

from solver.planner import PlanProgress

STATUS_DELAY_S = 1.0


class PlanningStatus:
    """A status line on standard error while the planner works; none for quick plans or without a terminal."""

    def __init__(self, console: Console, text: str) -> None:
        self._status = console.status(text)
        self._text = text
        self._timer = threading.Timer(STATUS_DELAY_S, self._status.start)
        self._timer.daemon = True

    def __enter__(self) -> PlanningStatus:
        self._timer.start()
        return self

    def __call__(self, progress: PlanProgress) -> None:
        self._status.update(f"{self._text}; options placed: {progress.placed}; best so far: {_worth(progress)}")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._timer.cancel()
        self._timer.join()
        self._status.stop()


def _worth(progress: PlanProgress) -> str:
    option = progress.plan.option
    return f"{option.workers} w, {option.ps} ps, {progress.plan.samples_per_s:,.0f} samples/s"
