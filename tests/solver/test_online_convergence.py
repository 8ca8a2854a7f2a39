"""The end of a training, predicted from its losses; losses that do not fall as 1 / steps are not believed."""

from __future__ import annotations

import math

import numpy as np
import pytest

from benchmarks.convergence import DISTURBED, predictions, recorded_curves
from dike.exceptions import BadInputError
from solver.online import ConvergenceModel, LossCurve
from solver.online.loss_points import MAX_POINTS, NEIGHBOURS, LossPoints

TRUE = LossCurve(b0=0.01, b1=0.2, b2=0.3)
EPOCH_STEPS = 100


def _learned(losses: np.ndarray, every: int = 1) -> ConvergenceModel:
    model = ConvergenceModel(EPOCH_STEPS)
    for index, loss in enumerate(losses.tolist()):
        model.add(index * every, loss)
    return model


def _losses(count: int, noise: float = 0.0, every: int = 1) -> np.ndarray:
    random = np.random.default_rng(1)
    return TRUE.loss(np.arange(0.0, count * every, every)) * (1 + noise * random.standard_normal(count))


def test_the_end_is_where_the_loss_falls_by_less_than_the_threshold() -> None:
    flat = TRUE.flat_from(100, 0.01)
    assert 1 - TRUE.loss(flat + 100) / TRUE.loss(flat) == pytest.approx(0.01)
    assert 1 - TRUE.loss(flat + 90) / TRUE.loss(flat - 10) > 0.01
    # Without a floor the loss falls by b0 x stretch / (b0 (k + stretch) + b1).
    assert LossCurve(0.01, 0.0, 0.0).flat_from(100, 0.01) == pytest.approx(100 / 0.01 - 100)
    assert LossCurve(0.0, 1.0, 0.5).flat_from(100, 0.01) == 0


@pytest.mark.parametrize("noise", [0.0, 0.02, 0.1])
def test_losses_of_the_form_give_its_end(noise: float) -> None:
    end = TRUE.flat_from(EPOCH_STEPS, 0.01) + 3 * EPOCH_STEPS
    model = _learned(_losses(800, noise))
    left = model.steps_left()
    assert left.known
    assert left.reason == ""
    assert 799 + left.steps == pytest.approx(end, rel=0.01 + 3 * noise)
    assert left.error <= 0.2 * end
    curve = model.curve()
    assert curve is not None
    assert curve.loss(5000.0) == pytest.approx(TRUE.loss(5000.0), rel=0.05 + noise)


def test_a_training_past_its_end_has_no_steps_left() -> None:
    left = _learned(_losses(4000, 0.02)).steps_left()
    assert (left.steps, left.known) == (0.0, True)


def test_the_scale_of_losses_does_not_matter() -> None:
    losses = _losses(500, 0.02)
    once, scaled = _learned(losses).steps_left(), _learned(1e6 * losses).steps_left()
    assert scaled.steps == pytest.approx(once.steps)


@pytest.mark.parametrize("name", DISTURBED)
def test_losses_that_are_not_so_are_recognised(name: str) -> None:
    steps = np.arange(0.0, 20_000, 20)
    for seed in range(5):
        random = np.random.default_rng(seed)
        model = ConvergenceModel(200)
        losses = DISTURBED[name](steps / 20_000, random) * (1 + 0.02 * random.standard_normal(len(steps)))
        for step, loss in zip(steps[:800].tolist(), losses[:800].tolist(), strict=True):
            model.add(int(step), loss)
        left = model.steps_left()
        assert not left.known
        assert left.reason.endswith(".")
        assert left.steps == math.inf


@pytest.mark.slow
def test_recorded_trainings_are_mostly_predicted_or_left_alone() -> None:
    curves = [curve for curve in recorded_curves("algoperf_ogbg") if curve.end][::3]
    late = [predictions(curve)[-1] for curve in curves]
    known = [one.error for one in late if one.known and one.error is not None]
    assert len(known) >= len(late) / 4
    assert np.median(known) < 0.25


def test_too_few_losses_say_nothing() -> None:
    model = ConvergenceModel()
    assert (model.curve(), model.steps_left().known) == (None, False)
    for step in range(9 + NEIGHBOURS):
        model.add(step, 1 / (step + 1))
        assert not model.steps_left().known
    assert not _learned(np.linspace(0, -1, 50)).steps_left().known


def test_one_loss_that_is_not_a_number_is_passed_over_and_several_are_not() -> None:
    losses = _losses(500)
    losses[100] = np.nan
    model = _learned(losses)
    assert model.steps_left().known
    for step in range(500, 503):
        model.add(step, math.inf)
    assert not model.steps_left().known
    assert "finite" in model.steps_left().reason


def test_outliers_are_replaced_by_what_is_around_them() -> None:
    smooth, spiked = _losses(600), _losses(600)
    spiked[[50, 200, 201, 450]] = [9.0, 0.001, 0.002, 30.0]
    clean, other = LossPoints(), LossPoints()
    for step in range(600):
        clean.add(step, float(smooth[step]))
        other.add(step, float(spiked[step]))
    assert np.abs(other.arrays()[1] / clean.arrays()[1] - 1).max() < 0.05
    assert _learned(spiked).steps_left().steps == pytest.approx(_learned(smooth).steps_left().steps, rel=0.05)


@pytest.mark.slow
def test_a_million_steps_are_a_few_points() -> None:
    points = LossPoints()
    steps = 200_000
    for step in range(0, steps * 5, 5):
        points.add(step, 1.0 + 1 / (step + 1))
    kept, losses = points.arrays()
    assert MAX_POINTS / 2 <= len(kept) <= MAX_POINTS
    assert (np.diff(kept) > 0).all()
    assert losses[-1] == pytest.approx(1.0, abs=1e-3)


def test_steps_that_are_repeated_after_a_restart_count_where_they_belong() -> None:
    losses = _losses(700)
    model = ConvergenceModel(EPOCH_STEPS)
    for step in [*range(400), *range(300, 700)]:
        model.add(step, float(losses[step]))
    assert model.steps_left().steps == pytest.approx(_learned(losses).steps_left().steps, rel=0.02)


@pytest.mark.parametrize(
    "arguments", [{"epoch_steps": 0}, {"threshold": 0.0}, {"threshold": 1.0}, {"patience": 0}], ids=str
)
def test_arguments_that_make_no_sense_are_refused(arguments: dict[str, float]) -> None:
    with pytest.raises(BadInputError, match=r"\.$"):
        ConvergenceModel(**arguments)  # type: ignore[arg-type]
