"""Made-up curves."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest

from benchmarks.simulation.bins import count_good, default_target
from benchmarks.simulation.curves import Curve
from benchmarks.simulation.families import FAMILIES, draw_family
from dike.exceptions import BadInputError

each_family = pytest.mark.parametrize("name", FAMILIES)


@each_family
def test_a_seed_gives_the_same_curves_again_and_another_others(name: str) -> None:
    losses = [[curve.final_loss for curve in draw_family(name, seed, 20)] for seed in (3, 3, 4)]
    assert str(losses[0]) == str(losses[1])
    assert str(losses[0]) != str(losses[2])


@each_family
def test_bins_of_both_kinds_can_be_drawn(name: str) -> None:
    curves = draw_family(name)
    assert 12 <= count_good(curves, default_target(curves)) <= len(curves) - 12


def loss_at(curve: Curve, time_s: float) -> float:
    """The loss after `time_s` seconds of training."""
    return curve.reading(time_s - 1e-6 * curve.length_s, time_s).loss


def share_fallen(name: str, at: float) -> float:
    """Mean share of the total loss reduction that is reached at the share `at` of a curve; converging curves only."""
    curves = draw_family(name)
    shares = [
        (curve.first_loss - loss_at(curve, at * curve.length_s)) / (curve.first_loss - curve.final_loss)
        for curve in curves
        if curve.final_loss < 0.5 * curve.first_loss
    ]
    return sum(shares) / len(shares)


def sampled(curve: Curve) -> list[float]:
    """Its loss at 100 times."""
    return [loss_at(curve, number / 100 * curve.length_s) for number in range(1, 101)]


def test_a_family_has_the_feature_it_is_named_for() -> None:
    assert share_fallen("power-law", 0.1) > 0.7
    assert share_fallen("plateau", 0.1) < 0.25, "nothing happens at first"
    curves = draw_family("divergence")
    assert 5 < sum(math.isnan(curve.final_loss) for curve in curves) < 150
    lengths_s = [curve.length_s for curve in draw_family("step-lengths")]
    assert max(lengths_s) > 5 * min(lengths_s)
    rising = [curve for curve in draw_family("overfitting") if curve.final_loss > 1.1 * curve.lowest_loss]
    assert len(rising) > 40
    rises = [max(after - before for before, after in pairwise(sampled(one))) for one in draw_family("warm-restarts")]
    assert sum(rise > 0.2 for rise in rises) > 100, "losses jump up when the learning rate starts again"
    late = [curve.final_loss < 0.6 * loss_at(curve, 0.1 * curve.length_s) for curve in draw_family("late-fall")]
    assert 50 < sum(late) < 150
    spikes = [max(sampled(curve)[40:]) > 1.5 * curve.final_loss for curve in draw_family("heavy-noise")]
    assert sum(spikes) > 50
    waits = [loss_at(curve, 0.04 * curve.length_s) == curve.first_loss for curve in draw_family("slow-start")]
    assert sum(waits) > 100, "no loss before the first step is done"
    assert 0.3 < share_fallen("two-speeds", 0.1) < 0.9
    peaks = [max(sampled(curve)[10:]) > 1.15 * min(sampled(curve)[:60]) for curve in draw_family("double-descent")]
    assert sum(peaks) > 60, "the loss rises in between"
    steps = [max(after - before for before, after in pairwise(sampled(one))) for one in draw_family("instabilities")]
    assert sum(step > 0.3 for step in steps) > 80, "losses break out"
    steps = [max(after - before for before, after in pairwise(sampled(one))) for one in draw_family("stages")]
    assert sum(step > 0.2 for step in steps) > 100, "harder data"
    finals = [curve.final_loss for curve in draw_family("slow-and-close")]
    assert max(finals) < 2 * min(finals)
    early = sorted(draw_family("crossing"), key=lambda curve: loss_at(curve, 0.05 * curve.length_s))
    finals = [curve.final_loss for curve in early]
    assert sum(finals[:50]) > sum(finals[-50:]), "the early leaders end with higher losses"


def test_an_unknown_family_is_bad_input() -> None:
    with pytest.raises(BadInputError, match="did you mean plateau"):
        draw_family("plateu")
