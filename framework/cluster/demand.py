"""Notices in a cluster's store: frameworks publish which jobs wait, and `dike cluster slurm` what it does about it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from dike import typed

WAITING, PILOTS = "waiting", "pilots"
"""Kinds of notices: a `Waiting` by each framework, and one `PilotNotice`."""


@dataclass(frozen=True)
class WaitingTasks:
    """Equal tasks that wait for resources.

    Attributes:
        amounts: of one task, by resource: `cpus`, `mem` in MiB, `gpus`.
    """

    name: str
    count: int
    amounts: dict[str, float]


@dataclass(frozen=True)
class WaitingJob:
    """A job that needs more tasks than fit at the moment.

    Attributes:
        tasks: what it lacks; empty if that is unknown before there is an agent.
    """

    job_id: str
    tasks: tuple[WaitingTasks, ...] = ()


@dataclass(frozen=True)
class Waiting:
    """The waiting jobs of one framework."""

    jobs: tuple[WaitingJob, ...] = ()


@dataclass(frozen=True)
class PilotNotice:
    """The Slurm jobs that bring machines to a cluster.

    Attributes:
        queued: Slurm job -> why Slurm has not started it yet.
        starting: Slurm jobs that run, but have not joined.
        running: number of those that have joined.
        max_jobs: maximum number of all.
        unfit: job -> why no machine of such a Slurm job can run it, as a sentence.
        problem: why no further one is submitted, as a sentence; empty if one can be.
    """

    queued: dict[str, str] = field(default_factory=dict)
    starting: tuple[str, ...] = ()
    running: int = 0
    max_jobs: int = 0
    unfit: dict[str, str] = field(default_factory=dict)
    problem: str = ""

    def explain(self, job_id: str) -> str:
        """What a waiting job may expect, in one or more sentences; empty if nothing."""
        if job_id in self.unfit:
            return self.unfit[job_id]
        sentences = [self.problem] if self.problem else []
        if self.starting:
            sentences.append(f"{_jobs(self.starting)} {'start' if len(self.starting) > 1 else 'starts'}.")
        if self.queued:
            reasons = ", ".join(sorted(set(self.queued.values())))
            waits = "wait" if len(self.queued) > 1 else "waits"
            sentences.append(f"{_jobs(tuple(self.queued))} {waits} in Slurm's queue: {reasons}.")
        if not sentences and self.running >= self.max_jobs:
            sentences.append(f"All {self.max_jobs} Slurm jobs run that `dike cluster slurm --max` allows.")
        return " ".join(sentences)


def read_pilots(values: Any) -> PilotNotice | None:
    """Reads a notice of the kind `PILOTS`; None if it is from another version of Dike."""
    try:
        return typed.read(PilotNotice, values)
    except ValueError:
        return None


def _jobs(ids: tuple[str, ...]) -> str:
    return f"Slurm job {ids[0]}" if len(ids) == 1 else f"The Slurm jobs {', '.join(ids)}"
