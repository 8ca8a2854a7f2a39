"""`python -m benchmarks simulate`: compares policies on recorded learning curves."""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from benchmarks.simulation.seeds import seed_range
from dike.exceptions import BadInputError
from framework.policies.trials.interface import MILESTONES, QUANTUM_GROWTH
from solver.cli.output import Format, console, new_table, print_json
from solver.drawing.figure_files import check_picture_path

if TYPE_CHECKING:
    from rich.table import Table

    from benchmarks.simulation.comparison import PolicyResult, Scenario
    from benchmarks.simulation.curves import Curve
    from benchmarks.simulation.throughputs import Job, ThroughputTable


class Mode(enum.StrEnum):
    MIN = "min"
    MAX = "max"


class Until(enum.StrEnum):
    TARGET = "target"
    END = "end"


PANELS = {
    "Curves": ("curves", "family", "family_seed", "metric", "mode", "target", "target_share", "until"),
    "Slots": ("gpus", "gpu_types", "throughputs", "models"),
    "Trials": ("jobs", "good", "seeds", "first_seed", "arrival_every"),
    "Policies": (
        *("policies", "quantum", "overhead", "move_overhead", "report_every"),
        *("trials_per_slot", "milestones", "quantum_growth"),
    ),
    "Output": ("plot", "output_format"),
}


