"""All results of `python -m benchmarks simulate-jobs`, in one document."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.jobs import contenders, errors, job_plots, parts
from benchmarks.jobs.cases import CASES, SEEDS
from benchmarks.simulation.jobs.estimates import SAMPLE_RUNS
from benchmarks.simulation.jobs.world import SAMPLE_RUN_S, JobsSettings

TITLE = "Many training jobs on one cluster, simulated"
PARTS = ("job_plots",)
"""Parts that can be run alone."""


def measure() -> Iterator[str]:
    """Runs all parts, and draws a figure beside the results."""
    settings, sampling_s = JobsSettings(), SAMPLE_RUNS * SAMPLE_RUN_S
    yield f"Means of {len(SEEDS)} seeds; every policy gets the same jobs of a seed. A round every"
    yield f"{settings.interval_s:g} s; a job that begins or changes loses {settings.resize_s:g} s, and"
    yield f"{sampling_s:g} s more for sample runs before its first round if the policy asks how fast it is"
    yield "(dike, optimus, tetris). These know of jobs what is learned from noisy losses and speeds while they"
    yield "run. What is simulated, what the policies are and what is assumed:"
    yield "[here](../simulate-jobs.md)."
    yield ""
    for case in CASES.values():
        yield f"* **{case.name}**: {case.text}"
    yield ""
    for part in (contenders, parts, errors, job_plots):
        yield f"## {part.TITLE}"
        yield ""
        yield from part.measure()
        yield ""
