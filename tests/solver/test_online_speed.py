"""Speeds learned while a job runs: the solver's prediction first, then what is observed."""

from __future__ import annotations

import numpy as np
import pytest

from dike.exceptions import BadInputError
from solver.calibration.nnls import Floats
from solver.online import SpeedModel, sample_sizes
from solver.online.speed import Speed, seconds_per_sample_terms

WORKERS, PS = 12, 6


def _synchronous(*factors: float) -> Speed:
    """Samples/s by Optimus' form, with its five factors, for a batch of 1."""

    def speed(workers: int, ps: int) -> float:
        t0, t1, t2, t3, t4 = factors
        return 1 / (t0 / workers + t1 + t2 * workers / ps + t3 * workers + t4 * ps)

    return speed


def _asynchronous(*factors: float) -> Speed:
    def speed(workers: int, ps: int) -> float:
        t0, t1, t2, t3 = factors
        return workers / (t0 + t1 * workers / ps + t2 * workers + t3 * ps)

    return speed


def _table(speed: Speed) -> Floats:
    return np.array([[speed(w, p) for w in range(1, WORKERS + 1)] for p in range(1, PS + 1)])


def _model(prior: Speed, *, synchronous: bool = True) -> SpeedModel:
    return SpeedModel(prior, synchronous=synchronous, max_workers=WORKERS, max_ps=PS)


def _uneven(workers: int, ps: int) -> float:
    """A prior that the form cannot follow: from 5 workers on a second machine slows everything down."""
    return _synchronous(1.0, 0.01, 0.02, 0.0, 0.001)(workers, ps) * (0.7 if workers > 4 else 1.0)


def test_without_observations_it_is_the_prior() -> None:
    assert _model(_uneven).table() == pytest.approx(_table(_uneven))
    assert _model(_uneven).samples_per_s(7, 2) == pytest.approx(_uneven(7, 2))


def test_one_observation_scales_the_prior() -> None:
    model = _model(_uneven)
    model.observe(5, 2, 0.4 * _uneven(5, 2))
    assert model.table() == pytest.approx(0.4 * _table(_uneven))


@pytest.mark.parametrize("synchronous", [True, False])
def test_many_observations_win_over_a_wrong_prior(synchronous: bool) -> None:
    if synchronous:
        prior, true = _synchronous(1, 0.01, 0.02, 0.001, 0.001), _synchronous(0.5, 0.05, 0.08, 0.0, 0.01)
    else:
        prior, true = _asynchronous(1, 0.1, 0.01, 0.01), _asynchronous(3, 0.6, 0.0, 0.05)
    model = _model(prior, synchronous=synchronous)
    errors = [float(np.abs(model.table() / _table(true) - 1).mean())]
    for workers, ps in sample_sizes(model, 8):
        model.observe(workers, ps, true(workers, ps))
        errors.append(float(np.abs(model.table() / _table(true) - 1).mean()))
    assert errors[-1] < 0.05 < 0.3 < errors[0]


def test_what_the_prior_knows_of_machines_stays() -> None:
    true = lambda workers, ps: _synchronous(2.0, 0.03, 0.03, 0.0, 0.0)(workers, ps) * (0.7 if workers > 4 else 1.0)  # noqa: E731
    model = _model(_uneven)
    for workers, ps in sample_sizes(model, 6):
        model.observe(workers, ps, true(workers, ps))
    step = model.samples_per_s(5, 3) / model.samples_per_s(4, 3)
    assert step == pytest.approx(true(5, 3) / true(4, 3), rel=0.05)


def test_the_median_of_the_newest_observations_counts() -> None:
    model = _model(_uneven)
    for speed in (2.0, 0.01, 2.0, 900.0, 2.0):
        model.observe(3, 1, speed)
    assert model.samples_per_s(3, 1) == pytest.approx(2.0)
    for _ in range(20):
        model.observe(3, 1, 4.0)
    assert model.samples_per_s(3, 1) == pytest.approx(4.0)


def test_where_the_prior_knows_nothing_the_form_predicts() -> None:
    whole = _synchronous(1.0, 0.01, 0.02, 0.001, 0.001)
    model = _model(lambda workers, ps: whole(workers, ps) if ps <= workers else 0.0)
    assert model.samples_per_s(2, 5) == pytest.approx(whole(2, 5), rel=1e-3)
    with pytest.raises(BadInputError, match="predicts no speed"):
        _model(lambda workers, ps: 0.0)


def test_the_forms_are_those_of_the_paper() -> None:
    workers, ps = np.array([4.0]), np.array([2.0])
    terms = seconds_per_sample_terms(workers, ps, synchronous=True)[0]
    assert 1 / float(terms @ [1, 2, 3, 4, 5]) == pytest.approx(_synchronous(1, 2, 3, 4, 5)(4, 2))
    terms = seconds_per_sample_terms(workers, ps, synchronous=False)[0]
    assert 1 / float(terms @ [1, 2, 3, 4]) == pytest.approx(_asynchronous(1, 2, 3, 4)(4, 2))


