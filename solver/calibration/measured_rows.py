"""Measured steps with their terms of the step-time model."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from dike.exceptions import BadInputError
from dike.profile import ModelProfile
from solver.calibration.nnls import Floats
from solver.calibration.relative_fit import Gradients, RelativeFit, descend, fit_factors, predictions
from solver.calibration.step_terms import TERMS, StepTerms, step_terms
from solver.cluster import Cluster
from solver.hardware import Hardware
from solver.placement.naming import Assignment
from solver.resources import WorkerShape
from solver.scenario import Scenario
from solver.shards import Shards
from solver.units import format_bytes

MAX_NAMES_SHOWN = 5
"""Maximum number of machines in a message."""


@dataclass(frozen=True)
class Measurement:
    """A measured step time for one placement.

    Attributes:
        assignment: machine of every ps and worker; the chief's does not matter.
        seconds: seconds in which every worker made one step, on average; None if `samples_per_s` is given.
        samples_per_s: samples per second of all workers; None if `seconds` is given.
        batch_size: samples per step of one worker (of each of its GPUs); None for the profile's.
        shard_bytes: bytes of variables on each ps; None for those of a plan.
        ps_cpus: CPUs of each ps; None for the fewest that a plan gives it.
        where: file and line, for messages.
    """

    shape: WorkerShape
    assignment: Assignment
    seconds: float | None = None
    samples_per_s: float | None = None
    batch_size: int | None = None
    shard_bytes: tuple[int, ...] | None = None
    where: str = "A measurement"
    ps_cpus: float | None = None

    def __post_init__(self) -> None:
        if not self.assignment.ps or not self.assignment.workers:
            raise BadInputError(f"{self.where}: a placement needs at least one ps and one worker.")
        given = [value for value in (self.seconds, self.samples_per_s) if value is not None]
        if len(given) != 1:
            raise BadInputError(f"{self.where}: give either 'seconds' or 'samples_per_s'.")
        if not (math.isfinite(given[0]) and given[0] > 0):
            raise BadInputError(f"{self.where}: {given[0]} was measured; it must be a number above 0.")

    def could_run(self, gpus: Mapping[str, int]) -> bool:
        """Whether the cluster has its machines, with enough GPUs for its workers."""
        here = all(node in gpus for node in (*self.assignment.ps, *self.assignment.workers))
        return here and all(gpus[node] >= self.shape.gpus for node in self.assignment.workers)

    def round_s(self, samples_per_step: int) -> float:
        """Seconds in which every worker made one step of `samples_per_step` samples."""
        if self.seconds is not None:
            return self.seconds
        assert self.samples_per_s is not None
        return len(self.assignment.workers) * samples_per_step / self.samples_per_s


@dataclass(frozen=True)
class MeasuredRows:
    """Measurements of one model on one cluster."""

    terms: tuple[StepTerms, ...]
    seconds: Floats

    @classmethod
    def of(
        cls, measurements: Sequence[Measurement], profile: ModelProfile, cluster: Cluster, hardware: Hardware
    ) -> MeasuredRows:
        """Computes the terms.

        Raises:
            BadInputError: if there is no row, or one is of other machines or of another model.
        """
        if not measurements:
            raise BadInputError("There are no measurements; give at least one row.")
        scenarios: dict[int, Scenario] = {}
        terms, seconds = [], []
        for measurement in measurements:
            batch = measurement.batch_size or profile.batch_size
            if batch not in scenarios:
                scenarios[batch] = Scenario.of(profile.with_batch_size(batch), cluster, hardware)
            scenario = scenarios[batch]
            scenario = scenario.with_ps_cpus(measurement.ps_cpus or scenario.sizes.ps_cpus)
            _check_machines(measurement, scenario)
            terms.append(
                step_terms(scenario, measurement.shape, _shards(measurement, scenario), measurement.assignment)
            )
            seconds.append(measurement.round_s(scenario.model(measurement.shape).samples_per_step))
        return cls(tuple(terms), np.array(seconds))

    def fit(self, *, overlap: bool) -> RelativeFit:
        return fit_factors(self._gradients(range(len(self.terms)), overlap), self.seconds, np.ones(len(TERMS)))

    def errors(self, factors: Floats, *, overlap: bool) -> Floats:
        """Relative error of each row's prediction, positive if too long."""
        errors: Floats = predictions(self._gradients(range(len(self.terms)), overlap), factors) / self.seconds - 1
        return errors

    def left_out_errors(self, fit: RelativeFit, *, overlap: bool) -> Floats:
        """Relative error of each row with the factors fitted to the others."""
        errors = []
        for row in range(len(self.terms)):
            others = [other for other in range(len(self.terms)) if other != row]
            found = descend(self._gradients(others, overlap), self.seconds[others], fit.factors)
            errors.append(self.errors(found.factors, overlap=overlap)[row])
        return np.array(errors)

    def _gradients(self, rows: Sequence[int], overlap: bool) -> Gradients:
        chosen = [self.terms[row] for row in rows]

        def gradients(factors: Floats) -> Floats:
            return np.stack([terms.gradient(factors, overlap=overlap) for terms in chosen])

        return gradients


def _check_machines(measurement: Measurement, scenario: Scenario) -> None:
    kind_of = {name: kind for kind in scenario.kinds for name in kind.names}
    for node in (*measurement.assignment.ps, *measurement.assignment.workers):
        if node not in kind_of:
            known = ", ".join(list(kind_of)[:MAX_NAMES_SHOWN]) + (", ..." if len(kind_of) > MAX_NAMES_SHOWN else "")
            raise BadInputError(f"{measurement.where}: machine '{node}' is not in the cluster; it has {known}.")
    for node in measurement.assignment.workers:
        if kind_of[node].gpus < measurement.shape.gpus:
            raise BadInputError(
                f"{measurement.where}: a worker with {measurement.shape.gpus} GPUs cannot have run on '{node}', which "
                f"has {kind_of[node].gpus}; check the cluster file."
            )


def _shards(measurement: Measurement, scenario: Scenario) -> Shards:
    profile, count = scenario.profile, len(measurement.assignment.ps)
    most = max(1, len(profile.variables))
    if measurement.shard_bytes is None:
        if count > most:
            raise BadInputError(
                f"{measurement.where}: {count} parameter servers are too many for '{profile.name}'; its variables "
                f"allow {most}."
            )
        return scenario.shards(count)
    held, expected = sum(measurement.shard_bytes), scenario.shards(1).total
    if held != expected:
        raise BadInputError(
            f"{measurement.where}: the plan is of another model: its variables take {format_bytes(held)}, those of "
            f"'{profile.name}' {format_bytes(expected)}."
        )
    if count <= most and scenario.shards(count).sizes == measurement.shard_bytes:
        return scenario.shards(count)
    return Shards(measurement.shard_bytes, {})
