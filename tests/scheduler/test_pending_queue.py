"""The order of service: weighted fair shares between users, order of arrival within a user's jobs."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dike.exceptions import BadInputError
from framework.scheduler.fair_share import FairQueue, QueueCandidate, dominant_share
from framework.scheduler.job import Need
from framework.scheduler.queue_options import AGING_S, Priority, parse_duration
from tests.properties import examples
from tests.scheduler.scheduler_stage import SchedulerStage

USERS = ("ada", "bob", "eve")
CANDIDATES = st.lists(
    st.tuples(st.sampled_from(USERS), st.sampled_from([Need.REPLACE_LOST, Need.START, Need.GROW])), max_size=20
)
HELD = st.dictionaries(
    st.sampled_from(USERS), st.fixed_dictionaries({"cpus": st.floats(0, 50), "mem": st.floats(0, 9)})
)
TOTAL = {"cpus": 50.0, "mem": 100.0}


def candidates(drawn: list[tuple[str, Need]]) -> list[QueueCandidate]:
    return [QueueCandidate(f"job-{number}", user, number, need) for number, (user, need) in enumerate(drawn)]


@given(drawn=CANDIDATES, held=HELD)
def test_the_order_is_a_permutation_by_need_then_share_then_arrival(
    drawn: list[tuple[str, Need]], held: dict[str, dict[str, float]]
) -> None:
    weights = {"ada": 2.0}
    queue = FairQueue(lambda user: weights.get(user, 1.0))
    given_ones = candidates(drawn)
    order = queue.order(given_ones, held, TOTAL)
    assert sorted(order, key=lambda one: one.number) == given_ones
    shares = {user: dominant_share(held.get(user, {}), TOTAL) / weights.get(user, 1.0) for user in USERS}
    for first, second in itertools.pairwise(order):
        assert (first.need, shares[first.user], first.number) <= (second.need, shares[second.user], second.number)


def test_the_scarcest_resource_decides() -> None:
    held = {"cpus": 10.0, "mem": 50.0, "gpus": 3.0}
    assert dominant_share(held, {"cpus": 100.0, "mem": 100.0, "gpus": 0.0}) == 0.5
    assert dominant_share(held, {}) == 0.0


@given(
    weights=st.fixed_dictionaries({user: st.sampled_from([1.0, 2.0, 3.0]) for user in USERS}),
    lasts=st.lists(st.integers(5, 15), min_size=3, max_size=3),
)
@examples(8)
def test_shares_converge_to_the_weights(weights: dict[str, float], lasts: list[int]) -> None:
    """Everybody always has more jobs than there is room for, of different durations."""
    agents = 12
    stage = SchedulerStage({f"agent-{number}": 1.0 for number in range(agents)}, weight=weights)
    for number in range(40):
        for user, lasts_s in zip(USERS, lasts, strict=True):
            stage.submit(f"{user}-{number}", user=user, lasts_s=float(lasts_s), key="same")
    stage.run(10.0)
    sums = dict.fromkeys(USERS, 0)
    rounds = 40
    for _ in range(rounds):
        stage.step()
        for task_id in stage.master.running:
            sums[task_id.partition("-")[0]] += 1
    stage.close()
    running = sum(sums.values())
    for user in USERS:
        # Where shares are no whole numbers of agents each of the others may have one more.
        short = (len(USERS) - 1) / agents
        assert sums[user] / running == pytest.approx(weights[user] / sum(weights.values()), abs=short)


def test_a_job_that_cannot_be_placed_does_not_block_the_others() -> None:
    stage = SchedulerStage({"agent-0": 2.0, "agent-1": 2.0})
    stage.submit("huge", 1, 8.0)
    stage.submit("small", 1, 1.0)
    stage.run(5.0)
    assert stage.started_s.keys() == {"small"}
    assert not stage.failed
    stage.close()


def test_what_a_job_has_lost_comes_before_what_others_want() -> None:
    stage = SchedulerStage({"agent-0": 1.0})
    stage.submit("holds", lasts_s=20.0)
    stage.run(3.0)
    stage.submit("new", user="bob")
    stage.submit("lost", user="ada").need = Need.REPLACE_LOST
    stage.run(60.0)
    assert stage.started_s["lost"] < stage.started_s["new"]
    stage.close()


def test_jobs_start_by_priority() -> None:
    stage = SchedulerStage({"agent-0": 1.0})
    stage.submit("runs", lasts_s=5.0)
    stage.run(2.0)
    for name, priority in (("low", Priority.LOW), ("normal", Priority.NORMAL), ("high", Priority.HIGH)):
        # A smaller share does not outweigh a higher priority.
        stage.submit(name, user="bob" if name == "low" else "ada", lasts_s=5.0, priority=priority)
    stage.run(40.0)
    assert list(stage.started_s) == ["runs", "high", "normal", "low"]
    stage.close()


@pytest.mark.parametrize(("waited_s", "order"), [(0.9, ["high", "low"]), (1.1, ["low", "high"])])
def test_a_job_of_low_priority_ages(waited_s: float, order: list[str]) -> None:
    stage = SchedulerStage({"agent-0": 1.0})
    stage.submit("runs", lasts_s=5.0)
    stage.run(2.0)
    stage.submit("low", priority=Priority.LOW, waited_s=2 * AGING_S * waited_s, lasts_s=5.0)
    stage.submit("high", priority=Priority.HIGH, lasts_s=5.0)
    stage.run(40.0)
    assert list(stage.started_s) == ["runs", *order]
    stage.close()


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90", 90.0),
        ("1.5", 1.5),
        ("90m", 5400.0),
        ("1h30m", 5400.0),
        ("2d", 172_800.0),
        ("0.5h", 1800.0),
        ("12:00:00", 43_200.0),
        ("1-12:00", 129_600.0),
        ("10:30", 37_800.0),
    ],
)
def test_a_duration_is_read_as_meant(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "5x", "h", "-5", "1:99", "1e3", "nan"])
def test_what_is_no_duration(text: str) -> None:
    with pytest.raises(BadInputError, match="is no duration; write seconds"):
        parse_duration(text)
