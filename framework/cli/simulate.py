"""`dike simulate`: policies compared on recorded learning curves."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import Progress
from rich.table import Table

from dike.exceptions import BadInputError
from framework.cli.search_options import milestones_of
from framework.simulation.comparison import (
    POLICY_NAMES,
    TOP,
    PolicyResult,
    Scenario,
    SimulationSettings,
    policies_named,
    reference,
    resolve,
    simulate,
)
from framework.simulation.curves import read_curves
from framework.simulation.plots import plot_comparison
from solver.cli.output import Format, console, print_json
from solver.cli.tables import new_table


class Mode(enum.StrEnum):
    """Which values of the metric are good."""

    MIN = "min"
    MAX = "max"


class Until(enum.StrEnum):
    """When a trial leaves."""

    TARGET = "target"
    END = "end"


def simulate_policies(
    curves: Annotated[Path, typer.Option(help="CSV file of recorded curves, .gz or not.", show_default=False)],
    gpus: Annotated[int, typer.Option(help="How many slots.")] = 4,
    jobs: Annotated[int, typer.Option(help="Trials of a bin.")] = 16,
    good: Annotated[int, typer.Option(help="How many of them reach the target.")] = 4,
    policies: Annotated[str, typer.Option(help="Which, by commas.")] = ",".join(POLICY_NAMES),
    seeds: Annotated[int, typer.Option(help="How many bins.")] = 30,
    first_seed: Annotated[int, typer.Option(help="The seed of the first; the next ones follow.")] = 0,
    quantum: Annotated[
        float | None, typer.Option(help="Seconds between two decisions on a slot; 1% of the median curve's length.")
    ] = None,
    overhead: Annotated[
        float | None, typer.Option(help="Seconds it takes to put a trial in a slot; 1.5, at most a tenth of --quantum.")
    ] = None,
    report_every: Annotated[
        float | None, typer.Option(help="Seconds of training between two reports; a quarter of --quantum.")
    ] = None,
    arrival_every: Annotated[float, typer.Option(help="Seconds between two arrivals; 0: all are there at once.")] = 0.0,
    jobs_per_gpu: Annotated[int, typer.Option(help="Trials bound to one slot (hermes, fifo, rr, slaq).")] = 4,
    milestones: Annotated[str, typer.Option(help="Longer quanta for trials that have come far: 50%:20s,75%:40s.")] = "",
    metric: Annotated[
        str | None, typer.Option(help="Column of the file; train_loss, or acc where columns are acc_0, acc_1, ...")
    ] = None,
    mode: Annotated[Mode, typer.Option(help="Whether small or great values of --metric are good.")] = Mode.MIN,
    target: Annotated[float | None, typer.Option(help="Value of the metric at which a trial is good.")] = None,
    target_share: Annotated[
        float, typer.Option(help="Without --target: how far it is from the median first to the best final loss.")
    ] = 0.9,
    until: Annotated[Until, typer.Option(help="Trials leave at the target, or at the end of their curve.")] = (
        Until.TARGET
    ),
    plot: Annotated[Path | None, typer.Option(help="Draw it into this file, .png, .svg or .pdf.")] = None,
    output_format: Annotated[Format, typer.Option("--format", help="How to print the result.")] = Format.TABLE,
) -> None:
    """Compares policies in virtual time, on recorded learning curves."""
    if seeds < 1 or first_seed < 0:
        raise BadInputError(
            f"--seeds {seeds} from --first-seed {first_seed} cannot be; give 1 or more, from 0 or more."
        )
    if plot is not None:
        # matplotlib takes a while to load, and a table needs none.
        from solver.drawing.figure_files import check_picture_path

        check_picture_path(plot)
    chosen = policies_named([name for name in dict.fromkeys(map(str.strip, policies.split(","))) if name])
    if not chosen:
        raise BadInputError(f"--policies names none; choose of {', '.join(POLICY_NAMES)}.")
    recorded = read_curves(curves, metric, mode.value)
    sign = -1 if mode is Mode.MAX else 1
    settings = SimulationSettings(
        gpus=gpus,
        jobs=jobs,
        good=good,
        target=None if target is None else sign * target,
        target_share=target_share,
        quantum_s=quantum,
        overhead_s=overhead,
        report_s=report_every,
        jobs_per_gpu=jobs_per_gpu,
        milestones=milestones_of(milestones),
        arrival_s=arrival_every,
        until=until.value,
    )
    scenario = resolve(recorded, settings)
    with Progress(console=console(stderr=True), transient=True) as progress:
        task = progress.add_task("simulating", total=seeds * len(chosen))
        bins = range(first_seed, first_seed + seeds)
        results = simulate(recorded, chosen, scenario, bins, lambda: progress.advance(task))
    title = f"{gpus} GPUs, {jobs} trials, {good} good; mean of {seeds} bin{'s' if seeds > 1 else ''}"
    if plot is not None:
        plot_comparison([(f"{curves.name}: {title}", results)], plot)
    if output_format is Format.JSON:
        print_json(_to_json(results, scenario, sign * scenario.target, curves, bins))
        return
    out = console()
    out.print(_table(results, title))
    for line in _notes(results, scenario, sign * scenario.target):
        out.print(line, markup=False, soft_wrap=True)
    if plot is not None:
        out.print(f"The picture is in {plot}.", markup=False, soft_wrap=True)


def _table(results: Sequence[PolicyResult], title: str) -> Table:
    unit = reference(results)
    table = new_table(title, "policy", "mean of the good", "x", "first", "x", f"top {TOP}", "x", "preemptions")
    for column in table.columns[1:]:
        column.justify = "right"
    for result in results:
        table.add_row(
            result.name,
            f"{result.mean_time_good_s:,.0f} s",
            f"{result.mean_time_good_s / unit.mean_time_good_s:.2f}",
            f"{result.time_first_s:,.0f} s",
            f"{result.time_first_s / unit.time_first_s:.2f}",
            f"{result.time_top4_s:,.0f} s",
            f"{result.time_top4_s / unit.time_top4_s:.2f}",
            f"{result.preemptions:,.1f}",
        )
    return table


def _notes(results: Sequence[PolicyResult], scenario: Scenario, target: float) -> Sequence[str]:
    leave = "at the target" if scenario.world.until == "target" else "at the end of their curve"
    return (
        f"Time until good trials reach {target:.4g} (as {scenario.recorded_good} of the {scenario.recorded} recorded "
        f"trials do); x: as a multiple of {reference(results).name}.",
        f"Quantum {scenario.quantum_s:.4g} s, overhead {scenario.world.overhead_s:.4g} s, a report every "
        f"{scenario.world.report_s:.4g} s; trials leave {leave}.",
    )


def _to_json(
    results: Sequence[PolicyResult], scenario: Scenario, target: float, curves: Path, seeds: range
) -> dict[str, Any]:
    return {
        "policies": {
            result.name: {
                "mean_time_good_s": result.mean_time_good_s,
                "time_first_s": result.time_first_s,
                "time_top4_s": result.time_top4_s,
                "preemptions": result.preemptions,
            }
            for result in results
        },
        "target": target,
        "settings": {
            "curves": str(curves),
            "recorded_trials": scenario.recorded,
            "recorded_good": scenario.recorded_good,
            "gpus": scenario.world.slots,
            "jobs": scenario.jobs,
            "good": scenario.good,
            "seeds": list(seeds),
            "quantum_s": scenario.quantum_s,
            "overhead_s": scenario.world.overhead_s,
            "report_s": scenario.world.report_s,
            "arrival_s": scenario.world.arrival_s,
            "jobs_per_gpu": scenario.jobs_per_gpu,
            "until": scenario.world.until,
        },
    }
