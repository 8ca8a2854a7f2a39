"""A time limit that holds: the work is done in a child process, which is ended when its time is over.

HiGHS overran a limit of 60 s to more than 260 s on a large program and cannot be interrupted from inside the process.
The child sends every plan that is better than the last one, so the best so far is never lost.
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

START_S = 60.0
"""A child that has not come up by then never will."""
OWN_SHARE = 0.9
"""The planner's own limit, as a share of the whole: it ends by itself, with all its reasons, if the solver lets it."""

Observer = Callable[[PlanProgress], None]
Planner = Callable[[PlanRequest, Observer], Plan]


class TimeOverError(BadInputError):
    """The time limit was reached before there was any result."""


def plan_within(
    request: PlanRequest, limit_s: float, on_progress: Observer | None = None, planner: Planner = make_plan
) -> Plan:
    """Plans for at most so many seconds, whatever the solver does.

    Args:
        request: what to plan.
        limit_s: seconds of planning; starting the child comes on top.
        on_progress: told of every better plan.
        planner: what makes the plan; importable by name.

    Returns:
        The plan, or the best so far with its gap.

    Raises:
        TimeOverError: if there was no plan in time.
        BadInputError: if the request makes no sense.
        DikeError: if the child died.
    """
    best: Plan | None = None

    def remember(progress: PlanProgress) -> None:
        nonlocal best
        best = progress.plan
        if on_progress is not None:
            on_progress(progress)

    try:
        made: Plan = call_within(functools.partial(_plan, planner, request, OWN_SHARE * limit_s), limit_s, remember)
    except TimeOverError:
        if best is None:
            raise
        return best
    return made


def call_within(work: Callable[..., Any], limit_s: float, on_progress: Callable[[Any], None]) -> Any:
    """Calls `work` in a process of its own and ends that when the time is over.

    Args:
        work: importable by name; gets a function that passes progress of any kind on.
        limit_s: seconds for the work; starting the process comes on top.
        on_progress: gets the progress, in this process.

    Raises:
        TimeOverError: if the work was not done in time.
        DikeError: what the work raised, or that the process died.
    """
    if not 0 < limit_s < float("inf"):
        raise BadInputError(f"The time limit is {limit_s:g} s; it must be more than 0.")
    # A fork would copy the threads of the solver's library in a state of their own; a fresh process has none.
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    child = context.Process(target=_work, args=(theirs, work), daemon=True)
    child.start()
    theirs.close()
    try:
        return _watch(ours, limit_s, on_progress)
    finally:
        child.kill()
        child.join()
        ours.close()


def _watch(ours: Connection, limit_s: float, on_progress: Callable[[Any], None]) -> Any:
    deadline = time.monotonic() + START_S
    try:
        while ours.poll(max(0.0, deadline - time.monotonic())):
            kind, value = ours.recv()
            if kind == "ready":
                deadline = time.monotonic() + limit_s
            elif kind == "progress":
                on_progress(value)
            elif kind == "error":
                raise value
            else:
                return value
    except EOFError:
        raise DikeError("The planning process died; its last words are above.") from None
    raise TimeOverError(f"There was no result within {limit_s:g} s; give --time-limit more, or ask for less.")


def _work(theirs: Connection, work: Callable[..., Any]) -> None:
    theirs.send(("ready", None))
    try:
        theirs.send(("done", work(lambda progress: theirs.send(("progress", progress)))))
    except DikeError as error:
        theirs.send(("error", error))


def _plan(planner: Planner, request: PlanRequest, time_limit_s: float, on_progress: Observer) -> Plan:
    return planner(dataclasses.replace(request, time_limit_s=time_limit_s), on_progress)
