"""The curves that `slaq` fits to a trial's newest losses."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

DECAY = 0.9
"""Weight of a reading relative to the next one."""
SHAPES = np.geomspace(0.05, 20.0, 40)
"""Grid of offsets and time constants, as shares of the time that the readings span."""


def predicted_fall(times: ArrayLike, losses: ArrayLike, ahead: float) -> float:
    """Returns the decrease of the best fitting curve beyond its last point.

    Args:
        times: from 0 to 1, ascending, shape `(n,)`.
        losses: shape `(n,)`.
        ahead: time beyond 1.

    Returns:
        The decrease, in units of `losses`; 0 if the losses are constant.
    """
    times, losses = np.asarray(times), np.asarray(losses)
    weights = DECAY ** np.arange(len(times) - 1, -1, -1)
    weights /= weights.sum()
    at = np.append(times, 1 + ahead)
    curves = np.concatenate([1 / (at + SHAPES[:, None]), np.exp(-at / SHAPES[:, None])])
    observed = curves[:, :-1] - (curves[:, :-1] @ weights)[:, None]
    centred = losses - losses @ weights
    slopes = (observed @ (weights * centred)) / (observed**2 @ weights)
    errors = (centred - slopes[:, None] * observed) ** 2 @ weights
    best = int(np.argmin(errors))
    return float(slopes[best] * (curves[best, -2] - curves[best, -1]))
