"""A time limit holds even when the work does not look at a clock."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from dike.exceptions import BadInputError, DikeError, InfeasibleError
from solver import Plan, PlanRequest, deadline, make_plan
from solver.deadline import TimeOverError, plan_with_timeout
from solver.planner import PlanProgress
from solver.units import GIB, SIMPLE_TIE_SHARE
from tests.solver.solver_cases import k80, profile

pytestmark = pytest.mark.integration

REQUEST = PlanRequest(profile(), k80(2))
FOREVER_S = 600.0
LIMIT_S = 1.0


def stuck_after_one(request: PlanRequest, on_progress: Callable[[PlanProgress], None]) -> Plan:
    """A solver that ignores its limit, after it has reported a plan."""
    on_progress(PlanProgress(make_plan(request), placed=1))
    time.sleep(FOREVER_S)
    raise AssertionError("this process was not killed")


def stuck(request: PlanRequest, on_progress: Callable[[PlanProgress], None]) -> Plan:
    time.sleep(FOREVER_S)
    raise AssertionError("this process was not killed")


def dying(request: PlanRequest, on_progress: Callable[[PlanProgress], None]) -> Plan:
    os._exit(9)


def test_a_plan_in_time_is_the_plan() -> None:
    seen: list[PlanProgress] = []
    plan = plan_with_timeout(REQUEST, FOREVER_S, seen.append)
    assert plan.optimal
    assert plan.option == make_plan(REQUEST).option
    assert seen
    # The plan may be a little slower than the fastest that was reported, if it is simpler.
    assert plan.samples_per_s >= seen[-1].plan.samples_per_s * (1 - SIMPLE_TIE_SHARE)


def test_a_solver_that_ignores_its_limit_is_ended_and_its_best_plan_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    # The limit is over once the plan is here: how long it takes to make one must not count.
    clock = SimpleNamespace(now_s=0.0)
    monkeypatch.setattr(deadline, "time", SimpleNamespace(monotonic=lambda: clock.now_s))
    plan = plan_with_timeout(REQUEST, FOREVER_S, lambda _: setattr(clock, "now_s", FOREVER_S + 1), stuck_after_one)
    assert plan.option == make_plan(REQUEST).option


def test_no_plan_in_time_is_one_sentence() -> None:
    with pytest.raises(TimeOverError, match="no result within 1 s; raise --plan-timeout"):
        plan_with_timeout(REQUEST, LIMIT_S, planner=stuck)


def test_a_process_that_dies_is_reported() -> None:
    with pytest.raises(DikeError, match="process died"):
        plan_with_timeout(REQUEST, FOREVER_S, planner=dying)


def test_what_the_planner_refuses_is_refused_here() -> None:
    with pytest.raises(InfeasibleError, match="short"):
        plan_with_timeout(PlanRequest(profile(), k80(1, mem_bytes=GIB // 16)), FOREVER_S)
    with pytest.raises(BadInputError, match="more than 0"):
        plan_with_timeout(REQUEST, 0.0)
