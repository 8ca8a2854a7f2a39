"""Non-negative least squares, against trying every set of columns that may be above 0."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from solver.calibration.nnls import Floats, nnls, nnls_of_two
from tests.properties import examples

# Squares of smaller numbers are zero, and no measured time is near.
entries = st.one_of(
    st.integers(-3, 3).map(float), st.floats(-10, 10).map(lambda one: one if abs(one) > 1e-100 else 0.0)
)
problems = st.tuples(st.integers(1, 7), st.integers(1, 5)).flatmap(
    lambda size: st.tuples(arrays(float, size, elements=entries), arrays(float, size[0], elements=entries))
)


def _least_error(matrix: Floats, target: Floats) -> float:
    """The best of the unconstrained solutions of all sets of columns that happen to be feasible."""
    best = float(np.linalg.norm(target))
    columns = range(matrix.shape[1])
    for chosen in itertools.chain.from_iterable(itertools.combinations(columns, size) for size in columns):
        part = matrix[:, chosen]
        x = np.linalg.lstsq(part, target, rcond=None)[0] if chosen else np.zeros(0)
        if (x >= 0).all():
            best = min(best, float(np.linalg.norm(part @ x - target)))
    x = np.linalg.lstsq(matrix, target, rcond=None)[0]
    return min(best, float(np.linalg.norm(matrix @ x - target))) if (x >= 0).all() else best


@examples(300)
@given(problems)
def test_no_set_of_columns_does_better(problem: tuple[Floats, Floats]) -> None:
    matrix, target = problem
    x = nnls(matrix, target)
    assert (x >= 0).all()
    error = float(np.linalg.norm(matrix @ x - target))
    assert error <= _least_error(matrix, target) + 1e-6 * max(1.0, float(np.linalg.norm(target)))


def test_columns_of_very_different_size() -> None:
    random = np.random.default_rng(5)
    matrix = random.random((30, 6)) * 10.0 ** np.arange(-9, 9, 3)
    expected = np.array([1.0, 0.0, 2.0, 0.0, 3.0, 4.0]) / 10.0 ** np.arange(-9, 9, 3)
    assert nnls(matrix, matrix @ expected) == pytest.approx(expected, rel=1e-6, abs=1e-12)


def test_columns_of_zeros_and_of_nothing_but_harm_get_nothing() -> None:
    matrix = np.array([[0.0, -1.0, 1.0], [0.0, -2.0, 1.0]])
    assert nnls(matrix, np.array([1.0, 1.0])).tolist() == pytest.approx([0.0, 0.0, 1.0])
    assert nnls(np.zeros((3, 0)), np.ones(3)).shape == (0,)


def test_many_problems_of_two_columns_at_once() -> None:
    random = np.random.default_rng(7)
    one, other, target = random.integers(-3, 4, (3, 200, 4)).astype(float)
    x, y = nnls_of_two(one, other, target)
    for index in range(len(x)):
        matrix = np.stack([one[index], other[index]], axis=1)
        error = float(np.linalg.norm(matrix @ [x[index], y[index]] - target[index]))
        assert min(x[index], y[index]) >= 0
        assert error <= float(np.linalg.norm(matrix @ nnls(matrix, target[index]) - target[index])) + 1e-9
