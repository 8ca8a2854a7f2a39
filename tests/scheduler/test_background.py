"""Work beside the loop: where its result is delivered, what is not started, and that its end need not be awaited."""

from __future__ import annotations

import queue
import subprocess
import sys
import threading
from typing import Any

import pytest

from framework.mesos import events
from framework.mesos.events import EventScheduler
from framework.mesos.master import LeadingMaster, Master
from framework.scheduler import standalone
from framework.scheduler.background import MAX_CONCURRENT, Background, InlineBackground, Threads
from framework.scheduler.mesos_access import MesosAccess
from framework.scheduler.standalone import StandaloneJob, run_standalone
from framework.training.controller import TrainingJob
from solver import Plan, PlanRequest, make_plan
from tests.mesos.fake_mesos import FakeMesos
from tests.training.job_stage import FakeObserver, spec
from tests.waiting import DEADLINE_S, wait_until


def nothing() -> None:
    """A wake-up call without effect."""


@pytest.mark.parametrize("background", [InlineBackground(), Threads(nothing)])
def test_results_and_errors_come_out_where_they_are_asked_for(background: Background) -> None:
    assert background.start(lambda: 6 * 7).result(DEADLINE_S) == 42
    failed = background.start(lambda: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        failed.result(DEADLINE_S)


def test_little_is_done_at_a_time_and_what_was_cancelled_before_it_began_not_at_all() -> None:
    done: queue.SimpleQueue[str] = queue.SimpleQueue()
    began: list[int] = []
    may = threading.Event()

    def work(number: int) -> int:
        began.append(number)
        assert may.wait(DEADLINE_S)
        return number

    threads = Threads(lambda: done.put("done"))
    first = [threads.start(lambda number=number: work(number)) for number in range(MAX_CONCURRENT)]  # type: ignore[misc]
    wait_until(lambda: len(began) == MAX_CONCURRENT, "the first ones")
    unwanted = threads.start(lambda: work(98))
    last = threads.start(lambda: work(99))
    assert unwanted.cancel()
    assert len(began) == MAX_CONCURRENT
    assert done.empty()
    may.set()
    assert last.result(DEADLINE_S) == 99
    assert [one.result(DEADLINE_S) for one in first] == list(range(MAX_CONCURRENT))
    for _ in range(MAX_CONCURRENT + 2):
        done.get(timeout=DEADLINE_S)
    assert sorted(began) == [*range(MAX_CONCURRENT), 99]


@pytest.mark.integration
def test_a_process_ends_without_waiting_for_what_is_done_in_the_background() -> None:
    code = (
        "import threading; from framework.scheduler.background import Threads; begun = threading.Event(); "
        "Threads(print).start(lambda: (begun.set(), threading.Event().wait())); begun.wait(); print('at its end')"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=DEADLINE_S
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "at its end\n", "")


PLANS_AT_ITS_END = """
import atexit, random, sys, threading
from framework import cli
from framework.scheduler.background import MAX_CONCURRENT, Threads, is_busy
from solver.milp import MilpBuilder, solve

def program(numbers):
    builder = MilpBuilder()
    for _ in range(25):
        builder.integer(1, numbers.randint(3, 60))
    for _ in range(8):
        builder.row({i: numbers.randint(3, 60) for i in range(25)}, None, 400)
    return builder.build()

def plan(begun):
    while True:
        solve(program(random.Random(1)))
        begun.set()

def command(**given):
    for begun in [threading.Event() for _ in range(MAX_CONCURRENT)]:
        Threads(print).start(lambda begun=begun: plan(begun))
        begun.wait()
    sys.exit(3)

assert not is_busy()
atexit.register(print, "closed")
cli.app = command
cli.main()
"""


@pytest.mark.integration
def test_a_command_ends_in_order_while_a_solver_works_in_the_background() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", PLANS_AT_ITS_END], capture_output=True, text=True, check=False, timeout=DEADLINE_S
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (3, "closed\n", "")


class FakeDriver(FakeMesos):
    """A connection to a master that makes one offer."""

    framework_id = "F"

    def __init__(self, scheduler: EventScheduler) -> None:
        super().__init__()
        self.scheduler = scheduler

    def start(self) -> None:
        self.scheduler.events.put(events.Subscribed("F", "127.0.0.1:5050"))
        self.scheduler.events.put(events.OffersArrived((self.offer(0, cpus=4),)))

    def stop(self, failover: bool) -> None:
        """There is nothing to stop."""

    def join(self) -> None:
        """Nor to wait for."""


@pytest.mark.slow
def test_the_loop_of_a_job_without_a_service_goes_round_while_the_job_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    drivers: list[FakeDriver] = []

    def connected(settings: Any, uri: str, scheduler: EventScheduler) -> FakeDriver:
        drivers.append(FakeDriver(scheduler))
        return drivers[0]

    def planned(request: PlanRequest) -> Plan:
        status = {"task_id": {"value": "stray"}, "agent_id": {"value": "S0"}, "state": "TASK_FINISHED"}
        drivers[0].scheduler.events.put(events.StatusUpdate(status))
        wait_until(lambda: status in drivers[0].acknowledged, "the loop's next round")
        return make_plan(request)

    monkeypatch.setattr("framework.training.planning.planned", planned)
    monkeypatch.setattr(standalone, "Driver", connected)
    job = StandaloneJob(
        "job",
        lambda handle: TrainingJob(spec(plan_only=True), FakeObserver(), lambda: None, background=handle.background),
        1.0,
        lambda _: None,
        lambda: None,
    )
    done = run_standalone(job, MesosAccess(), LeadingMaster(Master("127.0.0.1:5050", "127.0.0.1", 5050, "1.11.0")))
    assert done.result.succeeded
    assert done.result.plan is not None
    assert drivers[0].declined == ["O0"]
