"""Runs long work, such as planning, in threads that wake the loop when they finish."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Protocol, TypeVar

MAX_CONCURRENT = 2
"""Maximum number of concurrent pieces of work: all share one interpreter with the loop."""
THREAD_NAME = "background"

Result = TypeVar("Result")


class Background(Protocol):
    """Runs work that must not block the loop."""

    def start(self, work: Callable[[], Result], wait_s: float = 0.0) -> Future[Result]:
        """Starts work, which must not touch anything that the loop may change meanwhile.

        Args:
            work: the work.
            wait_s: maximum time to wait for the end of work that starts immediately.

        Returns:
            Future of the result; the caller polls it in each iteration of the loop, or cancels it.
        """


class InlineBackground:
    """Runs work in the caller's thread (a `Background`)."""

    def start(self, work: Callable[[], Result], wait_s: float = 0.0) -> Future[Result]:
        """See `Background.start`; the returned future is done."""
        future: Future[Result] = Future()
        _run_work(work, future)
        return future


class Threads:
    """Runs work in daemon threads (a `Background`), which the interpreter does not wait for at exit.

    A process that ends while it `is_busy` has to exit by `dike.process.end_process`.

    Args:
        on_done: called when work has finished, from any thread.
    """

    def __init__(self, on_done: Callable[[], None]) -> None:
        self._on_done = on_done
        self._permits = threading.Semaphore(MAX_CONCURRENT)

    def start(self, work: Callable[[], Result], wait_s: float = 0.0) -> Future[Result]:
        """See `Background.start`."""
        future: Future[Result] = Future()
        has_permit = self._permits.acquire(blocking=False)
        # A `ThreadPoolExecutor` would delay the exit of the process until its threads end.
        threading.Thread(target=self._run, args=(work, future, has_permit), name=THREAD_NAME, daemon=True).start()
        if has_permit:
            wait([future], wait_s)
        return future

    def _run(self, work: Callable[[], Result], future: Future[Result], has_permit: bool) -> None:
        if not has_permit:
            self._permits.acquire()
        try:
            _run_work(work, future)
        finally:
            self._permits.release()
        self._on_done()


def is_busy() -> bool:
    """Whether work is running or queued in threads.

    A solver that returns to an interpreter which is shutting down aborts the process.
    """
    return any(thread.name == THREAD_NAME for thread in threading.enumerate())


def _run_work(work: Callable[[], Result], future: Future[Result]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = work()
    except Exception as error:
        # Raised again by `Future.result`.
        future.set_exception(error)
    else:
        future.set_result(result)
