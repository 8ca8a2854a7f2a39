"""Virtual time on GPUs that differ, and the limit there."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from benchmarks.different_gpus import Figures, goal
from benchmarks.simulation.assignment import AssignmentPolicy, best_assignment
from benchmarks.simulation.bins import Bin
from benchmarks.simulation.curves import Curve
from benchmarks.simulation.throughputs import Job
from benchmarks.simulation.world import Outcome, PolicyViolationError, World, WorldSettings
from framework.policies.trials.interface import Choice, Decision, PolicySettings, SlotView, TrialView
from framework.policies.trials.registry import POLICIES, make_policy

KINDS = ("slow", "fast")
TWICE = Job("twice", 8.0, {"slow": 50.0, "fast": 100.0}, 100.0)
TENFOLD = Job("tenfold", 2.0, {"slow": 1.0, "fast": 10.0}, 10.0)


def bin_of(lengths_s: Sequence[float], jobs: Sequence[Job], target_s: float = math.inf) -> Bin:
    """Losses from 1 to 0, ten steps a second of the curve; the first trial is good at `target_s`."""
    curves = [Curve(str(place), [0.0, length], [0, 10 * length], [1.0, 0.0]) for place, length in enumerate(lengths_s)]
    targets_s = [min(target_s, lengths_s[0]), *(math.inf for _ in lengths_s[1:])]
    return Bin(tuple(curves), tuple(targets_s), tuple(jobs))


class FakePolicy:
    """At each time of the script gives slots to trials, and empties others."""

    name = "scripted"

    def __init__(self, script: dict[float, tuple[dict[int, int], frozenset[int]]]) -> None:
        self._script = script
        self.seen: dict[float, tuple[list[TrialView], list[SlotView]]] = {}

    def decide(self, now_s: float, trials: Sequence[TrialView], slots: Sequence[SlotView]) -> Decision:
        copies = [
            replace(trial, readings=tuple(trial.readings), slices=tuple(trial.slices), speeds=dict(trial.speeds))
            for trial in trials
        ]
        self.seen[now_s] = (copies, list(slots))
        runs, suspends = self._script.get(now_s, ({}, frozenset()))
        later = [time_s for time_s in self._script if time_s > now_s]
        choices = {slot: Choice(trial, "") for slot, trial in runs.items()}
        return Decision(choices, min(later, default=None), suspends)


def test_time_runs_as_fast_as_the_type_lets_the_job() -> None:
    policy = FakePolicy({0.0: ({0: 0, 1: 1}, frozenset()), 9.0: ({}, frozenset())})
    outcome = World(
        bin_of([10.0, 10.0], [TWICE, TENFOLD], target_s=4.0), policy, WorldSettings(2, 1.0, 2.0, kinds=KINDS)
    ).run()
    assert outcome.completion_s == pytest.approx((1 + 20, 1 + 10))
    assert outcome.reached_s == pytest.approx([1 + 8])
    (slow, fast), slots = policy.seen[9.0]
    assert [slot.kind for slot in slots] == ["slow", "fast"]
    assert [reading.train_s for reading in slow.readings] == pytest.approx([2, 4, 6, 8])
    assert [reading.step for reading in slow.readings] == [10, 20, 30, 40]
    assert [reading.step for reading in fast.readings] == [20, 40, 60, 80]
    assert (slow.speeds, slow.batch_size) == ({"slow": 50.0}, 8.0)
    assert (fast.speeds, fast.batch_size) == ({"fast": 10.0}, 2.0)
    # Both trained in 10 of the first 11 seconds: one at 50 of a mean of 75, one at 10 of 5.5.
    assert outcome.speed == pytest.approx((10 * 50 / 75 + 10 * 10 / 5.5) / (2 * 11))


def test_a_trial_moves_to_a_slot_of_another_type() -> None:
    policy = FakePolicy(
        {0.0: ({0: 0}, frozenset()), 5.0: ({}, frozenset({0})), 6.0: ({1: 0}, frozenset()), 9.0: ({}, frozenset())}
    )
    world = WorldSettings(2, 1.0, 2.5, kinds=KINDS, move_s=1.5)
    outcome = World(bin_of([10.0], [TWICE]), policy, world).run()
    # 4 s on the slow one make 2 s of the curve; 1 s to leave it; 2.5 s to start, and 8 s to the end.
    assert outcome.completion_s == pytest.approx([6 + 2.5 + 8])
    assert outcome.preemptions == 1
    (trial,), slots = policy.seen[6.0]
    assert (slots[0].trial, slots[0].busy, trial.runnable) == (None, False, True)
    assert [reading.train_s for reading in trial.readings] == pytest.approx([2.5, 4.0])
    assert [reading.step for reading in trial.readings] == [12, 20]
    (trial,), slots = policy.seen[8.5]
    assert (slots[1].trial, slots[1].busy, trial.runnable) == (0, False, False)
    assert outcome.speed == pytest.approx((4 * 50 / 75 + 8 * 100 / 75) / 16.5)


@pytest.mark.parametrize(
    "script",
    [
        {0.0: ({}, frozenset({0}))},
        {0.0: ({0: 0}, frozenset({0}))},
        {0.0: ({0: 0}, frozenset()), 0.5: ({}, frozenset({0}))},
    ],
)
def test_only_slots_with_a_trial_can_be_vacated(script: dict[float, tuple[dict[int, int], frozenset[int]]]) -> None:
    with pytest.raises(PolicyViolationError, match="suspends the trial of slot 0"):
        World(bin_of([10.0], [TWICE]), FakePolicy(script), WorldSettings(2, 1.0, 2.0, kinds=KINDS)).run()


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_a_table_of_equal_speeds_changes_nothing(name: str) -> None:
    rng = np.random.default_rng(3)
    lengths_s = rng.uniform(10, 40, 9).tolist()
    same = Job("same", 4.0, {"slow": 20.0, "fast": 20.0}, 20.0)
    settings = PolicySettings(quantum_s=3.0, switch_s=0.5)
    alike = bin_of(lengths_s, [])
    reached = [
        World(trials, make_policy(name, settings), WorldSettings(2, 0.5, 0.75, kinds=kinds)).run().reached_s
        for trials, kinds in ((alike, ()), (replace(alike, jobs=(same,) * 9), ("slow", "slow")))
    ]
    assert reached[0] == pytest.approx(reached[1])


def mixed(seed: int, trials: int) -> Bin:
    """Trials of which half are as fast on both types, half ten times as fast on the fast one."""
    rng = np.random.default_rng(seed)
    even = Job("even", 8.0, {"slow": 50.0, "fast": 50.0}, 50.0)
    return bin_of(
        rng.uniform(300, 500, trials).tolist(), [(even, TENFOLD)[place] for place in rng.integers(2, size=trials)]
    )


def run(name: str, trials: Bin) -> Outcome:
    settings = PolicySettings(quantum_s=4.0, switch_s=0.1)
    policy = AssignmentPolicy(trials, settings) if name == "assignment" else make_policy(name, settings)
    return World(trials, policy, WorldSettings(4, 0.1, 1.0, kinds=("slow", "slow", "fast", "fast"))).run()


@pytest.mark.slow
def test_hermes2_comes_close_to_the_limit_and_hermes_does_not() -> None:
    limit, hermes, hermes2 = (
        [run(name, mixed(seed, 12)) for seed in range(4)] for name in ("assignment", "hermes", "hermes2")
    )
    speeds = [np.mean([outcome.speed for outcome in outcomes]) for outcomes in (limit, hermes, hermes2)]
    assert 0.95 * speeds[0] < speeds[2] <= speeds[0] * 1.001
    assert speeds[2] > 1.1 * speeds[1]
    assert np.mean([one.completion_s for one in hermes2]) < 0.9 * np.mean([one.completion_s for one in hermes])


def test_the_figures_say_where_the_goal_is_met() -> None:
    def figures(speed: float, completion_s: float) -> list[Figures]:
        return [Figures(1.0, completion_s, speed, 0), Figures(1.0, completion_s + 20, speed, 0)]

    limit = figures(1.0, 90)
    close = {"hermes2": figures(0.97, 92), "assignment": limit, "dike": figures(1.0, 90)}
    late = {"hermes2": figures(0.96, 110), "assignment": limit, "dike": figures(1.0, 122)}
    slow = {"hermes2": figures(0.94, 92), "assignment": limit, "dike": figures(1.0, 92)}
    for results, *expected in (
        ([close], "0.970 to 0.970 of its *speed*: met", "1.02 to 1.02 times as long: met", "0.98 to 0.98 of it: met"),
        (
            [close, late],
            "0.960 to 0.970 of its *speed*: met",
            "1.02 to 1.20 times as long: **not met**",
            "0.98 to 1.10 of it: **not met**",
        ),
        (
            [slow, close],
            "0.940 to 0.970 of its *speed*: **not met**",
            "1.02 to 1.02 times as long: met",
            "0.98 to 1.00 of it: met",
        ),
    ):
        text = " ".join(goal(results))
        assert "*lowest loss* takes 1.00 to 1.00 of the time of `hermes2`: met" in text
        assert [figure for figure in expected if figure not in text] == []


@pytest.mark.slow
@pytest.mark.parametrize("name", [*sorted(POLICIES), "assignment"])
def test_policies_are_deterministic_and_end_all_trials(name: str) -> None:
    trials = mixed(7, 9)
    outcome = run(name, trials)
    assert len(outcome.completion_s) == 9
    assert outcome == run(name, trials)


@pytest.mark.parametrize("seed", range(20))
def test_the_best_assignment_is_the_best(seed: int) -> None:
    rng = np.random.default_rng(seed)
    worths, places = rng.random((rng.integers(1, 6), 2)), rng.integers(0, 3, 2)
    chosen = best_assignment(worths, places.tolist())

    def worth(columns: Sequence[int | None]) -> float:
        fits = all(columns.count(column) <= places[column] for column in range(2))
        return sum(worths[row, column] for row, column in enumerate(columns) if column is not None) if fits else -1.0

    best = max(worth(columns) for columns in itertools.product((None, 0, 1), repeat=len(worths)))
    assert worth(tuple(chosen)) == pytest.approx(best)


def test_in_the_limit_trials_move_to_what_becomes_free() -> None:
    even = Job("even", 8.0, {"slow": 50.0, "fast": 50.0}, 50.0)
    trials = bin_of([400.0, 20.0], [TWICE, TENFOLD])
    outcome = World(trials, AssignmentPolicy(trials, PolicySettings()), WorldSettings(2, 1.0, 2.0, kinds=KINDS)).run()
    # The tenfold one is on the fast GPU until second 21; then the other one, 10 s of the curve done, follows.
    assert outcome.completion_s == pytest.approx((21 + 1 + 1 + 390, 21))
    stays = bin_of([400.0, 20.0], [even, TENFOLD])
    outcome = World(stays, AssignmentPolicy(stays, PolicySettings()), WorldSettings(2, 1.0, 2.0, kinds=KINDS)).run()
    assert outcome.completion_s == pytest.approx((401, 21))
