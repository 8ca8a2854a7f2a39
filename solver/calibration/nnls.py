"""Least squares with coefficients of at least 0 (Lawson and Hanson, 'Solving Least Squares Problems', 1974, ch. 23)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

TOLERANCE = 1e-10
"""Correlations of a column with the residual below this count as 0."""
MAX_ROUNDS_PER_COLUMN = 10
"""Iteration limit against cycling by rounding errors; the method itself is finite."""


def nnls(matrix: Floats, target: Floats) -> Floats:
    """Minimises |matrix @ x - target| for x >= 0.

    Columns enter the solution one at a time, the one with the steepest descent first; where the unconstrained solution
    of the chosen ones leaves x >= 0, the step is shortened and columns at 0 leave again.

    Args:
        matrix: rows x columns.
        target: one value for each row.

    Returns:
        One coefficient for each column; 0 for columns of zeros.
    """
    norms = np.linalg.norm(matrix, axis=0)
    scaled = matrix / np.where(norms > 0, norms, 1.0)
    least = TOLERANCE * float(np.linalg.norm(target))
    x = np.zeros(matrix.shape[1])
    chosen = np.zeros(matrix.shape[1], dtype=bool)
    for _ in range(MAX_ROUNDS_PER_COLUMN * matrix.shape[1]):
        gains = np.where(chosen, 0.0, scaled.T @ (target - scaled @ x))
        if not np.any(gains > least):
            break
        chosen[np.argmax(gains)] = True
        x = _step_within(scaled, target, x, chosen)
    return np.divide(x, norms, out=np.zeros_like(x), where=norms > 0)


def _step_within(matrix: Floats, target: Floats, x: Floats, chosen: NDArray[np.bool_]) -> Floats:
    """Moves to the least squares solution of the chosen columns; those that reach 0 leave `chosen`."""
    while True:
        aim = np.zeros_like(x)
        aim[chosen] = np.linalg.lstsq(matrix[:, chosen], target, rcond=None)[0]
        falling = chosen & (aim <= 0)
        if not falling.any():
            return aim
        way = np.divide(x, x - aim, out=np.zeros_like(x), where=falling & (x > 0))
        shortest = float(way[falling].min())
        x = x + shortest * (aim - x)
        chosen &= ~(falling & (way <= shortest))
        x[~chosen] = 0.0


def nnls_of_two(one: Floats, other: Floats, target: Floats) -> tuple[Floats, Floats]:
    """Minimises |x one + y other - target| for x, y >= 0, for many problems at once.

    With two columns there is a closed form: the unconstrained solution if it is non-negative, else the better of the
    columns alone.

    Args:
        one: problems x rows.
        other: the second column, likewise.
        target: the sum to reach, likewise.

    Returns:
        x and y of each problem.
    """
    a, b, c = ((first * second).sum(axis=-1) for first, second in ((one, one), (one, other), (other, other)))
    along_one, along_other = (one * target).sum(axis=-1), (other * target).sum(axis=-1)
    determinant = a * c - b * b
    apart = determinant > TOLERANCE * a * c
    scale = np.where(apart, determinant, 1.0)
    x, y = (c * along_one - b * along_other) / scale, (a * along_other - b * along_one) / scale
    inside = apart & (x >= 0) & (y >= 0)
    only_x, only_y = (
        np.maximum(np.divide(along, size, out=np.zeros_like(size), where=size > 0), 0.0)
        for along, size in ((along_one, a), (along_other, c))
    )
    # Reduction of the squared error by one column alone.
    first = only_x**2 * a >= only_y**2 * c
    return np.where(inside, x, np.where(first, only_x, 0.0)), np.where(inside, y, np.where(first, 0.0, only_y))
