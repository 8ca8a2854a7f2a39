"""A job that shares a cluster with others."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from dike.exceptions import BadInputError
from dike.profile import ModelProfile
from solver.strategies import ALLREDUCE, why_not

DEFAULT_STEPS = 10_000
JobStrategy = Literal["ps", "allreduce"]
"""Strategies of jobs that share a cluster."""


class Named(Protocol):
    @property
    def name(self) -> str: ...


def check_names(jobs: Sequence[Named]) -> None:
    """Raises BadInputError if two jobs share a name."""
    counts = Counter(job.name for job in jobs)
    for name, count in counts.most_common(1):
        if count > 1:
            raise BadInputError(f"Two jobs are called '{name}'; give each its own name.")


@dataclass(frozen=True)
class PlanJob:
    """A training job to place beside others.

    Jobs that share one `profile` object share all tables, so thousands of equal jobs cost little.

    Attributes:
        profile: the model and its batch size.
        max_workers: maximum workers; None for as many as pay off.
        steps: mini-batches of `profile.batch_size` samples still to train.
        weight: weight of its remaining time; jobs of higher weight get their minimum first.
        strategy: `ps` for workers and parameter servers, `allreduce` for one task or a gang of workers.
        gpus_per_worker: GPUs of each worker, 0 for none; None for one if the cluster has GPUs, else none.
    """

    name: str
    profile: ModelProfile
    min_workers: int = 1
    max_workers: int | None = None
    steps: int = DEFAULT_STEPS
    weight: float = 1.0
    gpus_per_worker: int | None = None
    strategy: JobStrategy = "ps"

    def __post_init__(self) -> None:
        if self.min_workers < 1:
            raise BadInputError(f"PlanJob '{self.name}': min_workers is {self.min_workers}; it must be at least 1.")
        if self.max_workers is not None and self.max_workers < self.min_workers:
            raise BadInputError(
                f"PlanJob '{self.name}': max_workers is {self.max_workers} and min_workers {self.min_workers}; "
                "the maximum must not be below the minimum."
            )
        if self.steps < 1:
            raise BadInputError(f"PlanJob '{self.name}': steps is {self.steps}; it must be at least 1.")
        if not 0 < self.weight < math.inf:
            raise BadInputError(f"PlanJob '{self.name}': weight is {self.weight:g}; it must be above 0 and finite.")
        if self.gpus_per_worker is not None and self.gpus_per_worker < 0:
            raise BadInputError(
                f"PlanJob '{self.name}': gpus_per_worker is {self.gpus_per_worker}; it must not be negative."
            )

        if self.is_gang and (reason := why_not(self.profile, ALLREDUCE)):
            raise BadInputError(f"PlanJob '{self.name}' cannot train with all-reduce: {reason}.")
        if self.is_gang and (self.gpus_per_worker or 0) > 1:
            raise BadInputError(f"PlanJob '{self.name}': a worker of a gang has one GPU; give it more workers.")

    @property
    def is_gang(self) -> bool:
        """Whether its workers sum their gradients without parameter servers."""
        return self.strategy == ALLREDUCE

    @property
    def samples(self) -> int:
        """Samples still to train."""
        return self.steps * self.profile.batch_size
