"""All policies on three workloads."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from benchmarks.jobs.cases import CASES, COMPARED, ratio, run, table
from benchmarks.simulation.jobs.comparison import reference
from benchmarks.simulation.jobs.plots import plot_comparison
from benchmarks.simulation.jobs.schedulers import SCHEDULERS

TITLE = "Policies"
PICTURE = "jobs.png"
RESULTS = Path(__file__).parents[1] / "results"
COLUMNS = ("policy", "mean completion, h", "x (± standard error)", "90% of the jobs, h", "makespan, h", "GPUs in use")


def measure() -> Iterator[str]:
    yield "Time from a job's arrival to its end; x: as a multiple of optimus', by seed. In brackets: the means as"
    yield "multiples of optimus'. The paper 'Optimus' has about 2.39 for drf's mean completion time and 1.63 for its"
    yield "makespan."
    yield ""
    drawn = []
    for name in COMPARED:
        results = run(name, tuple(SCHEDULERS))
        unit = reference(results)
        drawn.append((name, results))
        yield f"**{CASES[name].name}**"
        yield ""
        rows = [
            (
                result.name,
                f"{result.mean_completion_s / 3600:.2f}",
                ratio(result, unit),
                f"{result.p90_completion_s / 3600:.2f} ({result.p90_completion_s / unit.p90_completion_s:.2f})",
                f"{result.makespan_s / 3600:.2f} ({result.makespan_s / unit.makespan_s:.2f})",
                f"{result.gpu_share:.0%}",
            )
            for result in results
        ]
        yield from table(COLUMNS, rows)
    plot_comparison(drawn, RESULTS / PICTURE)
    yield f"![policies on three workloads]({PICTURE})"