def simulate_policies(
    curves: Annotated[Path | None, typer.Option(help="CSV file of recorded curves, .gz or not.")] = None,
    family: Annotated[
        str,
        typer.Option(help="Invented curves instead of --curves: plateau, crossing, warm-up, ..."),
    ] = "",
    family_seed: Annotated[int, typer.Option(help="Another seed draws other curves of --family.")] = 0,
    gpus: Annotated[int | None, typer.Option(help="Number of slots, all alike.", show_default="4")] = None,
    gpu_types: Annotated[
        str, typer.Option(help="Slots that differ, instead of --gpus: k80:2,p100:2,v100:2. Needs --throughputs.")
    ] = "",
    throughputs: Annotated[
        Path | None, typer.Option(help="JSON file of steps per second by GPU type and job, .gz or not.")
    ] = None,
    models: Annotated[
        str,
        typer.Option(
            help="Jobs of --throughputs to draw trials from, separated by commas: ResNet-18,ResNet-50.",
            show_default="all",
        ),
    ] = "",
    jobs: Annotated[int, typer.Option(help="Trials of a bin.")] = 16,
    good: Annotated[int, typer.Option(help="Trials of a bin that reach the target.")] = 4,
    policies: Annotated[
        str,
        typer.Option(
            help="Policies, separated by commas.",
            show_default="all, and the limit: oracle, or assignment with --gpu-types",
        ),
    ] = "",
    seeds: Annotated[int, typer.Option(help="Number of bins.")] = 30,
    first_seed: Annotated[int, typer.Option(help="The seed of the first; the next ones follow.")] = 0,
    quantum: Annotated[
        float | None,
        typer.Option(help="Seconds between two decisions on a slot.", show_default="1% of the median curve"),
    ] = None,
    overhead: Annotated[
        float | None,
        typer.Option(
            help="Seconds it takes to put a trial in a slot.", show_default="1.5, at most a tenth of --quantum"
        ),
    ] = None,
    move_overhead: Annotated[float, typer.Option(help="Seconds more if the trial ran in another slot before.")] = 0.0,
    report_every: Annotated[
        float | None,
        typer.Option(help="Seconds of training between two reports.", show_default="a quarter of --quantum"),
    ] = None,
    arrival_every: Annotated[float, typer.Option(help="Seconds between two arrivals; 0: all at the start.")] = 0.0,
    trials_per_slot: Annotated[
        int, typer.Option(help="Trials bound to one slot (hermes, hermes2, fifo, rr, slaq).")
    ] = 4,
    milestones: Annotated[
        str,
        typer.Option(help="Longer quanta for trials that have come far (hermes, hermes2): 50%:2x or 50%:20s, or none."),
    ] = ",".join(map(str, MILESTONES)),
    quantum_growth: Annotated[
        float, typer.Option(help="Relative growth of a trial's quantum with each preemption (hermes, hermes2).")
    ] = QUANTUM_GROWTH,
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
    plot: Annotated[Path | None, typer.Option(help="Draw the result into this file (.png, .svg or .pdf).")] = None,
    output_format: Annotated[Format, typer.Option("--format", help="How to print the result.")] = Format.TABLE,
) -> None:
    """Compares search policies in virtual time.

    The trials follow recorded learning curves, or invented ones.
    """
    from rich.progress import Progress

    from benchmarks.simulation.comparison import (
        POLICY_NAMES,
        TYPED_POLICY_NAMES,
        SimulationSettings,
        policies_named,
        resolve,
        simulate,
    )
    from benchmarks.simulation.plots import plot_comparison
    from framework.policies.trials.interface import read_milestones

    bins = seed_range(first_seed, seeds)
    if plot is not None:
        check_picture_path(plot)
    kinds, table, table_jobs = _kinds_and_jobs(gpus, gpu_types, throughputs, models)
    known = TYPED_POLICY_NAMES if kinds else POLICY_NAMES
    chosen = policies_named(_names(policies) if policies else known, typed=bool(kinds))
    if not chosen:
        raise BadInputError(f"--policies is empty; choose from {', '.join(known)}.")
    recorded, source = _curves(curves, family, family_seed, metric, mode)
    sign = -1 if mode is Mode.MAX else 1
    settings = SimulationSettings(
        gpus=4 if gpus is None else gpus,
        jobs=jobs,
        good=good,
        target=None if target is None else sign * target,
        target_share=target_share,
        quantum_s=quantum,
        overhead_s=overhead,
        report_s=report_every,
        trials_per_slot=trials_per_slot,
        milestones=read_milestones(milestones),
        quantum_growth=quantum_growth,
        arrival_s=arrival_every,
        until=until.value,
        gpu_types=kinds,
        table_jobs=table_jobs,
        move_s=move_overhead,
    )
    scenario = resolve(recorded, settings)
    with Progress(console=console(stderr=True), transient=True) as progress:
        task = progress.add_task("simulating", total=seeds * len(chosen))
        results = simulate(recorded, chosen, scenario, bins, lambda: progress.advance(task))
    what = gpu_types or f"{scenario.world.slots} GPUs"
    title = f"{what}, {jobs} trials, {good} good; mean of {seeds} bin{'s' if seeds > 1 else ''}"
    if plot is not None:
        plot_comparison([(f"{source}: {title}", results)], plot)
    if output_format is Format.JSON:
        print_json(_to_json(results, scenario, sign * scenario.target, str(curves or source), bins, table))
        return
    out = console()
    out.print(_table(results, title))
    for line in _notes(results, scenario, sign * scenario.target, table):
        out.print(line, markup=False, soft_wrap=True)
    if plot is not None:
        out.print(f"The picture is in {plot}.", markup=False, soft_wrap=True)


def _curves(path: Path | None, family: str, seed: int, metric: str | None, mode: Mode) -> tuple[tuple[Curve, ...], str]:
    from benchmarks.simulation.curves import read_curves
    from benchmarks.simulation.families import FAMILIES, draw_family

    if (path is None) != bool(family):
        raise BadInputError(
            f"Give either recorded curves by --curves FILE or invented ones by --family, one of {', '.join(FAMILIES)}."
        )
    if path is not None:
        return read_curves(path, metric, mode.value), path.name
    if metric is not None or mode is not Mode.MIN:
        raise BadInputError("--metric and --mode say what a column of --curves is; leave them out with --family.")
    if seed < 0:
        raise BadInputError(f"--family-seed must be at least 0, not {seed}.")
    return draw_family(family, seed), f"{family}, seed {seed}"


def _names(text: str) -> list[str]:
    return [name for name in dict.fromkeys(map(str.strip, text.split(","))) if name]


