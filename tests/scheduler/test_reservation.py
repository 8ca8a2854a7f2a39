"""Agents that are reserved for the job that has waited longest: no job starves, and the others continue meanwhile."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dike.profile import VariableSpec
from framework.mesos.offers import AgentOffer
from framework.scheduler import offer_matcher
from framework.scheduler.job import Answer, JobEntry, Planning
from framework.scheduler.reservation import (
    FIRST_PREEMPTION_TURN_S,
    FIRST_TURN_S,
    PLACEMENT_INTERVAL_S,
    RESERVE_AFTER_S,
    USELESS_COOLDOWN_S,
    Contender,
    Reservations,
    StartLocation,
)
from framework.training.controller import TrainingJob
from framework.training.observer import JobObserver
from framework.training.planning import TrainingSizing
from tests.properties import examples
from tests.scheduler.scheduler_stage import FakeJob, FakePreemptibleJob, SchedulerStage
from tests.training.job_stage import profile, spec

FOUR = {f"agent-{number}": 4.0 for number in range(4)}


def contender(
    job_id: str,
    since_s: float,
    *agents: str,
    overtaken: bool = True,
    helped: bool = False,
    awaits_task_ends: bool = False,
) -> Contender:
    place = StartLocation(frozenset(agents), awaits_task_ends=awaits_task_ends)
    return Contender(job_id, since_s, overtaken, lambda _: helped, lambda: place)


class SlowToPlan(FakeJob):
    """Plans on what it has looked at for some rounds before it says what it wants."""

    rounds = 0

    def match_offers(self, agents: Sequence[AgentOffer]) -> Answer:
        self.rounds = (self.rounds + 1) % 4 if agents else 0
        return Planning() if self.rounds else super().match_offers(agents)


class Churn:
    """Small jobs that end, and more of them than there is room for."""

    def __init__(self, stage: SchedulerStage) -> None:
        self._stage = stage
        self._numbers = itertools.count()
        self.submit(8)
        stage.run(5.0)

    def submit(self, count: int) -> None:
        for _ in range(count):
            number = next(self._numbers)
            lasts_s = 15.0 + number % 7
            self._stage.submit(f"small-{number}", 1, 1.0, user=f"user-{number % 5}", lasts_s=lasts_s)

    def go_on(self, seconds: float, until: str = "") -> None:
        """Lets time pass, no longer than until a job of this name has started."""
        deadline_s = self._stage.master.now + seconds
        while until not in self._stage.started_s and self._stage.master.now < deadline_s:
            self.submit(max(0, 14 - len(self._stage.scheduler.jobs)))
            self._stage.step()

    def until_started(self, job_id: str, within_s: float) -> None:
        self.go_on(within_s, job_id)
        assert job_id in self._stage.started_s


def test_only_who_has_waited_long_gets_a_reservation_and_only_one_does() -> None:
    reservations = Reservations()
    first, second = contender("first", 0.0, "S1"), contender("second", 0.0, "S2")
    reservations.update(RESERVE_AFTER_S - 1, [first, second])
    assert reservations.current is None
    assert not reservations.update(RESERVE_AFTER_S, [first, second])
    assert reservations.current is not None
    assert reservations.current.job_id == "first"
    assert reservations.is_reserved_for_other("second", "S1")
    assert not reservations.is_reserved_for_other("first", "S1")
    assert not reservations.is_reserved_for_other("second", "S2")
    # A reservation stays with its job, even if another job is first now. After that job's start, the next one gets it.
    reservations.update(RESERVE_AFTER_S + 1, [second, first])
    assert reservations.current.job_id == "first"
    assert reservations.update(RESERVE_AFTER_S + 2, [second])
    assert reservations.current.job_id == "second"


@pytest.mark.parametrize(
    ("agents", "overtaken", "helped", "reserved"),
    [
        ((), True, True, False),
        (("S1",), False, False, False),
        (("S1",), True, False, True),
        (("S1",), False, True, True),
        (("S1", "S2"), False, False, True),
    ],
)
def test_a_reservation_is_given_where_it_can_help(
    agents: tuple[str, ...], overtaken: bool, helped: bool, reserved: bool
) -> None:
    reservations = Reservations()
    next_one = contender("next", 0.0, "S9")
    reservations.update(100.0, [contender("job", 0.0, *agents, overtaken=overtaken, helped=helped), next_one])
    assert (reservations.current is not None) is reserved
    reservations.update(
        100.0 + PLACEMENT_INTERVAL_S, [contender("job", 0.0, *agents, overtaken=overtaken, helped=helped), next_one]
    )
    assert reservations.current is not None
    assert reservations.current.job_id == ("job" if reserved else "next")


def test_offers_are_held_and_given_back_in_turns() -> None:
    reservations = Reservations(keep_s=30.0)
    reservations.update(100.0, [contender("job", 0.0, "S1")])
    kept = reservations.current
    assert kept is not None
    assert [kept.keeps_offers(now_s) for now_s in (100.0, 129.9, 130.0, 159.9, 160.0)] == [
        True,
        True,
        False,
        False,
        True,
    ]
    assert kept.phase_left_s(110.0) == pytest.approx(20.0)


def test_a_reservation_that_did_not_help_goes_to_another_job() -> None:
    reservations = Reservations()
    both = [contender("stuck", 0.0, "S1"), contender("other", 0.0, "S2")]
    reservations.update(100.0, both)
    reservations.mark_useless(100.0)
    reservations.update(101.0, both)
    assert reservations.current is not None
    assert reservations.current.job_id == "other"
    reservations.update(102.0, both[:1])
    assert reservations.current is None
    reservations.update(102.0 + USELESS_COOLDOWN_S, both[:1])
    assert reservations.current is not None


@pytest.mark.slow
def test_a_large_job_is_not_starved_by_small_ones_which_continue_elsewhere() -> None:
    stage = SchedulerStage(FOUR)
    numbers = itertools.count()
    for _ in range(40):
        stage.submit(f"small-{next(numbers)}", 1, 1.0, user=f"user-{next(numbers) % 5}", lasts_s=15.0)
    stage.run(5.0)
    large = stage.submit("large", 2, 4.0, user="late", lasts_s=5.0)
    began_s = stage.master.now
    elsewhere = 0
    while "large" not in stage.started_s and stage.master.now < began_s + 400:
        # Always more small jobs than there is room for.
        for _ in range(2):
            stage.submit(f"small-{next(numbers)}", 1, 1.0, user=f"user-{next(numbers) % 5}", lasts_s=15.0)
        before = len(stage.master.launches)
        stage.step()
        elsewhere += stage.scheduler.snapshot.reservation is not None and len(stage.master.launches) > before
    assert stage.started_s["large"] - began_s < RESERVE_AFTER_S + 4 * 15.0
    assert elsewhere > 3
    # Nothing is planned again and again while it waits.
    assert large.placings < 20
    stage.run(10.0)
    assert stage.scheduler.snapshot.reservation is None or stage.scheduler.snapshot.reservation.job_id != "large"
    stage.close()


@given(
    sizes=st.lists(st.tuples(st.integers(1, 3), st.sampled_from([0.5, 1.0, 2.0, 4.0])), min_size=6, max_size=14),
    lasts=st.integers(3, 20),
)
@examples(10)
def test_no_job_starves(sizes: list[tuple[int, float]], lasts: int) -> None:
    """Every job that fits the empty cluster starts, though small ones never stop to arrive."""
    stage = SchedulerStage({name: FOUR[name] for name in ("agent-0", "agent-1", "agent-2")})
    for number, (count, cpus) in enumerate(sizes):
        stage.submit(f"job-{number}", count, cpus, user=f"user-{number % 3}", lasts_s=float(lasts))
    late = itertools.count()
    for _ in range(round(len(sizes) * (RESERVE_AFTER_S + 3 * lasts) / 0.5)):
        if not set(stage.jobs) - set(stage.started_s) - {name for name in stage.jobs if name.startswith("late")}:
            break
        if len(stage.scheduler.jobs) < 30:
            stage.submit(f"late-{next(late)}", 1, 0.5, user=f"user-{next(late) % 3}", lasts_s=float(lasts))
        stage.step()
    assert {f"job-{number}" for number in range(len(sizes))} <= stage.started_s.keys()
    stage.close()


def test_a_training_job_that_small_jobs_overtake_gets_its_reservation_and_starts() -> None:
    """Its smallest worker takes 2.6 GiB of an agent's 4."""
    size = 1_120_000_000
    variables = (VariableSpec("w", (size // 4000, 1000), "float32", size),)
    large = dataclasses.replace(profile(), parameters=size // 4, parameter_bytes=size, variables=variables)
    stage = SchedulerStage({f"agent-{number}": 4.0 for number in range(3)})

    def make(handle: JobEntry) -> TrainingJob:
        job_spec = spec(job_id=handle.job_id, max_workers=1, profile=large)
        handle.sizing = TrainingSizing(job_spec)
        return TrainingJob(job_spec, JobObserver(), lambda: None, lambda: stage.master.now)

    numbers = itertools.count()
    for _ in range(12):
        stage.submit(f"small-{next(numbers)}", 1, 1.0, user=f"user-{next(numbers) % 4}", lasts_s=15.0)
    stage.run(5.0)
    job = stage.scheduler.admit("large", "late", 1_000_000, make)
    deadline_s = stage.master.now + RESERVE_AFTER_S + 5 * 15.0
    held_back = False
    while not job.has_tasks and stage.master.now < deadline_s:
        if len(stage.scheduler.jobs) < 20:
            stage.submit(f"small-{next(numbers)}", 1, 1.0, user=f"user-{next(numbers) % 4}", lasts_s=15.0)
        stage.step()
        kept = stage.scheduler.snapshot.reservation
        held_back = held_back or (kept is not None and kept.job_id == "large")
    assert held_back
    assert job.has_tasks
    assert not stage.failed
    stage.close()


def test_what_is_free_is_held_for_the_reservation_only_for_a_while() -> None:
    """Another framework holds one of the two agents that the job needs."""
    stage = SchedulerStage({"agent-0": 4.0, "agent-1": 4.0}, others={"agent-1": 0.5})
    stage.submit("pair", 2, 3.0)
    stage.run(2.0)
    assert "pair" in stage.started_s, "it fits beside the other framework"
    stage.close()

    stage = SchedulerStage({"agent-0": 4.0, "agent-1": 4.0})
    stage.submit("holds", 1, 2.0, lasts_s=1e6)
    stage.run(3.0)
    stage.submit("pair", 2, 4.0)
    stage.run(RESERVE_AFTER_S + 3)
    kept = stage.scheduler.snapshot.reservation
    assert kept is not None
    assert kept.agents == {"S0", "S1"}
    held = []
    for _ in range(240):
        stage.step()
        held.append(bool(stage.scheduler.pool.offers))
    assert 0.3 < sum(held) / len(held) < 0.7
    assert all(0 < seconds <= 30.0 for seconds in stage.master.refused_for_s)
    stage.close()


def test_a_search_leaves_the_agents_that_are_kept_for_a_job() -> None:
    stage = SchedulerStage({"agent-0": 4.0, "agent-1": 4.0})
    search = stage.submit("search", 2, 4.0, lasts_s=1e6, kind=FakePreemptibleJob)
    stage.run(3.0)
    stage.submit("waits", 1, 4.0, user="bob")
    stage.run(RESERVE_AFTER_S + 3)
    assert len(search.vacated) == 1
    freed = next(task.task_id for task in search.job_handle.tasks.values() if task.agent_id in search.vacated)
    stage.update(freed, "TASK_KILLED")
    stage.run(5.0)
    assert "waits" in stage.started_s
    stage.close()


def test_a_reservation_for_which_nothing_ends_is_tried_elsewhere_and_longer_each_time() -> None:
    reservations = Reservations()
    places = [frozenset({"S1"}), frozenset({"S2"})]
    current, lasted, now_s = None, [], 100.0
    while now_s < 100.0 + 10 * FIRST_TURN_S:
        place = StartLocation(places[len(lasted) % 2], awaits_task_ends=True)
        reservations.update(now_s, [Contender("job", 0.0, True, lambda _: False, lambda place=place: place)])
        if reservations.current is not None and (current is None or reservations.current.since_s != current.since_s):
            lasted += [now_s - current.since_s] if current is not None else []
            current = reservations.current
        now_s += 1.0
    assert lasted[:2] == pytest.approx([FIRST_TURN_S, 2 * FIRST_TURN_S], abs=2.0)


def test_a_job_that_does_not_make_way_as_asked_is_not_waited_for_for_ever() -> None:
    reservations = Reservations()
    waiting = [
        Contender(
            "helped", 0.0, True, lambda _: True, lambda: StartLocation(frozenset({"S1"}), {"deaf": frozenset({"t"})})
        ),
        contender("other", 0.0, "S2"),
    ]
    reservations.update(100.0, waiting)
    reservations.update(99.0 + FIRST_PREEMPTION_TURN_S, waiting)
    assert reservations.current is not None
    assert reservations.current.job_id == "helped"
    assert reservations.update(100.0 + FIRST_PREEMPTION_TURN_S, waiting)
    assert reservations.current is not None
    assert reservations.current.job_id == "other"


@pytest.mark.parametrize("stuck", [1, 4])
def test_jobs_that_can_never_start_do_not_keep_the_reservation_from_one_that_can(stuck: int) -> None:
    reservations = Reservations()
    waiting = [
        *(contender(f"stuck-{number}", 0.0, f"S{number}", awaits_task_ends=True) for number in range(stuck)),
        contender("able", 0.0, "S9", awaits_task_ends=True),
    ]
    longest_s, now_s = 0.0, 100.0
    # The last in the order starts once its agents have been kept for half an hour.
    while longest_s < 1800.0 and now_s < 5 * 86400.0:
        reservations.update(now_s, waiting)
        if reservations.current is not None and reservations.current.job_id == "able":
            longest_s = max(longest_s, now_s - reservations.current.since_s)
        now_s += 20.0
    assert longest_s >= 1800.0


@pytest.mark.parametrize(
    ("held", "cpus", "agents"),
    [
        # A whole agent: the one whose tasks come and go.
        ({"agent-0": 1.0}, 4.0, {"S1"}),
        # Beside what stays.
        ({"agent-0": 3.0, "agent-1": 1.0}, 3.0, {"S1"}),
    ],
)
def test_agents_are_kept_on_which_tasks_come_and_go(held: dict[str, float], cpus: float, agents: set[str]) -> None:
    stage = SchedulerStage({"agent-0": 4.0, "agent-1": 4.0})
    for agent, amount in held.items():
        stage.submit(f"week-{agent}", 1, amount, lasts_s=1e6, constraints=[f"hostname:IS:{agent}"])
    stage.run(3.0)
    churn = Churn(stage)
    stage.submit("large", 1, cpus, user="late")
    stage.run(1.0)
    churn.until_started("large", RESERVE_AFTER_S + 4 * 21.0)
    assert {task.agent_id for task in stage.jobs["large"].job_handle.tasks.values()} == agents
    stage.close()


def test_a_job_moves_on_from_a_task_that_lasts() -> None:
    """What has run longest ends soon for once, and what began last never does."""
    stage = SchedulerStage({"agent-0": 4.0, "agent-1": 4.0})
    stage.submit("ends", 1, 1.0, lasts_s=RESERVE_AFTER_S + FIRST_TURN_S, constraints=["hostname:IS:agent-1"])
    stage.run(3.0)
    stage.submit("endless", 1, 1.0, lasts_s=1e6, constraints=["hostname:IS:agent-0"])
    stage.run(3.0)
    churn = Churn(stage)
    stage.submit("large", 1, 4.0, user="late")
    churn.go_on(RESERVE_AFTER_S + 10)
    kept = stage.scheduler.snapshot.reservation
    assert kept is not None
    assert kept.agents == {"S0"}
    churn.until_started("large", 4 * FIRST_TURN_S)
    stage.close()


@pytest.mark.parametrize("kind", [FakeJob, SlowToPlan])
def test_a_job_whose_look_takes_longer_than_a_round_is_overtaken(
    monkeypatch: pytest.MonkeyPatch, kind: type[FakeJob]
) -> None:
    class Slow(kind):  # type: ignore[misc, valid-type]
        def match_offers(self, agents: Sequence[AgentOffer]) -> Answer:
            clock.now += 2 * offer_matcher.MATCHING_BUDGET_S
            return super().match_offers(agents)

    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(offer_matcher, "time", SimpleNamespace(monotonic=lambda: clock.now))
    stage = SchedulerStage({"agent-0": 4.0})
    churn = Churn(stage)
    stage.submit("large", 1, 4.0, user="late", kind=Slow)
    churn.until_started("large", RESERVE_AFTER_S + 5 * 21.0)
    stage.close()
