"""Waiting for a zygote, which does its part only while it is polled."""

from __future__ import annotations

from collections.abc import Callable

from executor.process import wait_readable
from executor.zygote import Zygote
from tests.waiting import Found, wait_until


def poll_until(zygote: Zygote, condition: Callable[[], Found | None], what: str) -> Found:
    """Polls until the answer is true, and returns it; fails when the zygote has been given up."""

    def poll(pause_s: float) -> None:
        wait_readable(zygote.watched_fds, pause_s)
        zygote.poll()

    return wait_until(condition, what, said=lambda: zygote.failure, lost=lambda: zygote.failure, pause=poll)
