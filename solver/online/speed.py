"""Speed of a job with w workers and p parameter servers, learned while it runs (Optimus, EuroSys 2018, section 3.2).

With synchronous training of a global batch of M samples a step takes `T(p, w) = t0 M / w + t1 + t2 w / p + t3 w + t4 p`
seconds; asynchronously the job makes `w / (t0 + t1 w / p + t2 w + t3 p)` steps/s; all t >= 0. Both give seconds per
sample that are linear in the t, so fitting them is non-negative least squares.

Optimus starts without knowledge and fits the model to sample runs. Here the prior is the solver's step-time model. It
models machines and network cards, which Optimus' model does not, but not their real speeds. So Optimus' model corrects
it: prediction = solver's prediction x model fitted to observations / model fitted to the solver's predictions.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from dike.exceptions import BadInputError
from solver.calibration.nnls import Floats, nnls

Speed = Callable[[int, int], float]
"""(workers, parameter servers) -> samples per second."""
Counts = tuple[int, int]
"""Workers and parameter servers."""

MAX_OBSERVATIONS = 16
"""Number of newest observations kept for each pair of counts; their median is used."""
PRIOR_ERROR = 0.3
MEASUREMENT_ERROR = 0.05
"""Relative errors of the prior and of an observation: their relative weights."""
INITIAL_INFORMATION = 1e-3
"""Initial information about the factors; small, so that each sample run determines another one."""
ANCHOR_COUNTS = 5
"""Numbers of workers, and of parameter servers, at which the prior is fitted."""


def gang_terms(workers: Floats) -> Floats:
    """The terms of a gang's step, which has a constant batch: its compute, a constant, its bytes and its hops.

    Returns:
        An additional last axis with an entry for each term (`solver.allreduce`).
    """
    return np.stack([1 / workers, np.ones_like(workers), (workers - 1) / workers, workers - 1], axis=-1)


def seconds_per_sample_terms(workers: Floats, ps: Floats, *, synchronous: bool, accumulates: bool = False) -> Floats:
    """The terms of Optimus' model, in seconds per sample up to their factors.

    Args:
        workers: numbers of workers.
        ps: numbers of parameter servers, of the same shape.
        synchronous: which model.
        accumulates: whether a step has a fixed number of gradients, for any number of workers.

    Returns:
        An additional last axis with an entry for each term.
    """
    ones = np.ones_like(workers)
    if synchronous:
        sent = ones if accumulates else workers
        return np.stack([1 / workers, ones, sent / ps, workers, ps], axis=-1)
    return np.stack([1 / workers, 1 / ps, ones, ps / workers], axis=-1)


class SpeedModel:
    """Learns one job's speed.

    Args:
        prior: the solver's prediction; 0 for counts without one, where Optimus' model alone predicts.
        synchronous: whether workers wait for each other and divide a constant global batch, each computing its part in
            one piece. If each takes batches of constant size, waiting or not, the asynchronous model applies.
        max_ps: maximum parameter servers; 0 for a gang, whose workers sum their gradients without any.
        accumulates: whether workers that wait for each other divide a constant number of gradients, each of which is
            sent alone (`SyncReplicasOptimizer`): the data sent to the parameter servers for a step then does not grow
            with the workers, and `w / p` is `1 / p`.

    Attributes:
        terms: seconds per sample of each term up to its factor: [ps - 1, workers - 1, term]; of a gang [0, workers - 1,
            term].

    Raises:
        BadInputError: if a number is invalid, or the prior is nowhere above 0.
    """

    def __init__(
        self, prior: Speed, *, synchronous: bool, max_workers: int, max_ps: int, accumulates: bool = False
    ) -> None:
        if max_workers < 1 or max_ps < 0:
            raise BadInputError(
                f"'max_workers' is {max_workers} and 'max_ps' is {max_ps}; they must be at least 1 and 0."
            )
        self._least_ps = min(1, max_ps)
        counts = range(self._least_ps, max_ps + 1)
        speeds = np.array([[prior(workers, ps) for workers in _one_to(max_workers)] for ps in counts], dtype=np.float64)
        known = np.isfinite(speeds) & (speeds > 0)
        if not known.any():
            raise BadInputError("The solver predicts no speed for any number of workers; use a larger cluster.")
        workers, ps = np.meshgrid(np.arange(1.0, max_workers + 1), np.array(counts, dtype=np.float64))
        if max_ps:
            self.terms = seconds_per_sample_terms(workers, ps, synchronous=synchronous, accumulates=accumulates)
        else:
            self.terms = gang_terms(workers)
        anchors = _anchors(known)
        self._anchors, anchor_s = self.terms[anchors], 1 / speeds[anchors]
        fitted = self.terms @ _fit(self._anchors, anchor_s, np.ones(len(anchor_s)))
        # Effects that the model cannot express, such as the start of a second machine, stay as in the prior.
        self._prior_over_model = np.divide(1 / fitted, speeds, out=np.ones_like(speeds), where=known)
        self._anchor_s = fitted[anchors]
        self._prior_s = fitted * self._prior_over_model
        self._observed: dict[Counts, deque[float]] = {}
        self._table: Floats | None = None

    def observe(self, workers: int, ps: int, samples_per_s: float) -> None:
        """Adds a measured speed.

        Raises:
            BadInputError: if the counts are out of range, or the speed is not above 0 and finite.
        """
        self._check(workers, ps)
        newest = self._observed.setdefault((workers, ps), deque(maxlen=MAX_OBSERVATIONS))
        newest.append(_check_speed(samples_per_s))
        self._table = None

    def samples_per_s(self, workers: int, ps: int) -> float:
        """Predicts the speed: the prior at first, scaled after one observation, fitted after more.

        Raises:
            BadInputError: if the counts are out of range.
        """
        self._check(workers, ps)
        return float(self.table()[ps - self._least_ps, workers - 1])

    def table(self) -> Floats:
        """Predicted speeds of all counts: [ps - 1, workers - 1]; of a gang [0, workers - 1]."""
        if self._table is None:
            self._table = 1 / self._predicted_s()
        return self._table

    def _predicted_s(self) -> Floats:
        if not self._observed:
            return self._prior_s
        at = tuple(np.array([(ps - self._least_ps, workers - 1) for workers, ps in self._observed]).T)
        seconds = np.array([1 / float(np.median(newest)) for newest in self._observed.values()])
        observed = seconds / self._prior_over_model[at]
        # The main error of the prior is a common factor: the hardware is faster or slower than assumed.
        scale = float(np.exp(np.median(np.log(seconds / self._prior_s[at]))))
        rows = np.concatenate([self.terms[at], self._anchors])
        target = np.concatenate([observed, scale * self._anchor_s])
        trust = np.concatenate([np.ones(len(observed)), np.full(len(self._anchors), MEASUREMENT_ERROR / PRIOR_ERROR)])
        predicted: Floats = self._prior_over_model * (self.terms @ _fit(rows, target, trust))
        return predicted

    def _check(self, workers: int, ps: int) -> None:
        rows, most_workers = self._prior_s.shape
        least_ps, most_ps = self._least_ps, self._least_ps + rows - 1
        if not (1 <= workers <= most_workers and least_ps <= ps <= most_ps):
            raise BadInputError(
                f"{workers} workers and {ps} parameter servers are beyond this speed model's 1 to {most_workers} and "
                f"{least_ps} to {most_ps}."
            )

    @property
    def least_ps(self) -> int:
        """The smallest number of parameter servers: 0 for a gang, which has none, else 1."""
        return self._least_ps


def sample_sizes(model: SpeedModel, runs: int = 5, min_workers: int = 1) -> list[Counts]:
    """Selects a few (workers, ps) for short sample runs: those that determine the speeds of all others best.

    Selected one by one, each to minimise the mean relative variance of all predictions, given the previous ones. That
    is greedy I-optimal design (Box and Draper, JASA 54, 1959); Optimus takes sample runs without a rule.

    Returns:
        Counts to run, the smallest jobs first.
    """
    table = model.table()[:, min_workers - 1 :]
    rows = (model.terms[:, min_workers - 1 :] * table[..., None]).reshape(table.size, -1)
    largest = rows.max(axis=0)
    # A gang of one exchanges nothing.
    rows = rows / np.where(largest > 0, largest, 1.0)
    together = rows.T @ rows
    covariance = np.eye(rows.shape[1]) / INITIAL_INFORMATION
    chosen: list[int] = []
    for _ in range(min(runs, len(rows))):
        # Reduction of the total variance by each row (Sherman and Morrison, 1950).
        directions = rows @ covariance
        lengths = 1 + (directions * rows).sum(axis=1)
        reductions = ((directions @ together) * directions).sum(axis=1) / lengths
        reductions[chosen] = -np.inf
        best = int(reductions.argmax())
        chosen.append(best)
        covariance = covariance - np.outer(directions[best], directions[best]) / lengths[best]
    counts = [(index % table.shape[1] + min_workers, index // table.shape[1] + model.least_ps) for index in chosen]
    return sorted(counts, key=lambda pair: (sum(pair), pair))


def _one_to(most: int) -> range:
    return range(1, most + 1)


def _anchors(known: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Counts at which the prior is sampled: the smallest, the largest, and a geometric series between them."""
    chosen = np.zeros_like(known)
    chosen[
        np.ix_(*([round(number) - 1 for number in np.geomspace(1, most, ANCHOR_COUNTS)] for most in known.shape))
    ] = True
    return chosen & known if (chosen & known).any() else known


def _fit(terms: Floats, seconds: Floats, trust: Floats) -> Floats:
    """Factors with the least squares of relative errors, weighted."""
    return nnls(terms * (trust / seconds)[:, None], trust)


def _check_speed(samples_per_s: float) -> float:
    if not 0 < samples_per_s < math.inf:
        raise BadInputError(f"A speed is {samples_per_s:g} samples/s; it must be above 0 and finite.")
    return samples_per_s
