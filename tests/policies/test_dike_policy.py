"""Dike's own policy."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from framework.policies.trials.dike_policy import REPLACEMENT_MARGIN, DikePolicy, gittins_offset
from framework.policies.trials.interface import Decision, PolicySettings, Reading, SlotView, TrialView
from framework.policies.trials.progress import Progress
from tests.policies.policy_stage import FakeSlot, FakeTrial, PolicyStage, violations

SETTINGS = PolicySettings(quantum_s=10.0)


def trial(number: int, *losses: float, every_s: float = 10.0, refused: frozenset[int] = frozenset()) -> TrialView:
    """One that waits and has reported these losses."""
    readings = [Reading(every_s * (n + 1), n + 1, loss, loss, loss) for n, loss in enumerate(losses)]
    return TrialView(number, 0.0, readings, [0] if readings else [], refused=refused)


def running(view: TrialView, preemptible: bool = True) -> TrialView:
    return TrialView(view.id, 0.0, view.readings, view.slices, runnable=False, preemptible=preemptible)


def paused_in(view: TrialView, *slots: int) -> TrialView:
    """The view with a process that is paused in these slots."""
    return replace(view, paused_in=frozenset(slots))


def first_chosen(*trials: TrialView) -> int:
    return DikePolicy(SETTINGS).decide(0.0, trials, [SlotView(0)]).runs[0].trial


def after_a_quantum(trials: Sequence[TrialView], slots: Sequence[SlotView]) -> Decision:
    """What is decided when the quantum of all that run is over."""
    policy = DikePolicy(SETTINGS)
    wake_at_s = policy.decide(0.0, trials, slots).wake_at_s
    assert wake_at_s == SETTINGS.quantum_s
    decision = policy.decide(wake_at_s, trials, slots)
    assert not violations(decision, wake_at_s, trials, slots)
    return decision


@pytest.mark.parametrize("above", [0.0, 0.3, 4.0, 1e3])
def test_the_way_beyond_has_the_greatest_ratio_of_chance_and_time(above: float) -> None:
    beyond = gittins_offset(above)
    assert math.exp(beyond) == pytest.approx(1 + above + beyond)
    if above:
        ways = np.linspace(0, 20, 200_001)
        ratios = (1 - np.exp(-ways)) / (above + ways)
        assert beyond == pytest.approx(ways[np.argmax(ratios)], abs=1e-3)
        assert 1 / (1 + above + beyond) == pytest.approx(np.max(ratios))


def test_every_trial_gets_a_first_slice_before_any_gets_a_second() -> None:
    assert first_chosen(trial(0, 3.0, 0.1), trial(1), trial(2)) == 1


def test_of_two_equally_fast_trials_the_one_nearer_to_the_best_continues() -> None:
    leader = (5.0, 2.0, 1.0, 0.9)
    assert first_chosen(trial(0, 5.0, 4.0, 3.5, 3.0), trial(1, *leader)) == 1


def test_a_stagnating_best_trial_is_preempted_by_one_that_approaches_fast() -> None:
    stuck = trial(0, 5.0, 1.0, *[1.0] * 18)
    assert first_chosen(stuck, trial(1, 5.0, 3.0, 1.5)) == 1
    assert first_chosen(stuck, trial(1, 5.0, *[4.9] * 19)) == 0, "but not to one that stagnates at a higher loss"


def test_what_ended_trials_have_reached_still_counts() -> None:
    """Without the ended one trial 1 is close to the best, falls fast and comes first."""
    policy = DikePolicy(SETTINGS)
    slow_and_low = trial(1, 5.0, 4.0, 2.4, 2.3, 2.3, 2.2, 2.1, 2.0, every_s=10.0)
    young = trial(2, 5.0, 3.8)
    assert first_chosen(slow_and_low, young) == 1
    ended = trial(0, 5.0, 0.5, 0.01)
    policy.decide(0.0, [ended], [])
    assert policy.decide(1.0, [slow_and_low, young], [SlotView(0)]).runs[0].trial == 2


def test_stagnating_trials_share_by_their_age() -> None:
    assert first_chosen(trial(0, *[5.0] * 8), trial(1, *[5.0] * 3), trial(2, *[5.0] * 4)) == 1


def test_a_trial_that_starts_late_is_found() -> None:
    def late(train_s: float) -> float:
        return 5.0 if train_s < 300 else 0.5

    plans = [FakeTrial(lambda train_s: 2.0 + 3.0 * math.exp(-train_s / 50), 50_000.0) for _ in range(3)]
    stage = PolicyStage(DikePolicy(SETTINGS), [FakeTrial(late, 2000.0), *plans], [FakeSlot()])
    stage.run(until_s=20_000.0)
    assert stage.train_s(0) == 2000, "and then it is the one that runs, to its end"


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_trial_that_has_lost_its_way_comes_last_and_what_it_reached_counts_no_more(value: float) -> None:
    lost = trial(0, 5.0, 0.1, value)
    sound = trial(1, 5.0, 4.9)
    assert first_chosen(lost, sound) == 1
    worth = DikePolicy(SETTINGS).decide(0.0, [lost, sound], [SlotView(0)]).runs[0].score
    alone = DikePolicy(SETTINGS).decide(0.0, [sound], [SlotView(0)]).runs[0].score
    assert worth == alone
    assert worth is not None
    assert first_chosen(lost) == 0, "it runs if there is nothing else"
    assert first_chosen(trial(0, 5.0, math.nan, 0.1), trial(1, *[5.0] * 3)) == 0, "and is sound again when its loss is"


@pytest.mark.parametrize("scale", [1e-300, 1e-6, -1.0, 1e6, 1e300])
def test_the_scale_and_the_origin_of_the_losses_do_not_matter(scale: float) -> None:
    """For -1 the same losses lie below 0."""
    curves = [(5.0, 4.0, 3.5), (5.5, 2.0, 1.2), (4.5, 4.4, 4.3, 4.2)]
    moved = [tuple(loss - 7 if scale < 0 else loss * scale for loss in curve) for curve in curves]
    choices = [
        DikePolicy(SETTINGS).decide(0.0, [trial(n, *curve) for n, curve in enumerate(seen)], [SlotView(0)]).runs[0]
        for seen in (curves, moved)
    ]
    assert choices[0].trial == choices[1].trial == 1
    assert choices[0].score == pytest.approx(choices[1].score)


def test_losses_beyond_all_bounds_do_no_harm() -> None:
    huge = [trial(0, 1e308, 1e307), trial(1, -1e308, 1e308), trial(2, 5e-324, 0.0)]
    decision = DikePolicy(SETTINGS).decide(0.0, huge, [SlotView(0)])
    score = decision.runs[0].score
    assert score is None or math.isfinite(score)


def test_a_trial_is_replaced_only_by_one_that_is_worth_more_by_a_margin() -> None:
    held, rival = trial(0, 5.0, 3.0), trial(1, 5.0, 3.0 - 0.001)
    assert first_chosen(held, rival) == 1, "it is worth more"
    assert after_a_quantum([running(held), rival], [SlotView(0, trial=0)]).runs[0].trial == 0
    better = trial(1, 5.0, 1.0)
    scores = [DikePolicy(SETTINGS).decide(0.0, [held, better], [SlotView(n) for n in (0, 1)]).runs[n] for n in (0, 1)]
    worth = {choice.trial: choice.score or 0.0 for choice in scores}
    assert worth[1] > REPLACEMENT_MARGIN * worth[0]
    assert after_a_quantum([running(held), better], [SlotView(0, trial=0)]).runs[0].trial == 1


def test_within_its_quantum_a_trial_is_left_alone_and_one_that_cannot_be_suspended_always() -> None:
    slots = [SlotView(0, trial=0)]
    held, better = trial(0, 5.0, 5.0), trial(1, 5.0, 1.0)
    assert DikePolicy(SETTINGS).decide(0.0, [running(held), better], slots).runs == {}
    assert after_a_quantum([running(held, preemptible=False), better], slots).runs == {}


def test_the_rungs_name_the_trial_of_one_quantum_of_eight() -> None:
    """The trial trained farthest is chosen, unless it has diverged."""
    leader = trial(0, 5.0, 3.0, 2.0, 1.0)

    def chosen(farthest: TrialView) -> list[tuple[int, str]]:
        policy = DikePolicy(SETTINGS, rungs_share=0.125)
        decisions = (policy.decide(0.0, [leader, farthest], [SlotView(0)]) for _ in range(17))
        return [(choice.trial, choice.reason) for decision in decisions for choice in decision.runs.values()]

    named = chosen(trial(1, 5.0, *[4.0] * 20))
    assert {trial for trial, _ in named[:7] + named[8:15]} == {0}
    assert (named[7], named[15]) == ((1, "best of the suspended"), (1, "continues to its rung"))
    assert 1 not in {trial for trial, _ in chosen(trial(1, 5.0, *[4.0] * 20, math.nan))}


def test_the_worst_of_several_makes_place_and_refusals_are_kept() -> None:
    slots = [SlotView(number, trial=number) for number in range(3)]
    held = [running(trial(0, 5.0, 2.0)), running(trial(1, 5.0, 5.0)), running(trial(2, 5.0, 2.2))]
    decision = after_a_quantum([*held, trial(3, 5.0, 0.5)], slots)
    assert {slot: choice.trial for slot, choice in decision.runs.items()} == {0: 0, 1: 3, 2: 2}
    decision = after_a_quantum([*held, trial(3, 5.0, 0.5, refused=frozenset({1}))], slots)
    assert {slot: choice.trial for slot, choice in decision.runs.items()} == {0: 0, 1: 1, 2: 3}


def test_a_trial_moves_to_any_slot_that_is_free() -> None:
    slots = [SlotView(0, trial=0), SlotView(1)]
    trials = [running(trial(0, 5.0, 2.0)), trial(1, 5.0, 4.0), trial(2, 5.0, 3.0)]
    decision = DikePolicy(SETTINGS).decide(0.0, trials, slots)
    assert {slot: choice.trial for slot, choice in decision.runs.items()} == {1: 2}


def test_a_trial_paused_in_another_slot_must_be_worth_more_by_a_margin() -> None:
    best, other = trial(0, 5.0, 2.0, 1.0), trial(1, 5.0, 2.0, 1.0005)
    slots = [SlotView(0), SlotView(1)]
    runs = DikePolicy(SETTINGS).decide(0.0, [best, other], slots).runs
    worth = {choice.trial: choice.score or 0.0 for choice in runs.values()}
    assert worth[1] < worth[0] < REPLACEMENT_MARGIN * worth[1]
    assert first_chosen(paused_in(best, 1), paused_in(other, 0)) == 1
    assert first_chosen(paused_in(best, 1, 2), paused_in(other, 0, 2)) == 1
    assert first_chosen(paused_in(best, 1), other) == 1
    assert first_chosen(paused_in(best, 1), paused_in(other, 1)) == 0
    assert first_chosen(paused_in(best, 0, 1), paused_in(other, 0, 1)) == 0
    assert first_chosen(paused_in(best, 1), trial(1, 5.0, 4.0)) == 0
    decision = DikePolicy(SETTINGS).decide(0.0, [paused_in(best, 1), paused_in(other, 0)], slots)
    assert {slot: choice.trial for slot, choice in decision.runs.items()} == {0: 1, 1: 0}


def test_a_trial_paused_in_several_slots_gets_an_empty_one_first() -> None:
    """Then that of the worst trial."""
    best = paused_in(trial(3, 5.0, 0.5), 0, 1, 2)
    held = [running(trial(0, 5.0, 2.0)), running(trial(1, 5.0, 5.0))]
    for third, expected in ((SlotView(2), {0: 0, 1: 1, 2: 3}), (SlotView(2, 9, busy=True), {0: 0, 1: 3})):
        decision = after_a_quantum([*held, best], [SlotView(0, trial=0), SlotView(1, trial=1), third])
        assert {slot: choice.trial for slot, choice in decision.runs.items()} == expected


@pytest.mark.parametrize(("switch_s", "chosen"), [(0.0, 0), (1.0, 0), (SETTINGS.quantum_s, 1)])
def test_to_be_started_in_another_slot_counts_by_its_share_of_a_quantum(switch_s: float, chosen: int) -> None:
    settings = replace(SETTINGS, switch_s=switch_s)
    best, other = trial(0, 5.0, 2.0, 1.0), trial(1, 5.0, 2.0, 1.05)
    worths = DikePolicy(settings).decide(0.0, [best, other], [SlotView(0), SlotView(1)]).runs
    worth = {choice.trial: choice.score or 0.0 for choice in worths.values()}
    assert 1.1 * REPLACEMENT_MARGIN * worth[1] < worth[0] < 2 * REPLACEMENT_MARGIN * worth[1]
    decision = DikePolicy(settings).decide(0.0, [paused_in(best, 1), paused_in(other, 0)], [SlotView(0)])
    assert decision.runs[0].trial == chosen


def test_one_that_reports_nothing_takes_its_turns() -> None:
    silent = FakeTrial(lambda train_s: 1.0, 1e5, report_s=math.inf)
    for fall, share in ((0.0, 0.3), (1e-3, 0.002)):
        other = FakeTrial(lambda train_s, fall=fall: 5.0 - fall * train_s, 1e5)
        stage = PolicyStage(DikePolicy(SETTINGS), [silent, other], [FakeSlot()]).run(until_s=10_000.0)
        assert share * 10_000 < stage.train_s(0) < 0.6 * 10_000


def test_progress_is_that_of_the_lowest_loss() -> None:
    progress = Progress()
    readings = [Reading(10.0 * n, n, loss, loss, loss) for n, loss in enumerate([4.0, math.nan, 3.0, 5.0, 2.0], 1)]
    progress.update(TrialView(0, 0.0, readings[:2], [0]))
    assert progress.is_diverged
    progress.update(TrialView(0, 0.0, readings, [0]))
    assert (progress.first_loss, progress.loss, progress.train_s, progress.is_diverged) == (4.0, 2.0, 50.0, False)
    assert progress.recent_fall() == 4.0 - 2.0, "at 25 s the lowest was 4"


def test_a_decision_is_cheap() -> None:
    """The first decision reads a thousand readings of each of 32 trials; later ones take well below 10 ms."""
    curves = [[5.0 / (1 + n / (9.0 + number)) for n in range(1000)] for number in range(32)]
    trials = [trial(number, *curve) for number, curve in enumerate(curves)]
    policy = DikePolicy(SETTINGS)
    slots = [SlotView(0)]
    policy.decide(0.0, trials, slots)
    began_s = time.process_time()
    for call in range(100):
        policy.decide(float(call), trials, slots)
    assert time.process_time() - began_s < 1.0


ON_K80 = {"k80": 3.0, "v100": 1.0}
ON_V100 = {"k80": 1.0, "v100": 3.0}


def slots(*kinds: str) -> list[FakeSlot]:
    return [FakeSlot(kind=kind) for kind in kinds]


@pytest.mark.parametrize("kind", ["", "v100"])
def test_on_slots_of_one_kind_measured_speeds_count_for_nothing(kind: str) -> None:
    def plans(speeds: Sequence[float]) -> list[FakeTrial]:
        return [
            FakeTrial(lambda t, n=n: 5.0 / (1 + 0.01 * n * t), 40.0 + 13 * n, 7.0 * (n % 3), speeds={kind: speed})
            for n, speed in enumerate(speeds)
        ]

    worlds = [
        PolicyStage(DikePolicy(SETTINGS), plans(speeds), slots(kind, kind)) for speeds in (range(1, 10), [5.0] * 9)
    ]
    first, second = (stage.run(5000.0) for stage in worlds)
    assert first.starts == second.starts
    assert len(first.starts) > 9, "some are preempted"


def test_a_free_slot_takes_the_trial_with_the_greatest_worth_times_relative_speed() -> None:
    better = replace(trial(0, 5.0, 2.0, 1.0), speeds=ON_K80)
    worse = replace(trial(1, 5.0, 2.2, 1.1), speeds=ON_V100)
    for kind, chosen in (("v100", 1), ("k80", 0)):
        # The other kind is there, and taken.
        slot, other = SlotView(0, kind=kind), SlotView(1, 9, busy=True, kind="k80" if kind == "v100" else "v100")
        assert DikePolicy(SETTINGS).decide(0.0, [better, worse], [slot, other]).runs[0].trial == chosen
    assert first_chosen(better, worse) == 0


def test_running_trials_change_places_where_both_gain() -> None:
    plans = [
        FakeTrial(lambda t: 10.0 - 0.01 * t, 500.0, speeds=speeds, preemptible=preemptible)
        for speeds, preemptible in ((ON_K80, True), (ON_V100, True), (ON_K80, False))
    ]
    stage = PolicyStage(DikePolicy(SETTINGS), plans[:2], slots("v100", "k80")).run(10_000.0)
    assert all(map(stage.has_ended, range(2)))
    assert [start.slot for start in stage.starts if start.trial == 0] == [0, 1]
    assert [start.slot for start in stage.starts if start.trial == 1] == [1, 0]
    assert {start.reason for start in stage.starts[2:]} == {"faster slots for all"}
    # One that cannot be suspended stays, and so does the other.
    stays = PolicyStage(DikePolicy(SETTINGS), [plans[2], plans[1]], slots("v100", "k80")).run(10_000.0)
    assert [start.slot for start in stays.starts] == [0, 1]


def test_a_move_must_pay_what_it_costs() -> None:
    plans = [FakeTrial(lambda t: 10.0 - 0.01 * t, 500.0, speeds=speeds) for speeds in (ON_K80, ON_V100)]
    dear = replace(SETTINGS, move_s=20 * SETTINGS.quantum_s)
    assert len(PolicyStage(DikePolicy(dear), plans, slots("v100", "k80")).run(10_000.0).starts) == 2


def test_an_idle_slot_takes_a_trial_from_a_slower_one() -> None:
    plans = [FakeTrial(lambda t: 10.0 - 0.01 * t, length_s, speeds=ON_V100) for length_s in (100.0, 500.0)]
    stage = PolicyStage(DikePolicy(SETTINGS), plans, slots("v100", "k80")).run(10_000.0)
    assert stage.has_ended(1)
    assert [start.slot for start in stage.starts if start.trial == 1] == [1, 0]


def with_left(views: Sequence[TrialView], *left_s: float | None) -> list[TrialView]:
    return [replace(view, left_s=left) for view, left in zip(views, left_s, strict=True)]


def held(decision: Decision) -> dict[int, int]:
    return {slot: choice.trial for slot, choice in decision.runs.items()}


def test_a_trial_that_would_end_last_runs_in_time() -> None:
    """Two slots have three trials; the search takes half of what all have left, or what the longest has, at least."""
    best, good, bad = trial(0, 5.0, 1.0, 0.5), trial(1, 5.0, 1.5, 1.0), trial(2, 5.0, 4.9, 4.9)
    slots = [SlotView(0, 0), SlotView(1, 1)]

    def decided(*left_s: float | None, slots: Sequence[SlotView] = slots, bad: TrialView = bad) -> dict[int, int]:
        return held(after_a_quantum(with_left([running(best), running(good), bad], *left_s), slots))

    assert decided(100.0, 100.0, 100.0) == {0: 0, 1: 1}, "there is time"
    assert decided(55.0, 55.0, 100.0) == {0: 0, 1: 2}, "210 s in two slots leave none"
    assert decided(100.0, 10.0, 60.0) == {0: 0, 1: 1}, "it would not end last"
    assert decided(100.0, 1.0, 100.0) == {0: 0, 1: 1}, "a slot is free in a moment"
    assert decided(3600.0, 3600.0, 8.0) == {0: 0, 1: 1}, "it would be first to end"
    assert decided(55.0, None, 100.0) == {0: 0, 1: 1}, "the remaining time is unknown"
    assert decided(55.0, 55.0, 100.0, bad=replace(bad, refused=frozenset([1]))) == {0: 2, 1: 1}, "where it may"
    assert decided(55.0, 55.0, 100.0, bad=paused_in(bad, 0)) == {0: 0, 1: 2}, "not where the best one is"
    two_kinds = [SlotView(0, 0, kind="k80"), SlotView(1, 1, kind="v100")]
    assert decided(55.0, 55.0, 100.0, slots=two_kinds) == {0: 0, 1: 1}, "slots differ"
    assert decided(55.0, 55.0, 100.0, bad=replace(bad, speeds={"k80": 1.0})) == {0: 0, 1: 1}, "slots differed before"


def test_the_longest_trial_allows_the_others_to_end_as_late() -> None:
    views = [running(trial(number, 5.0, 1.0, 0.5 + number)) for number in range(3)] + [trial(3, 5.0, 4.9, 4.9)]
    slots = [SlotView(number, number) for number in range(3)]

    def decided(*left_s: float) -> set[int]:
        return set(held(after_a_quantum(with_left(views, *left_s), slots)).values())

    assert decided(1000.0, 10.0, 10.0, 600.0) == {0, 1, 2}
    assert decided(600.0, 10.0, 10.0, 600.0) == {0, 1, 3}
    lost = trial(4, 5.0, math.nan)
    assert set(held(after_a_quantum(with_left([*views, lost], 300.0, 10.0, 10.0, 295.0, 1e6), slots)).values()) == {
        0,
        1,
        3,
    }


def test_a_trial_that_is_nearly_done_does_not_wait_for_two_long_ones() -> None:
    good, first, second = trial(0, 5.0, 1.0, 0.5), trial(1, 5.0, 4.9, 4.9), trial(2, 5.0, 4.8, 4.8)
    slots = [SlotView(0, 1), SlotView(1, 2)]
    decision = after_a_quantum(with_left([good, running(first), running(second)], 8.0, 3600.0, 3600.0), slots)
    assert 0 in held(decision).values()
    alone = after_a_quantum(with_left([good, running(first)], 8.0, 3600.0), slots[:1])
    assert held(alone) == {0: 0}, "the order in one slot changes nothing of when it ends"


def test_two_that_would_end_last_do_not_change_places_again_and_again() -> None:
    views = [running(trial(0, 5.0, 4.9, 4.9)), running(trial(1, 5.0, 4.8, 4.8)), trial(2, 5.0, 1.0, 0.5)]
    slots = [SlotView(0, 0), SlotView(1, 1)]
    assert held(after_a_quantum(with_left(views, 15.0, 15.0, 15.0), slots)) == {0: 0, 1: 1}
    assert held(after_a_quantum(with_left(views, 80.0, 80.0, 80.0), slots)) == {0: 0, 1: 2}, (
        "there is time for the best"
    )


def test_a_search_ends_hardly_later_than_if_no_slot_were_ever_empty() -> None:
    def falls(floor: float, length_s: float) -> FakeTrial:
        return FakeTrial(lambda train_s: floor + 3 * math.exp(-train_s / 900), length_s)

    plans = [falls(0.1 * number, 3600.0 * (3 - number % 3)) for number in range(12)]
    least_s = sum(plan.length_s for plan in plans) / 5
    took_s, best_s = {}, {}
    for tells_left in (False, True):
        stage = PolicyStage(DikePolicy(SETTINGS), plans, [FakeSlot()] * 5, tells_left=tells_left)
        took_s[tells_left] = stage.run(math.inf).now_s
        best_s[tells_left] = stage.trials[0].ended_s
    assert took_s[False] > 1.1 * least_s
    assert took_s[True] < 1.05 * least_s
    assert best_s[True] == pytest.approx(best_s[False], rel=0.02), "the best one does not wait for it"