def test_sample_runs_are_few_distinct_and_far_apart() -> None:
    model = _model(_synchronous(1.0, 0.01, 0.02, 0.001, 0.001))
    sizes = sample_sizes(model, 5, min_workers=2)
    assert len(set(sizes)) == 5
    assert all(2 <= workers <= WORKERS and 1 <= ps <= PS for workers, ps in sizes)
    workers, ps = zip(*sizes, strict=True)
    assert max(workers) - min(workers) >= WORKERS / 2
    assert max(ps) - min(ps) >= PS / 2
    assert sorted(sample_sizes(SpeedModel(lambda w, p: w, synchronous=True, max_workers=2, max_ps=1))) == [
        (1, 1),
        (2, 1),
    ]


def test_sample_runs_teach_more_than_random_ones() -> None:
    random = np.random.default_rng(4)
    factors = np.array([1, 0.01, 0.02, 0.001, 0.001])
    prior = _synchronous(*factors)
    errors: dict[str, list[float]] = {"chosen": [], "random": []}
    for _ in range(30):
        true = _synchronous(*(factors * 3 ** random.uniform(-1, 1, 5)))
        cells = random.permutation(WORKERS * PS)[:2]
        of_chance = [(int(cell % WORKERS) + 1, int(cell // WORKERS) + 1) for cell in cells]
        for name, sizes in (("chosen", sample_sizes(_model(prior), 2)), ("random", of_chance)):
            model = _model(prior)
            for workers, ps in sizes:
                model.observe(workers, ps, true(workers, ps))
            errors[name].append(float(np.abs(model.table() / _table(true) - 1).mean()))
    assert np.mean(errors["chosen"]) < np.mean(errors["random"])


@pytest.mark.parametrize("counts", [(0, 1), (WORKERS + 1, 1), (1, 0), (1, PS + 1)])
def test_counts_beyond_the_model_are_refused(counts: tuple[int, int]) -> None:
    with pytest.raises(BadInputError, match="beyond"):
        _model(_uneven).samples_per_s(*counts)
    with pytest.raises(BadInputError, match="beyond"):
        _model(_uneven).observe(*counts, 1.0)


@pytest.mark.parametrize("speed", [0.0, -1.0, float("nan"), float("inf")])
def test_speeds_that_cannot_be_are_refused(speed: float) -> None:
    with pytest.raises(BadInputError, match="above 0"):
        _model(_uneven).observe(1, 1, speed)


def test_a_step_of_a_fixed_number_of_gradients_sends_as_much_whatever_the_number_of_workers() -> None:
    at = np.array([2.0, 8.0]), np.array([4.0, 4.0])
    usual = seconds_per_sample_terms(*at, synchronous=True)
    accumulating = seconds_per_sample_terms(*at, synchronous=True, accumulates=True)
    assert usual[:, 2].tolist() == [0.5, 2.0]
    assert accumulating[:, 2].tolist() == [0.25, 0.25]
    assert np.delete(accumulating, 2, axis=1).tolist() == np.delete(usual, 2, axis=1).tolist()

    def real(workers: int, ps: int) -> float:
        return 1 / (1.0 / workers + 0.1 / ps + 0.001 * workers)

    model = SpeedModel(
        lambda workers, ps: float(workers), synchronous=True, max_workers=WORKERS, max_ps=PS, accumulates=True
    )
    for workers, ps in sample_sizes(model, 8):
        model.observe(workers, ps, real(workers, ps))
    assert model.table() == pytest.approx(_table(real), rel=0.1)


def _gang(t0: float, t1: float, t2: float, t3: float) -> Speed:
    """Samples/s of a gang with a constant batch of 1."""
    return lambda workers, ps: 1 / (t0 / workers + t1 + t2 * (workers - 1) / workers + t3 * (workers - 1))


def _gang_model(prior: Speed) -> SpeedModel:
    return SpeedModel(prior, synchronous=False, max_workers=WORKERS, max_ps=0)


def test_a_gang_has_no_parameter_servers_and_is_the_prior_at_first() -> None:
    prior = _gang(1.0, 0.05, 0.1, 0.01)
    model = _gang_model(prior)
    assert model.table() == pytest.approx(np.array([[prior(workers, 0) for workers in range(1, WORKERS + 1)]]))
    assert model.samples_per_s(3, 0) == pytest.approx(prior(3, 0))
    with pytest.raises(BadInputError, match=r"3 workers and 1 parameter servers are beyond .* 1 to 12 and 0 to 0"):
        model.samples_per_s(3, 1)


def test_a_gang_learns_its_speed_from_a_few_sizes() -> None:
    real = _gang(3.0, 0.02, 0.4, 0.03)
    model = _gang_model(_gang(1.0, 0.05, 0.1, 0.01))
    sizes = sample_sizes(model, 5)
    assert {ps for _, ps in sizes} == {0}
    for workers, ps in sizes:
        model.observe(workers, ps, real(workers, ps))
    for workers in range(1, WORKERS + 1):
        assert model.samples_per_s(workers, 0) == pytest.approx(real(workers, 0), rel=0.05)
