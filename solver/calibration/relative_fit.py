"""Fits factors of at least 0 to measurements, so that predictions are near in relative terms.

A prediction is any function f(theta) >= 0 of the factors that doubles when all of them do: sums, maxima, means of rates
and norms of `theta_i x term_i` are. For such f Euler's theorem gives f(theta) = gradient(theta) . theta, so each row is
linear around the current factors, and what is left is non-negative least squares, again and again until nothing moves
(Gauss-Newton with bounds). Rows are divided by what was measured: a short step counts as much as a long one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from solver.calibration.nnls import Floats, nnls

Gradients = Callable[[Floats], Floats]
"""Factors -> derivatives in seconds of each row's prediction (rows x terms)."""

LEAST_FACTOR = 1e-3
"""Nothing is made more than a thousand times as fast: speeds stay finite."""
NOISE = 0.05
"""How far a measured step is off, relative; decides which factors the rows can tell from 1."""
DOUBT = 0.5
"""A factor whose standard error is more than this share of it, or of 1 if that is larger, stays at 1."""
MAX_ITERATIONS = 50
CONVERGED = 1e-9
FAR = 30.0
"""A factor is raised to this, so that its term decides where it can."""
BETTER = 1e-6
"""Squared errors that differ by less are equal; the factors nearer to where the search began are kept."""
STEPS = (1.0, 0.5, 0.25, 0.1)
"""Shares of a step that are tried, until one makes the error smaller."""


@dataclass(frozen=True)
class Fit:
    """The factors found.

    Attributes:
        factors: one for each term; 1 where the rows say nothing of it.
        identified: for each term, whether they do.
        errors: relative error of each row, above 0 where the prediction is too long.
    """

    factors: Floats
    identified: tuple[bool, ...]
    errors: Floats

    @property
    def squared_error(self) -> float:
        """What the fit makes as small as it can."""
        return float(self.errors @ self.errors)


def predictions(gradients: Gradients, factors: Floats) -> Floats:
    """Seconds of each row (Euler's theorem)."""
    predicted: Floats = gradients(factors) @ factors
    return predicted


def fit_factors(gradients: Gradients, seconds: Floats, start: Floats) -> Fit:
    """The factors with the least sum of squared relative errors that was found.

    Maxima make the problem non-convex and hide terms. So where a descent ends, each factor in turn is raised until its
    term decides, and the descent goes on from there; the result is not proven to be the best of all.

    Args:
        gradients: what predicts the rows.
        seconds: what was measured, above 0.
        start: one factor for each term, above 0.
    """
    best = descend(gradients, seconds, start)
    for _ in range(MAX_ITERATIONS):
        raised = np.where(np.eye(len(start), dtype=bool), FAR, best.factors)
        other = min((descend(gradients, seconds, row) for row in raised), key=lambda found: found.squared_error)
        if other.squared_error > best.squared_error - BETTER:
            break
        best = other
    return best


def descend(gradients: Gradients, seconds: Floats, start: Floats) -> Fit:
    """The factors that the nearest descent leads to; arguments as of `fit_factors`."""
    factors, errors = start, _errors(gradients, seconds, start)
    for _ in range(MAX_ITERATIONS):
        aim, _ = _solve_linear(gradients(factors) / seconds[:, None])
        before = float(errors @ errors)
        for share in STEPS:
            nearer = factors + share * (aim - factors)
            errors_there = _errors(gradients, seconds, nearer)
            if float(errors_there @ errors_there) < before * (1 - CONVERGED):
                break
        else:
            break
        factors, errors = nearer, errors_there
    # Factors that nothing depends on where the descent ended are still on their way from the start to 1.
    _, identified = _solve_linear(gradients(factors) / seconds[:, None])
    factors = np.where(identified, factors, 1.0)
    return Fit(factors, tuple(identified.tolist()), _errors(gradients, seconds, factors))


def _errors(gradients: Gradients, seconds: Floats, factors: Floats) -> Floats:
    return predictions(gradients, factors) / seconds - 1


def _solve_linear(shares: Floats) -> tuple[Floats, NDArray[np.bool_]]:
    """Factors that make the terms' shares of what was measured add up to 1 in each row, as nearly as can be.

    While some factor's standard error is too large, the term that takes least of the steps among those is taken out: it
    stays as the table has it. So of terms of which only the sum is known the longest gets a factor.

    Returns:
        The factors, and which of them were not taken out.
    """
    size = np.linalg.norm(shares, axis=0)
    identified = size > 0
    while True:
        factors = np.ones(shares.shape[1])
        fixed = shares[:, ~identified].sum(axis=1)
        least = LEAST_FACTOR * shares[:, identified].sum(axis=1)
        factors[identified] = LEAST_FACTOR + nnls(shares[:, identified], 1 - fixed - least)
        unclear = identified & (_standard_errors(shares, identified) > DOUBT * np.maximum(factors, 1.0))
        if not unclear.any():
            return factors, identified
        identified[np.argmin(np.where(unclear, size, np.inf))] = False


def _standard_errors(shares: Floats, chosen: NDArray[np.bool_]) -> Floats:
    """Standard errors of the chosen factors by least squares: noise x root of the diagonal of (A'A)^-1; else 0."""
    columns = shares[:, chosen]
    values, axes = np.linalg.eigh(columns.T @ columns)
    # Directions of which the rows say nothing, or almost, get errors without measure.
    least = np.finfo(float).eps * max(float(values.max(initial=0.0)), np.finfo(float).tiny)
    errors = np.zeros(shares.shape[1])
    errors[chosen] = NOISE * np.sqrt((axes**2 / np.maximum(values, least)).sum(axis=1))
    return errors
