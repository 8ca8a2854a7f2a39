"""A hard time limit: the work runs in a child process, which is killed at the deadline.

HiGHS overran a limit of 60 s to more than 260 s on a large program and cannot be interrupted from inside the process.
The child sends every improved plan, so the best so far is never lost.
"""

from __future__ import annotations

import dataclasses
import functools
import multiprocessing
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from dike.exceptions import BadInputError, DikeError
from solver.plan import Plan
from solver.planner import PlanProgress, make_plan
from solver.request import PlanRequest

START_TIMEOUT_S = 60.0
"""Maximum time for a child process to start."""
PLANNER_TIME_SHARE = 0.9
"""The planner's own limit, as a share of the whole: usually it ends by itself, with all its reasons."""

Observer = Callable[[PlanProgress], None]
Planner = Callable[[PlanRequest, Observer], Plan]


class TimeOverError(BadInputError):
    """The time limit was reached before there was any result."""


def plan_with_timeout(
    request: PlanRequest, limit_s: float, on_progress: Observer | None = None, planner: Planner = make_plan
) -> Plan:
    """Plans with a hard time limit.

    Args:
        request: the plan request.
        limit_s: seconds of planning; the start of the child is extra.
        on_progress: called with every better plan.
        planner: makes the plan; importable by name.

    Returns:
        The plan, or the best so far with its gap.

    Raises:
        TimeOverError: if there was no plan in time.
        BadInputError: if the request is invalid.
        DikeError: if the child died.
    """
    best: Plan | None = None

    def keep_best(progress: PlanProgress) -> None:
        nonlocal best
        best = progress.plan
        if on_progress is not None:
            on_progress(progress)

    try:
        made: Plan = call_with_timeout(
            functools.partial(_plan, planner, request, PLANNER_TIME_SHARE * limit_s), limit_s, keep_best
        )
    except TimeOverError:
        if best is None:
            raise
        return best
    return made


def call_with_timeout(work: Callable[..., Any], limit_s: float, on_progress: Callable[[Any], None]) -> Any:
    """Calls `work` in a process of its own, which is killed at the time limit.

    Args:
        work: importable by name; receives a function that passes on progress of any kind.
        limit_s: seconds for the work; the start of the process is extra.
        on_progress: receives the progress, in this process.

    Raises:
        TimeOverError: if the work was not done in time.
        DikeError: raised by the work, or if the process died.
    """
    if not 0 < limit_s < float("inf"):
        raise BadInputError(f"The time limit is {limit_s:g} s; it must be more than 0.")
    # A fork would copy the locks of the solver library's threads without the threads; a fresh process has none.
    context = multiprocessing.get_context("spawn")
    parent_end, child_end = context.Pipe()
    child = context.Process(target=_work, args=(child_end, work), daemon=True)
    child.start()
    child_end.close()
    try:
        return _watch(parent_end, limit_s, on_progress)
    finally:
        child.kill()
        child.join()
        parent_end.close()


def _watch(parent_end: Connection, limit_s: float, on_progress: Callable[[Any], None]) -> Any:
    deadline = time.monotonic() + START_TIMEOUT_S
    try:
        while parent_end.poll(max(0.0, deadline - time.monotonic())):
            kind, value = parent_end.recv()
            if kind == "ready":
                deadline = time.monotonic() + limit_s
            elif kind == "progress":
                on_progress(value)
            elif kind == "error":
                raise value
            else:
                return value
    except EOFError:
        raise DikeError("The planning process died; its last output is above.") from None
    raise TimeOverError(f"There was no result within {limit_s:g} s; raise --plan-timeout, or request less.")


def _work(child_end: Connection, work: Callable[..., Any]) -> None:
    child_end.send(("ready", None))
    try:
        child_end.send(("done", work(lambda progress: child_end.send(("progress", progress)))))
    except DikeError as error:
        child_end.send(("error", error))


def _plan(planner: Planner, request: PlanRequest, time_limit_s: float, on_progress: Observer) -> Plan:
    return planner(dataclasses.replace(request, time_limit_s=time_limit_s), on_progress)