def _kinds_and_jobs(
    gpus: int | None, gpu_types: str, throughputs: Path | None, models: str
) -> tuple[tuple[str, ...], ThroughputTable | None, tuple[Job, ...]]:
    """The type of each slot, the table, and its jobs to draw trials from; empty if GPUs are alike."""
    from benchmarks.simulation.throughputs import gpu_types_of, read_throughputs

    if not gpu_types:
        for option, value in (("--throughputs", throughputs), ("--models", models)):
            if value:
                raise BadInputError(f"{option} is for GPUs that differ; name the types by --gpu-types.")
        return (), None, ()
    if throughputs is None:
        raise BadInputError("--gpu-types needs --throughputs, a file of the speeds of jobs on each type.")
    if gpus is not None:
        raise BadInputError("--gpu-types says how many GPUs there are; leave --gpus out.")
    kinds = gpu_types_of(gpu_types)
    table = read_throughputs(throughputs)
    return kinds, table, table.jobs(kinds, _names(models))


def _table(results: Sequence[PolicyResult], title: str) -> Table:
    from benchmarks.simulation.comparison import TOP, reference

    unit = reference(results)
    are_typed = bool(unit.outcomes[0].completion_s)
    headers = ["policy", "mean of the good", "x", "first", "x", f"top {TOP}", "x", "preemptions"]
    table = new_table(title, *headers, *(["completion", "x", "speed"] if are_typed else []))
    for column in table.columns[1:]:
        column.justify = "right"
    for result in results:
        typed = []
        if are_typed:
            ratio = result.mean_completion_s / unit.mean_completion_s
            typed = [f"{result.mean_completion_s:,.0f} s", f"{ratio:.2f}", f"{result.speed:.3f}"]
        table.add_row(
            result.name,
            f"{result.mean_time_good_s:,.0f} s",
            f"{result.mean_time_good_s / unit.mean_time_good_s:.2f}",
            f"{result.time_first_s:,.0f} s",
            f"{result.time_first_s / unit.time_first_s:.2f}",
            f"{result.time_top4_s:,.0f} s",
            f"{result.time_top4_s / unit.time_top4_s:.2f}",
            f"{result.preemptions:,.1f}",
            *typed,
        )
    return table


def _notes(
    results: Sequence[PolicyResult], scenario: Scenario, target: float, table: ThroughputTable | None
) -> Iterator[str]:
    from benchmarks.simulation.comparison import reference

    leave = "at the target" if scenario.world.until == "target" else "at the end of their curve"
    yield (
        f"Time until good trials reach {target:.4g} (as {scenario.recorded_good} of the {scenario.recorded} recorded "
        f"trials do); x: as a multiple of {reference(results).name}."
    )
    yield (
        f"Quantum {scenario.quantum_s:.4g} s, overhead {scenario.world.overhead_s:.4g} s, a report every "
        f"{scenario.world.report_s:.4g} s; trials leave {leave}."
    )
    if table is not None:
        yield (
            f"Each trial is one of {len(scenario.table_jobs)} jobs of {table.path.name}; recorded seconds are those of "
            f"a {table.reference}. completion: mean time until a trial leaves; speed: of a GPU's trial, by its mean "
            "over the types."
        )


def _to_json(
    results: Sequence[PolicyResult],
    scenario: Scenario,
    target: float,
    curves: str,
    seeds: range,
    table: ThroughputTable | None,
) -> dict[str, Any]:
    typed: dict[str, Any] = {}
    if table is not None:
        typed = {
            "gpu_types": list(scenario.world.kinds),
            "throughputs": str(table.path),
            "reference_type": table.reference,
            "table_jobs": [job.name for job in scenario.table_jobs],
            "move_overhead_s": scenario.world.move_s,
        }
    return {
        "policies": {
            result.name: {
                "mean_time_good_s": result.mean_time_good_s,
                "time_first_s": result.time_first_s,
                "time_top4_s": result.time_top4_s,
                "preemptions": result.preemptions,
                **({"mean_completion_s": result.mean_completion_s, "speed": result.speed} if typed else {}),
            }
            for result in results
        },
        "target": target,
        "settings": {
            "curves": curves,
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
            "trials_per_slot": scenario.trials_per_slot,
            "milestones": ",".join(map(str, scenario.milestones)) or "none",
            "quantum_growth": scenario.quantum_growth,
            "until": scenario.world.until,
            **typed,
        },
    }
