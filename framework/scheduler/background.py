"""Work that takes long, such as planning, beside the loop: a thread does it, and wakes the loop when it is done."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Protocol, TypeVar

MAX_CONCURRENT = 2
"""How much is done at the same time: all of it shares one interpreter with the loop."""
THREAD_NAME = "background"
"""What its threads are called."""

Result = TypeVar("Result")


class Background(Protocol):
    """Where work is done that must not hold up the loop."""

    def start(self, work: Callable[[], Result], wait_s: float = 0.0) -> Future[Result]:
        """Begins work, which must not touch what the loop may change meanwhile.

        Args:
            work: what is to be done.
            wait_s: so long its end is waited for, if it begins at once.

        Returns:
            Its result, or what it has raised; to be looked for in every round of the loop, or cancelled.
        """


class InlineBackground:
    """Does it before anything else (a `Background`)."""

    def start(self, work: Callable[[], Result], wait_s: float = 0.0) -> Future[Result]:
        """As `Background.start`; the result is there."""
        future: Future[Result] = Future()
        _do(work, future)
        return future


class Threads:
    """Does it in threads (a `Background`), whose end nobody waits for, not even the interpreter.

    A process that ends while it `is_busy` has to leave by `dike.process.end_process`.

    Args:
        on_done: called, by any thread, when something is done.
    """

    def __init__(self, on_done: Callable[[], None]) -> None:
        self._on_done = on_done
        self._turns = threading.Semaphore(MAX_CONCURRENT)

    def start(self, work: Callable[[], Result], wait_s: float = 0.0) -> Future[Result]:
        """As `Background.start`."""
        future: Future[Result] = Future()
        has_turn = self._turns.acquire(blocking=False)
        # The threads of a `ThreadPoolExecutor` would have to end before the process can.
        threading.Thread(target=self._run_in_turn, args=(work, future, has_turn), name=THREAD_NAME, daemon=True).start()
        if has_turn:
            wait([future], wait_s)
        return future

    def _run_in_turn(self, work: Callable[[], Result], future: Future[Result], has_turn: bool) -> None:
        if not has_turn:
            self._turns.acquire()
        try:
            _do(work, future)
        finally:
            self._turns.release()
        self._on_done()


def is_busy() -> bool:
    """Whether anything is being done in threads, or waits for its turn.

    A solver that comes back to an interpreter which is being taken down aborts the process.
    """
    return any(thread.name == THREAD_NAME for thread in threading.enumerate())


def _do(work: Callable[[], Result], future: Future[Result]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = work()
    except Exception as error:
        # Raised again where the result is taken.
        future.set_exception(error)
    else:
        future.set_result(result)
