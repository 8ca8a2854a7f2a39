"""What every policy keeps to, whatever it decides by."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dike.exceptions import BadInputError
from framework.policies.trials.interface import Decision, Milestone, PolicySettings, SlotView, TrialView
from framework.policies.trials.registry import POLICIES, make_policy
from tests.policies.policy_stage import FakeSlot, FakeTrial, PolicyStage
from tests.properties import examples

SETTINGS = PolicySettings(quantum_s=10.0, trials_per_slot=3, milestones=(Milestone(0.5, 20.0), Milestone(0.9, 40.0)))
each_policy = pytest.mark.parametrize("name", sorted(POLICIES))
each_that_ranks = pytest.mark.parametrize("name", sorted(POLICIES.keys() - {"fifo", "rr", "pbt"}))
each_that_takes_turns = pytest.mark.parametrize("name", sorted(POLICIES.keys() - {"fifo", "asha"}))
"""With the others all wait for the end of the first trial, or of the best."""


def falling(start: float, floor: float, pace: float, noise: float = 0.0, seed: int = 0) -> Callable[[float], float]:
    """A loss that falls exponentially, `pace` a second, with noise that depends on the time alone."""

    def loss(train_s: float) -> float:
        wobble = random.Random(f"{seed}:{train_s:.6f}").uniform(-noise, noise)
        return floor + (start - floor) * math.exp(-pace * train_s) + wobble

    return loss


def breaking(loss: Callable[[float], float], at_s: float, value: float) -> Callable[[float], float]:
    """Becomes NaN or infinite."""
    return lambda train_s: loss(train_s) if train_s < at_s else value


@st.composite
def losses(draw: st.DrawFn) -> Callable[[float], float]:
    start, floor = draw(st.floats(-5, 10)), draw(st.floats(-5, 10))
    loss = falling(start, floor, draw(st.floats(0.0, 0.2)), draw(st.sampled_from([0.0, 0.3])), draw(st.integers(0, 9)))
    value = draw(st.sampled_from([None, None, math.nan, math.inf, 1e300]))
    return loss if value is None else breaking(loss, draw(st.floats(0, 100)), value)


def planned_trials() -> st.SearchStrategy[FakeTrial]:
    return st.builds(
        FakeTrial,
        loss=losses(),
        length_s=st.floats(0.5, 200),
        arrives_s=st.one_of(st.just(0.0), st.floats(0, 300)),
        report_s=st.sampled_from([0.5, 2.5, 2.5, 35.0, math.inf]),
        preemptible=st.sampled_from([True, True, True, False]),
        refused=st.frozensets(st.integers(1, 3), max_size=2),
        speeds=st.dictionaries(st.sampled_from(["k80", "v100"]), st.floats(1.0, 1000.0)),
        batch_size=st.sampled_from([16.0, 64.0]),
    )


def planned_slots() -> st.SearchStrategy[list[FakeSlot]]:
    """The first one stays, and no trial refuses it; others come and go. Some are of one kind, some are not."""
    kinds = st.sampled_from(["", "k80", "v100"])
    others = st.builds(
        lambda comes_s, stays_s, kind: FakeSlot(comes_s, comes_s + stays_s, kind),
        st.floats(0, 200),
        st.one_of(st.floats(1, 200), st.just(math.inf)),
        kinds,
    )
    first = st.builds(FakeSlot, comes_s=st.sampled_from([0.0, 40.0]), kind=kinds)
    return st.builds(lambda slot, more: [slot, *more], first, st.lists(others, max_size=3))


@each_policy
@given(
    trials=st.lists(planned_trials(), min_size=1, max_size=14),
    slots=planned_slots(),
    switch_s=st.sampled_from([0.0, 1.0, 15.0]),
    tells_left=st.booleans(),
)
@examples(40)
def test_in_any_world_the_contract_is_kept_and_every_trial_ends(
    name: str, trials: list[FakeTrial], slots: list[FakeSlot], switch_s: float, tells_left: bool
) -> None:
    worlds = [
        PolicyStage(make_policy(name, SETTINGS), trials, slots, switch_s, tells_left=tells_left).run(until_s=100_000.0)
        for _ in range(2)
    ]
    assert [number for number in range(len(trials)) if not worlds[0].has_ended(number)] == []
    assert worlds[0].starts == worlds[1].starts, "the same world twice"


@pytest.mark.slow
@each_that_ranks
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("at_s", [0.0, 12.0, 200.0])
def test_a_trial_whose_loss_is_no_number_never_wins(name: str, value: float, at_s: float) -> None:
    broken = FakeTrial(breaking(falling(5.0, 0.0, 0.5), at_s, value), length_s=300.0)
    sound = [FakeTrial(falling(4.0, 0.1, 0.005 * pace), length_s=500.0) for pace in (1, 2)]
    stage = PolicyStage(make_policy(name, SETTINGS), [broken, *sound], [FakeSlot()])
    stage.run(until_s=1000.0)
    assert stage.train_s(0) <= at_s + 2.5 * SETTINGS.quantum_s
    assert stage.train_s(1) + stage.train_s(2) > 500.0
    assert stage.run(until_s=5000.0).has_ended(0), "it runs when nothing else can"


@pytest.mark.slow
@each_that_takes_turns
def test_no_trial_starves_behind_one_that_does_not_end(name: str) -> None:
    best = FakeTrial(lambda train_s: -0.01 * train_s, length_s=math.inf)
    others = [FakeTrial(falling(3.0, 2.0, 0.01, 0.1, seed), length_s=1e6) for seed in (1, 2)]
    stage = PolicyStage(make_policy(name, SETTINGS), [best, *others], [FakeSlot()])
    stage.run(until_s=20_000.0)
    before = [stage.train_s(number) for number in (1, 2)]
    stage.run(until_s=40_000.0)
    assert all(stage.train_s(number) > trained for number, trained in zip((1, 2), before, strict=True))


@each_policy
def test_a_policy_takes_over_a_search_that_runs(name: str) -> None:
    """What it has not decided itself it learns from what it sees."""
    plans = [FakeTrial(falling(3.0, pace, 0.02 * pace), length_s=60.0) for pace in (1, 2, 3, 4, 5)]
    stage = PolicyStage(make_policy(name, SETTINGS), plans, [FakeSlot(), FakeSlot()])
    stage.run(until_s=75.0)
    stage.policy = make_policy(name, SETTINGS)
    stage.run(until_s=2000.0)
    assert all(map(stage.has_ended, range(5)))


@each_policy
def test_without_slots_or_trials_nothing_is_decided(name: str) -> None:
    policy = make_policy(name, SETTINGS)
    trial, slot = TrialView(0, 0.0), SlotView(0)
    assert [policy.decide(0.0, *seen) for seen in (([], []), ([], [slot]), ([trial], []))] == [Decision()] * 3
    assert policy.decide(0.0, [trial], [slot]).runs[0].trial == 0


@each_policy
def test_every_policy_says_its_name(name: str) -> None:
    assert make_policy(name, SETTINGS).name == name


def test_an_unknown_policy_is_bad_input() -> None:
    with pytest.raises(BadInputError, match=r"no policy 'hermez'; did you mean hermes.*hermes, hermes2, pbt, rr, slaq"):
        make_policy("hermez", SETTINGS)
