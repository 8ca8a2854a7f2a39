"""A scheduler's estimates of a job: the remaining samples, and the speed with each number of tasks.

They come either from Optimus' models, fitted to noisy losses and speeds, or from the true values with an error.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from benchmarks.simulation.jobs.losses import PATIENCE
from benchmarks.simulation.jobs.machines import even_layout
from benchmarks.simulation.jobs.workload import SimulatedJob
from framework.policies.jobs.interface import Counts
from solver.calibration.nnls import Floats
from solver.choices import Sharding
from solver.online import ConvergenceModel, SpeedModel, sample_sizes
from solver.resources import Amounts

REPORTS = 10
"""Losses that a job reports in a round."""
SPEED_NOISE = 0.02
"""Standard deviation of measured speeds."""
MAX_OBSERVATIONS = 5
"""Observations of a speed that are used; their noise then averages out."""
REFIT_FACTOR = 1.05
"""A curve is fitted again when the job's steps have grown by this factor."""
SAMPLE_RUNS = 5
"""Short runs that measure the speed before the job starts (Optimus, section 3.2)."""


@dataclass(frozen=True)
class EstimateSettings:
    """Sources of the estimates.

    Attributes:
        convergence_error: relative error of the true remaining samples, which shrinks with the job's progress; None for
            the convergence model's estimate.
        speed_error: relative error of each true speed; None for the speed model's estimates.
    """

    convergence_error: float | None = None
    speed_error: float | None = None


class ProgressEstimate(Protocol):
    @property
    def young(self) -> bool:
        """Whether the estimate is still unreliable."""

    def observe(self, before: float, after: float) -> None:
        """Observes the training from one share of the job's steps to another."""

    def samples_left(self, done: float) -> float:
        """Samples until convergence when `done`, a share of the steps, is done."""


class FittedProgress:
    """The convergence model's estimate or, while it has none, the user's limit; `rng` draws the noise of the losses."""

    def __init__(self, job: SimulatedJob, rng: np.random.Generator) -> None:
        self._job, self._rng = job, rng
        self._model = ConvergenceModel(
            epoch_steps=max(1, round(job.steps / job.curve.epochs)),
            threshold=job.curve.threshold,
            patience=PATIENCE,
        )
        self._ends_at: float | None = None
        self._fitted_at = 0.0

    @property
    def young(self) -> bool:
        return self._ends_at is None

    def observe(self, before: float, after: float) -> None:
        for done in np.linspace(before, after, REPORTS + 1)[1:].tolist():
            loss = self._job.curve.loss(done) * (1 + self._rng.normal(0, self._job.curve.noise))
            self._model.add(round(done * self._job.steps), loss)
        if after >= self._fitted_at * REFIT_FACTOR:
            found = self._model.steps_left()
            self._ends_at = after * self._job.steps + found.steps if found.known else None
            self._fitted_at = after

    def samples_left(self, done: float) -> float:
        job = self._job
        limit = job.limit_samples - done * job.samples
        if self._ends_at is None:
            return limit
        left = (self._ends_at - done * job.steps) * job.batch_size
        # An active job has at least one more epoch.
        return min(limit, max(left, job.samples / job.curve.epochs))


class PerturbedProgress:
    """The true value with a relative error, which shrinks with the job's progress as a fitted curve's does.

    Args:
        error: absolute relative error at the start.
        rng: draws its sign.
    """

    young = False

    def __init__(self, job: SimulatedJob, error: float, rng: np.random.Generator) -> None:
        self._job = job
        self._error = error * float(rng.choice((-1, 1)))

    def observe(self, before: float, after: float) -> None: ...

    def samples_left(self, done: float) -> float:
        return self._job.samples * (1 - done) * max(0.01, 1 + self._error * (1 - done))


class NoProgress:
    """For schedulers that do not use it."""

    young = False

    def observe(self, before: float, after: float) -> None: ...

    def samples_left(self, done: float) -> float:
        return math.inf


class SpeedEstimate(Protocol):
    def observe(self, counts: Counts, samples_per_s: float) -> None: ...

    def table(self) -> Floats:
        """Samples per second: [ps - 1, workers - 1]; one row without parameter servers."""


class FittedSpeeds:
    """The speed model's estimates, after several short runs."""

    def __init__(self, job: SimulatedJob, machine: Amounts, rng: np.random.Generator, *, sharding: Sharding) -> None:
        self._job, self._rng = job, rng
        self._seen: Counter[Counts] = Counter()
        self._model = SpeedModel(
            lambda workers, ps: job.model.expected_samples_per_s(workers, min(ps, job.model.max_ps), job.batch_size),
            synchronous=job.model.synchronous,
            max_workers=job.max_workers,
            max_ps=max(1, job.model.max_ps),
        )
        for workers, ps in sample_sizes(self._model, SAMPLE_RUNS):
            counts = workers, min(ps, job.model.max_ps)
            self.observe(counts, _true_speed(job, counts, machine, sharding=sharding))

    def observe(self, counts: Counts, samples_per_s: float) -> None:
        self._seen[counts] += 1
        if self._seen[counts] <= MAX_OBSERVATIONS:
            workers, ps = counts
            self._model.observe(workers, max(1, ps), samples_per_s * (1 + self._rng.normal(0, SPEED_NOISE)))

    def table(self) -> Floats:
        return self._model.table()


class PerturbedSpeeds:
    """The true speeds on the fewest machines, with errors.

    Args:
        error: absolute relative error of each speed.
        rng: draws the signs.
    """

    def __init__(
        self, job: SimulatedJob, machine: Amounts, error: float, rng: np.random.Generator, *, sharding: Sharding
    ) -> None:
        lines = range(1, max(1, job.model.max_ps) + 1)
        true = [
            [
                _true_speed(job, (workers, min(ps, job.model.max_ps)), machine, sharding=sharding)
                for workers in range(1, job.max_workers + 1)
            ]
            for ps in lines
        ]
        self._table = np.array(true) * (1 + error * rng.choice((-1, 1), size=np.shape(true)))

    def observe(self, counts: Counts, samples_per_s: float) -> None: ...

    def table(self) -> Floats:
        return self._table


class NoSpeeds:
    """For schedulers that do not use them."""

    def __init__(self, job: SimulatedJob) -> None:
        self._table = np.ones((max(1, job.model.max_ps), job.max_workers))

    def observe(self, counts: Counts, samples_per_s: float) -> None: ...

    def table(self) -> Floats:
        return self._table


def make_progress(job: SimulatedJob, settings: EstimateSettings, rng: np.random.Generator) -> ProgressEstimate:
    if settings.convergence_error is None:
        return FittedProgress(job, rng)
    return PerturbedProgress(job, settings.convergence_error, rng)


def make_speeds(
    job: SimulatedJob, machine: Amounts, settings: EstimateSettings, rng: np.random.Generator, *, sharding: Sharding
) -> SpeedEstimate:
    if settings.speed_error is None:
        return FittedSpeeds(job, machine, rng, sharding=sharding)
    return PerturbedSpeeds(job, machine, settings.speed_error, rng, sharding=sharding)


def _true_speed(job: SimulatedJob, counts: Counts, machine: Amounts, *, sharding: Sharding) -> float:
    layout = even_layout(job.model.needs, counts, machine)
    if layout is None:
        layout = ((1, 0),) * counts[0] + ((0, 1),) * counts[1]
    return job.model.samples_per_s(layout, job.batch_size, sharding=sharding)
