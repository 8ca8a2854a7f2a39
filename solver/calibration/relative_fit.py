"""Fits non-negative factors to measurements by least squares of relative errors.

A prediction is any function f(theta) >= 0 of the factors that doubles when all of them do: sums, maxima, means of rates
and norms of `theta_i x term_i`. For such f Euler's theorem gives f(theta) = gradient(theta) . theta, so each row is
linear around the current factors, and non-negative least squares are repeated until nothing changes (Gauss-Newton with
bounds). Rows are divided by their measured times, so a short step counts as much as a long one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from solver.calibration.nnls import Floats, nnls

Gradients = Callable[[Floats], Floats]
"""Factors -> derivatives in seconds of each row's prediction (rows x terms)."""

MIN_FACTOR = 1e-3
"""Minimum factor, so that speeds stay finite."""
MEASUREMENT_ERROR = 0.05
"""Relative error of a measured step; decides which factors the rows can distinguish from 1."""
MAX_STANDARD_ERROR = 0.5
"""A factor whose standard error exceeds this share of it, or of 1 if that is larger, stays at 1."""
MAX_ITERATIONS = 50
CONVERGED = 1e-9
RAISED_FACTOR = 30.0
"""Value to which a factor is raised, so that its term dominates where it can."""
MIN_IMPROVEMENT = 1e-6
"""Squared errors that differ by less are equal; the factors closer to the start are kept."""
STEP_SHARES = (1.0, 0.5, 0.25, 0.1)
"""Shares of a step that are tried until the error falls."""


@dataclass(frozen=True)
class RelativeFit:
    """The fitted factors.

    Attributes:
        factors: one for each term; 1 where the rows do not determine it.
        identified: for each term, whether they do.
        errors: relative error of each row, positive where the prediction is too long.
    """

    factors: Floats
    identified: tuple[bool, ...]
    errors: Floats

    @property
    def squared_error(self) -> float:
        return float(self.errors @ self.errors)


def predictions(gradients: Gradients, factors: Floats) -> Floats:
    """Seconds of each row (Euler's theorem)."""
    predicted: Floats = gradients(factors) @ factors
    return predicted


def fit_factors(gradients: Gradients, seconds: Floats, start: Floats) -> RelativeFit:
    """Searches for the factors with the least sum of squared relative errors.

    Maxima make the problem non-convex and hide terms. So at the end of a descent each factor in turn is raised until
    its term dominates, and the descent resumes from there; the result is not proven globally optimal.
    """
    best = descend(gradients, seconds, start)
    for _ in range(MAX_ITERATIONS):
        raised = np.where(np.eye(len(start), dtype=bool), RAISED_FACTOR, best.factors)
        other = min((descend(gradients, seconds, row) for row in raised), key=lambda found: found.squared_error)
        if other.squared_error > best.squared_error - MIN_IMPROVEMENT:
            break
        best = other
    return best


def descend(gradients: Gradients, seconds: Floats, start: Floats) -> RelativeFit:
    """Descends to the nearest local optimum; arguments as of `fit_factors`."""
    factors, errors = start, _errors(gradients, seconds, start)
    for _ in range(MAX_ITERATIONS):
        aim, _ = _solve_linear(gradients(factors) / seconds[:, None])
        before = float(errors @ errors)
        for share in STEP_SHARES:
            nearer = factors + share * (aim - factors)
            errors_there = _errors(gradients, seconds, nearer)
            if float(errors_there @ errors_there) < before * (1 - CONVERGED):
                break
        else:
            break
        factors, errors = nearer, errors_there
    # Factors without influence at the end of the descent are still between the start and 1.
    _, identified = _solve_linear(gradients(factors) / seconds[:, None])
    factors = np.where(identified, factors, 1.0)
    return RelativeFit(factors, tuple(identified.tolist()), _errors(gradients, seconds, factors))


def _errors(gradients: Gradients, seconds: Floats, factors: Floats) -> Floats:
    return predictions(gradients, factors) / seconds - 1


def _solve_linear(shares: Floats) -> tuple[Floats, NDArray[np.bool_]]:
    """Fits factors with which the terms' shares of the measured time add up to 1 in each row.

    While some factor's standard error is too large, the term with the smallest share among those is removed and keeps
    the table's value. So of terms whose sum alone is determined, the longest gets a factor.

    Returns:
        The factors, and which of them were not removed.
    """
    size = np.linalg.norm(shares, axis=0)
    identified = size > 0
    while True:
        factors = np.ones(shares.shape[1])
        fixed = shares[:, ~identified].sum(axis=1)
        least = MIN_FACTOR * shares[:, identified].sum(axis=1)
        factors[identified] = MIN_FACTOR + nnls(shares[:, identified], 1 - fixed - least)
        unclear = identified & (_standard_errors(shares, identified) > MAX_STANDARD_ERROR * np.maximum(factors, 1.0))
        if not unclear.any():
            return factors, identified
        identified[np.argmin(np.where(unclear, size, np.inf))] = False


def _standard_errors(shares: Floats, chosen: NDArray[np.bool_]) -> Floats:
    """Standard errors of the chosen factors by least squares: noise x root of the diagonal of (A'A)^-1; else 0."""
    columns = shares[:, chosen]
    values, axes = np.linalg.eigh(columns.T @ columns)
    # Directions that the rows do not determine get huge errors.
    least = np.finfo(float).eps * max(float(values.max(initial=0.0)), np.finfo(float).tiny)
    errors = np.zeros(shares.shape[1])
    errors[chosen] = MEASUREMENT_ERROR * np.sqrt((axes**2 / np.maximum(values, least)).sum(axis=1))
    return errors
