"""The simulated workloads, and their execution on all cores."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean, stdev

from benchmarks.simulation.jobs.comparison import SchedulerResult, Sources, Workload, compare
from benchmarks.simulation.jobs.estimates import EstimateSettings
from benchmarks.simulation.jobs.machines import Machines
from benchmarks.simulation.jobs.workload import read_trace
from benchmarks.simulation.jobs.world import JobsSettings

DATA = Path(__file__).parents[1] / "data"
SEEDS = range(10)
FEWER_SEEDS = range(5)


@dataclass(frozen=True)
class Case:
    """A workload on a cluster.

    Attributes:
        measured: includes the models with measured speeds.
        profiles: includes the models with parameter servers.
        per_hour: mean arrivals per hour; None: arrivals of the trace.
    """

    name: str
    text: str
    measured: bool
    profiles: bool
    jobs: int
    per_hour: float | None
    network_gbps: float = 10

    @functools.cached_property
    def sources(self) -> Sources:
        """The models, on 16 machines of 4 GPUs."""
        tables, profiles = DATA / "pollux" if self.measured else None, DATA / "profiles" if self.profiles else None
        return Sources.read(tables, profiles, Machines(network_gbps=self.network_gbps))

    @functools.cached_property
    def workload(self) -> Workload:
        trace = read_trace(DATA / "pollux" / "workload-1.csv") if self.per_hour is None else ()
        return Workload(self.jobs, self.per_hour, trace)


CASES = {
    case.name: case
    for case in (
        Case(
            "all-reduce",
            "60 jobs of the six models of Pollux at their measured speeds (T4), 30 an hour on average, of 0.5 to 10 "
            "hours with one worker; 16 machines of 4 GPUs.",
            measured=True,
            profiles=False,
            jobs=60,
            per_hour=30,
        ),
        Case(
            "ps",
            "as many jobs with parameter servers, half of them synchronous: MobileNetV2, ResNet50, VGG16 and "
            "InceptionV3, at the step-time model's speeds on hardware that is not quite what the policies think it is; "
            "10 Gb/s.",
            measured=False,
            profiles=True,
            jobs=60,
            per_hour=30,
        ),
        Case(
            "trace",
            "120 consecutive jobs of the workload that Pollux (OSDI 2021) was compared on, drawn by its authors from a "
            "recorded one: mostly jobs of minutes, some of hours, one of days on a single GPU; measured speeds.",
            measured=True,
            profiles=False,
            jobs=120,
            per_hour=None,
        ),
        Case(
            "ps, 1 Gb/s",
            "as ps, on a slow network; for the parts alone.",
            measured=False,
            profiles=True,
            jobs=60,
            per_hour=30,
            network_gbps=1,
        ),
    )
}
COMPARED = ("all-reduce", "ps", "trace")


def run(
    case: str, policies: Sequence[str], estimates: EstimateSettings | None = None, seeds: Sequence[int] = SEEDS
) -> tuple[SchedulerResult, ...]:
    """Runs the policies on a case, one seed at a time on each core."""
    of_seeds = list(
        _pool().map(_run_seed, [(case, tuple(policies), estimates or EstimateSettings(), seed) for seed in seeds])
    )
    return tuple(
        SchedulerResult(name, tuple(of_seed[place].outcomes[0] for of_seed in of_seeds))
        for place, name in enumerate(policies)
    )


def ratio(result: SchedulerResult, unit: SchedulerResult) -> str:
    """Formats the mean and the standard error of the ratio of mean completion times, by seed."""
    ratios = [
        one.mean_completion_s / other.mean_completion_s
        for one, other in zip(result.outcomes, unit.outcomes, strict=True)
    ]
    return f"{fmean(ratios):.2f} ± {stdev(ratios) / len(ratios) ** 0.5:.2f}"


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yields a Markdown table and an empty line."""
    yield f"| {' | '.join(columns)} |"
    yield "|" + "---|" * len(columns)
    for row in rows:
        yield f"| {' | '.join(row)} |"
    yield ""


@functools.cache
def _pool() -> ProcessPoolExecutor:
    # Reused, as the processes cache their models.
    return ProcessPoolExecutor(os.cpu_count(), mp_context=get_context("spawn"))


def _run_seed(task: tuple[str, tuple[str, ...], EstimateSettings, int]) -> tuple[SchedulerResult, ...]:
    case, policies, estimates, seed = task
    found = CASES[case]
    return compare(found.sources, found.workload, policies, JobsSettings(estimates=estimates), [seed])
