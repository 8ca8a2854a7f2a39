"""Waits for another process or thread, and reads its files while it writes."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import psutil

DEADLINE_S = 180.0
_SHORTEST_PAUSE_S = 0.005
_LONGEST_PAUSE_S = 0.1

Found = TypeVar("Found")


def _never() -> bool:
    return False


def wait_until(
    condition: Callable[[], Found | None],
    what: str,
    *,
    said: Callable[[], object] = str,
    lost: Callable[[], object] = _never,
    pause: Callable[[float], object] = time.sleep,
    deadline_s: float = DEADLINE_S,
) -> Found:
    """Looks until the answer is true, and returns it.

    Args:
        condition: looked at again and again, at longer and longer intervals.
        what: is waited for; for the failure's message.
        said: what is shown with it, such as a log; asked only when it fails.
        lost: whether there is nothing left to wait for, such as a process that has ended.
        pause: passes the time between two looks; gets the most it may take, in seconds.
        deadline_s: how long it may take, in seconds.

    Raises:
        AssertionError: if it did not come true in time, or if `lost`.
    """
    __tracebackhide__ = True
    end_s = time.monotonic() + deadline_s
    pause_s = _SHORTEST_PAUSE_S
    while True:
        # Asked before the look: what came true just before the end counts.
        is_lost, is_over = lost(), time.monotonic() > end_s
        if found := condition():
            return found
        if is_lost or is_over:
            why = "it cannot come true any more" if is_lost else f"not in {deadline_s:g} s"
            raise AssertionError(f"waited in vain for {what}: {why}\n{said()}".rstrip())
        pause(pause_s)
        pause_s = min(1.5 * pause_s, _LONGEST_PAUSE_S)


def whole_lines(diary: Path) -> list[list[str]]:
    """The words of each line of a diary, without the full stop that ends it.

    A process that is killed while it writes leaves half a line. It has no full stop, and the next writer begins
    with a line break.
    """
    text = diary.read_text() if diary.exists() else ""
    return [words[:-1] for words in map(str.split, text.splitlines()) if words[-1:] == ["."]]


def is_alive(process: psutil.Process | int) -> bool:
    """Whether a process, or the one of that id, runs; a zombie does not."""
    try:
        found = psutil.Process(process) if isinstance(process, int) else process
        return found.is_running() and found.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
