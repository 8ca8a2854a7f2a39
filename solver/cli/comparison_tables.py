"""Several plans side by side as tables for the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console

from solver.choices import METHODS
from solver.cli.output import new_table
from solver.comparison import Comparison
from solver.plan import Plan
from solver.units import format_bytes
from solver.variants import Variant, shared_guesses


def print_variants(console: Console, variants: Sequence[Variant], title: str) -> None:
    """Prints one row for each variant; speeds are relative to the first with a plan."""
    table = new_table(title, "", "workers", "ps", "CPUs", "GPUs", "machines", "samples/s", "speed")
    first = next((variant.plan for variant in variants if variant.plan is not None), None)
    for variant in variants:
        if variant.plan is None or first is None:
            table.add_row(variant.label, *["-"] * 5, "does not fit", "-")
        else:
            share = f"{variant.plan.samples_per_s / first.samples_per_s:.0%}"
            table.add_row(variant.label, *_option(variant.plan), f"{variant.plan.samples_per_s:,.0f}", share)
    console.print(table)
    for variant in variants:
        if variant.plan is None:
            console.print(f"- {variant.label}: {variant.reason}")
    for guess in shared_guesses(variants):
        console.print(f"- {guess}", markup=False)


def print_comparison(console: Console, comparison: Comparison) -> None:
    """Prints one row for each method, fastest first."""
    columns = ("workers", "ps", "CPUs", "GPUs", "machines", "samples/s", "of the best", "traffic (Eq. 1)", "took")
    table = new_table("Methods, by the same step-time model", "method", *columns)
    for row in comparison.rows:
        if row.reason:
            table.add_row(row.method, *["-"] * 8, f"{row.seconds:.2f} s")
            continue
        counts = _counts(row.kinds, row.ps, row.machines)
        worth = (f"{row.samples_per_s:,.0f}", f"{row.share:.1%}", format_bytes(row.traffic_bytes))
        table.add_row(row.method, *counts, *worth, f"{row.seconds:.2f} s")
    console.print(table)
    for row in comparison.rows:
        console.print(f"- {row.method}: {row.reason or METHODS[row.method]}")


def _option(plan: Plan) -> tuple[str, ...]:
    kinds = [(count, task.cpus, task.gpus) for task, count in plan.worker_kinds]
    return _counts(kinds, plan.option.ps, len({task.node for task in plan.tasks}))


def _counts(kinds: Sequence[tuple[int, float, int]], ps: int, machines: int) -> tuple[str, ...]:
    """Workers, ps, a worker's CPUs and GPUs, machines; different workers are joined: `6 + 26`, `4 + 1`, `1 + 0`."""
    workers, cpus, gpus = (" + ".join(f"{kind[index]:g}" for kind in kinds) for index in range(3))
    return workers, str(ps), cpus, gpus, str(machines)
