"""`python -m benchmarks simulate-jobs`: compares schedulers on many training jobs in virtual time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from benchmarks.simulation.jobs.schedulers import SCHEDULERS
from benchmarks.simulation.seeds import seed_range
from dike.exceptions import BadInputError
from solver.cli.output import Format, console, new_table, print_json
from solver.drawing.figure_files import check_picture_path

if TYPE_CHECKING:
    from rich.table import Table

    from benchmarks.simulation.jobs.comparison import SchedulerResult, Workload
    from benchmarks.simulation.jobs.machines import Machines
    from benchmarks.simulation.jobs.world import JobsSettings

_POISSON = "poisson:"
_HOUR_S = 3600.0


PANELS = {
    "Jobs": ("tables", "profiles", "arrivals", "trace", "jobs", "max_workers", "seeds", "first_seed"),
    "Machines": (
        *("machines", "gpus_per_machine", "cpus_per_machine", "memory_per_machine"),
        *("network_gbps", "gpu_model"),
    ),
    "Schedulers": ("policies", "interval", "resize_cost", "convergence_error", "speed_error"),
    "Output": ("plot", "output_format"),
}


def simulate_jobs(
    tables: Annotated[
        Path | None, typer.Option(help="Folder of measured speeds, one folder for each model.", show_default=False)
    ] = None,
    profiles: Annotated[
        Path | None, typer.Option(help="Folder of saved profiles, for jobs with parameter servers.", show_default=False)
    ] = None,
    arrivals: Annotated[str, typer.Option(help="poisson:JOBS, the mean number of jobs an hour.")] = "poisson:6",
    trace: Annotated[
        Path | None, typer.Option(help="CSV file of arrivals, instead of --arrivals.", show_default=False)
    ] = None,
    jobs: Annotated[int, typer.Option(help="Number of jobs.")] = 40,
    machines: Annotated[int, typer.Option(help="Number of machines.")] = 16,
    gpus_per_machine: Annotated[int, typer.Option(help="GPUs of each machine.")] = 4,
    cpus_per_machine: Annotated[float, typer.Option(help="CPU cores of each machine.")] = 48,
    memory_per_machine: Annotated[float, typer.Option(help="Memory of each machine, GiB.")] = 192,
    network_gbps: Annotated[float, typer.Option(help="Speed of each network card, for --profiles.")] = 10,
    gpu_model: Annotated[str, typer.Option(help="Model of the GPUs, for --profiles.")] = "T4",
    max_workers: Annotated[int, typer.Option(help="Most workers a job may have.")] = 16,
    policies: Annotated[
        str, typer.Option(help="Which, by commas; also ALLOCATION/PLACEMENT/SHARDING, such as gain/spread/in-turn.")
    ] = ",".join(SCHEDULERS),
    interval: Annotated[float, typer.Option(help="Seconds from one decision to the next.")] = 600,
    resize_cost: Annotated[float, typer.Option(help="Seconds a job loses when its tasks change.")] = 30,
    convergence_error: Annotated[
        float | None,
        typer.Option(help="Give schedulers a job's length with this relative error, instead of a fitted one."),
    ] = None,
    speed_error: Annotated[
        float | None,
        typer.Option(help="Give schedulers a job's speeds with this relative error, instead of fitted ones."),
    ] = None,
    seeds: Annotated[int, typer.Option(help="Number of runs, each with other jobs.")] = 5,
    first_seed: Annotated[int, typer.Option(help="The seed of the first; the next ones follow.")] = 0,
    plot: Annotated[Path | None, typer.Option(help="Draw the result into this file (.png, .svg or .pdf).")] = None,
    output_format: Annotated[Format, typer.Option("--format", help="How to print the result.")] = Format.TABLE,
) -> None:
    """Compares schedulers of training jobs in virtual time."""
    from rich.progress import Progress

    from benchmarks.simulation.jobs.comparison import Sources, Workload, compare
    from benchmarks.simulation.jobs.estimates import EstimateSettings
    from benchmarks.simulation.jobs.machines import Machines
    from benchmarks.simulation.jobs.plots import plot_comparison
    from benchmarks.simulation.jobs.scheduler import scheduler_named
    from benchmarks.simulation.jobs.workload import read_trace
    from benchmarks.simulation.jobs.world import JobsSettings

    numbers = seed_range(first_seed, seeds)
    for option, count in (("--jobs", jobs), ("--max-workers", max_workers)):
        if count < 1:
            raise BadInputError(f"{option} must be at least 1, not {count}.")
    if not 0 < interval < math.inf:
        raise BadInputError(f"--interval must be more than 0 seconds, not {interval:g}.")
    if not 0 <= resize_cost < interval:
        raise BadInputError(f"--resize-cost must be at least 0 and less than --interval, not {resize_cost:g}.")
    for option, error in (("--convergence-error", convergence_error), ("--speed-error", speed_error)):
        if error is not None and not 0 <= error < 1:
            raise BadInputError(f"{option} must be at least 0 and below 1, not {error:g}.")
    if plot is not None:
        check_picture_path(plot)
    chosen = [name for name in dict.fromkeys(map(str.strip, policies.split(","))) if name]
    if not chosen:
        raise BadInputError(f"--policies is empty; choose from {', '.join(SCHEDULERS)}.")
    for name in chosen:
        scheduler_named(name)
    shared = Machines(machines, gpus_per_machine, cpus_per_machine, memory_per_machine, network_gbps, gpu_model)
    sources = Sources.read(tables, profiles, shared)
    if trace is None:
        workload = Workload(jobs, per_hour=_per_hour(arrivals), max_workers=max_workers)
    else:
        workload = Workload(jobs, trace=read_trace(trace), max_workers=max_workers)
    settings = JobsSettings(interval, resize_cost, EstimateSettings(convergence_error, speed_error))
    with Progress(console=console(stderr=True), transient=True) as progress:
        task = progress.add_task("simulating", total=seeds * len(chosen))
        results = compare(sources, workload, chosen, settings, numbers, lambda: progress.advance(task))
    come = f"{trace.name}" if trace is not None else f"{workload.per_hour:g} an hour"
    title = (
        f"{jobs} jobs ({come}) on {machines} machines of {gpus_per_machine} GPUs; "
        f"mean of {seeds} seed{'s' if seeds > 1 else ''}"
    )
    if plot is not None:
        plot_comparison([(title, results)], plot)
    if output_format is Format.JSON:
        print_json(_to_json(results, shared, workload, settings, numbers))
        return
    out = console()
    out.print(_table(results, title))
    for line in _notes(results, settings):
        out.print(line, markup=False, soft_wrap=True)
    if plot is not None:
        out.print(f"The picture is in {plot}.", markup=False, soft_wrap=True)


def _per_hour(arrivals: str) -> float:
    kind, _, rate = arrivals.partition(":")
    try:
        per_hour = float(rate) if f"{kind}:" == _POISSON else math.nan
    except ValueError:
        per_hour = math.nan
    if not 0 < per_hour < math.inf:
        raise BadInputError(f"--arrivals must be poisson:JOBS, such as poisson:6 for 6 an hour, not '{arrivals}'.")
    return per_hour


def _table(results: Sequence[SchedulerResult], title: str) -> Table:
    from benchmarks.simulation.jobs.comparison import reference

    unit = reference(results)
    columns = ("mean completion", "x", "90% of jobs", "x", "makespan", "x", "GPUs in use", "resizes")
    table = new_table(title, "policy", *columns)
    for column in table.columns[1:]:
        column.justify = "right"
    for result in results:
        table.add_row(
            result.name,
            f"{result.mean_completion_s / _HOUR_S:,.2f} h",
            f"{result.mean_completion_s / unit.mean_completion_s:.2f}",
            f"{result.p90_completion_s / _HOUR_S:,.2f} h",
            f"{result.p90_completion_s / unit.p90_completion_s:.2f}",
            f"{result.makespan_s / _HOUR_S:,.2f} h",
            f"{result.makespan_s / unit.makespan_s:.2f}",
            f"{result.gpu_share:.0%}",
            f"{result.resizes:,.0f}",
        )
    return table


def _notes(results: Sequence[SchedulerResult], settings: JobsSettings) -> Sequence[str]:
    from benchmarks.simulation.jobs.comparison import reference

    def known(error: float | None) -> str:
        return "estimated from what is measured" if error is None else f"known up to {error:.0%}"

    estimates = settings.estimates
    return (
        f"Time from a job's arrival to its end; x: as a multiple of {reference(results).name}.",
        f"A round every {settings.interval_s:g} s; a change costs a job {settings.resize_s:g} s; the length of a job "
        f"is {known(estimates.convergence_error)}, its speed {known(estimates.speed_error)}.",
    )


def _to_json(
    results: Sequence[SchedulerResult], machines: Machines, workload: Workload, settings: JobsSettings, seeds: range
) -> dict[str, Any]:
    return {
        "policies": {
            result.name: {
                "mean_completion_s": result.mean_completion_s,
                "p90_completion_s": result.p90_completion_s,
                "makespan_s": result.makespan_s,
                "gpu_share": result.gpu_share,
                "resizes": result.resizes,
            }
            for result in results
        },
        "settings": {
            "jobs": workload.jobs,
            "jobs_per_hour": workload.per_hour,
            "machines": machines.count,
            "gpus_per_machine": machines.gpus,
            "max_workers": workload.max_workers,
            "interval_s": settings.interval_s,
            "resize_s": settings.resize_s,
            "convergence_error": settings.estimates.convergence_error,
            "speed_error": settings.estimates.speed_error,
            "seeds": list(seeds),
        },
    }
