"""The jobs of a simulation: arrivals, models and lengths."""

from __future__ import annotations

import csv
import difflib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from benchmarks.simulation.jobs.losses import TrueCurve
from benchmarks.simulation.jobs.machines import Layout, Machines, even_layout
from dike.exceptions import BadInputError
from framework.policies.jobs.interface import TaskNeeds
from solver.choices import Sharding
from solver.shards import DEFAULT_SHARDING

REQUESTS = (1, 2, 4, 8)
"""Numbers of workers that users request, equally likely."""
WORK_HOURS = (0.5, 10.0)
"""Range of the hours that a drawn job takes with one worker, log-uniform."""
MAX_LIMIT_FACTOR = 3.0
"""Maximum ratio of the user's limit of epochs to those needed."""
LOSS_NOISE = 0.01


class JobModel(Protocol):
    """A model that jobs train, and its true speed."""

    @property
    def name(self) -> str: ...

    @property
    def synchronous(self) -> bool:
        """Whether the batch is that of all workers together; else it is each worker's."""

    @property
    def needs(self) -> TaskNeeds: ...

    @property
    def max_ps(self) -> int:
        """Maximum number of parameter servers; 0 for models without."""

    @property
    def batch_sizes(self) -> tuple[int, ...]: ...

    def max_workers(self, batch_size: int) -> int:
        """Maximum number of workers with that batch."""

    def samples_per_s(self, layout: Layout, batch_size: int, *, sharding: Sharding = DEFAULT_SHARDING) -> float:
        """The true speed."""

    def expected_samples_per_s(self, workers: int, ps: int, batch_size: int) -> float:
        """The estimate before the job has run; possibly meaningful as ratios between counts only."""


@dataclass(frozen=True)
class SimulatedJob:
    """A job.

    Attributes:
        id: its index in order of arrival.
        batch_size: of all workers together for synchronous models, else of each.
        limit_samples: the user's limit, at least `samples`.
    """

    id: int
    model: JobModel
    arrival_s: float
    batch_size: int
    samples: float
    limit_samples: float
    requested: int
    max_workers: int
    curve: TrueCurve

    @property
    def steps(self) -> int:
        return max(1, round(self.samples / self.batch_size))


@dataclass(frozen=True)
class Request:
    """A line of a trace; None is drawn at random."""

    arrival_s: float
    model: str
    samples: float | None = None
    workers: int | None = None
    batch_size: int | None = None


def poisson_requests(
    jobs: int, per_hour: float, models: Sequence[str], rng: np.random.Generator
) -> tuple[Request, ...]:
    """Draws jobs of random models with Poisson arrivals of `per_hour` on average, the first at 0."""
    arrivals = np.r_[0.0, np.cumsum(rng.exponential(3600 / per_hour, jobs - 1))]
    chosen = rng.integers(len(models), size=jobs)
    return tuple(Request(float(at), models[index]) for at, index in zip(arrivals, chosen, strict=True))


def window(trace: Sequence[Request], jobs: int, rng: np.random.Generator) -> tuple[Request, ...]:
    """Draws consecutive jobs of a trace, the first shifted to 0.

    Raises:
        BadInputError: if the trace has fewer.
    """
    if jobs > len(trace):
        raise BadInputError(f"--jobs {jobs} is more than the {len(trace)} jobs of the trace; ask for fewer.")
    first = int(rng.integers(len(trace) - jobs + 1))
    chosen = trace[first : first + jobs]
    return tuple(
        Request(one.arrival_s - chosen[0].arrival_s, one.model, one.samples, one.workers, one.batch_size)
        for one in chosen
    )


def read_trace(path: Path) -> tuple[Request, ...]:
    """Reads a CSV file with the columns arrival_s and model, and optionally samples, workers and batch_size.

    Raises:
        BadInputError: if it cannot be read or a value is invalid.
    """
    try:
        with path.open(encoding="utf-8", newline="") as lines:
            rows = list(csv.DictReader(lines))
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise BadInputError(f"The trace {path} cannot be read: {reason}.") from error
    requests = tuple(_request(row, f"Line {line} of {path}") for line, row in enumerate(rows, 2))
    if not requests:
        raise BadInputError(f"The trace {path} has no jobs; give a CSV file with the columns arrival_s and model.")
    return tuple(sorted(requests, key=lambda request: request.arrival_s))


def _request(row: Mapping[str, str | None], where: str) -> Request:
    def number(column: str) -> float | None:
        text = row.get(column)
        if not text:
            return None
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not 0 <= value < math.inf or (value == 0 and column != "arrival_s"):
            raise BadInputError(f"{where}: '{text}' in column '{column}' must be a number above 0.")
        return value

    arrival_s, model = number("arrival_s"), row.get("model")
    if arrival_s is None or not model:
        raise BadInputError(f"{where} has no arrival_s or no model; a trace needs both in every line.")
    workers, batch_size = number("workers"), number("batch_size")
    return Request(
        arrival_s,
        model,
        number("samples"),
        None if workers is None else max(1, int(workers)),
        None if batch_size is None else max(1, int(batch_size)),
    )


def make_jobs(
    requests: Sequence[Request],
    models: Mapping[str, JobModel],
    machines: Machines,
    max_workers: int,
    rng: np.random.Generator,
) -> tuple[SimulatedJob, ...]:
    """Draws what the requests leave open; `requests`: in order of arrival, `models`: by name.

    Raises:
        BadInputError: if a model is unknown, or no machine holds one of its workers.
    """
    for request in requests:
        if request.model not in models:
            near = difflib.get_close_matches(request.model, models, n=1)
            hint = f"did you mean {near[0]}? " if near else ""
            raise BadInputError(
                f"There is no table or profile of the model '{request.model}'; {hint}known are {', '.join(models)}."
            )
    return tuple(
        _job(number, request, models[request.model], machines, max_workers, rng)
        for number, request in enumerate(requests)
    )


def _job(
    number: int,
    request: Request,
    model: JobModel,
    machines: Machines,
    max_workers: int,
    rng: np.random.Generator,
) -> SimulatedJob:
    # Draws every value, needed or not, so that a field of one line does not change other jobs.
    batch_size = int(rng.choice(model.batch_sizes))
    hours = float(np.exp(rng.uniform(*np.log(WORK_HOURS))))
    requested = int(rng.choice(REQUESTS))
    beyond = float(rng.uniform(1, MAX_LIMIT_FACTOR))
    curve = TrueCurve.draw(rng, LOSS_NOISE)
    batch_size = request.batch_size or batch_size
    smallest = even_layout(model.needs, (1, min(1, model.max_ps)), machines.capacity)
    if smallest is None:
        raise BadInputError(f"No machine holds a worker of '{model.name}'; give the machines more memory or CPUs.")
    samples = request.samples or hours * 3600 * model.samples_per_s(smallest, batch_size)
    most = min(max_workers, model.max_workers(batch_size), machines.count * machines.gpus)
    requested = min(request.workers or requested, most)
    # Users request at most what the cluster holds.
    while requested > 1 and not _is_room(model, machines, requested):
        requested -= 1
    return SimulatedJob(
        id=number,
        model=model,
        arrival_s=request.arrival_s,
        batch_size=batch_size,
        samples=samples,
        limit_samples=samples * beyond,
        requested=requested,
        max_workers=most,
        curve=curve,
    )


def _is_room(model: JobModel, machines: Machines, workers: int) -> bool:
    layout = even_layout(model.needs, (workers, min(workers, model.max_ps)), machines.capacity)
    return layout is not None and len(layout) <= machines.count
