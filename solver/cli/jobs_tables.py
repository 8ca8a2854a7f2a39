"""The plan of many jobs as tables for the terminal."""

from __future__ import annotations

from rich.console import Console

from solver.cli.output import new_table
from solver.jobs import JobsPlan, PlacedJob

MAX_JOBS = 40
"""Maximum number of jobs shown; JSON has all."""


def print_jobs_plan(console: Console, plan: JobsPlan) -> None:
    """Prints the placed jobs, the waiting ones with the reason, and the total use."""
    columns = ("workers", "ps", "CPUs", "GPUs", "machines", "samples/s", "remaining", "planned")
    table = new_table(f"{len(plan.placed):,} jobs placed", "job", *columns)
    for job in plan.placed[:MAX_JOBS]:
        table.add_row(job.name, *_row(job))
    console.print(table)
    _print_rest(console, len(plan.placed), "more are placed")
    for job in plan.placed[:MAX_JOBS]:
        if job.note:
            console.print(f"- {job.name}: {job.note}")
    if plan.unplaced:
        waiting = new_table(f"{len(plan.unplaced):,} jobs wait", "job", "why")
        for waiter in plan.unplaced[:MAX_JOBS]:
            waiting.add_row(waiter.name, waiter.reason)
        console.print(waiting)
        _print_rest(console, len(plan.unplaced), "more wait")
    console.print(
        f"{plan.tasks:,} tasks on {plan.machines_used:,} of {plan.machines:,} machines, {plan.gpus_used:,} of "
        f"{plan.gpus:,} GPUs used. Solved in {plan.solve_time_s:.2f} s (order: {plan.order})."
    )
    if not plan.complete:
        console.print("Planning stopped at the time limit before every job was optimised; raise --plan-timeout.")


def _row(job: PlacedJob) -> tuple[str, ...]:
    option = job.option
    machines = sum(len(part.machines) for part in job.placement)
    counts = (str(option.workers), str(option.ps), f"{option.worker.cpus:g}", str(option.worker.gpus), str(machines))
    return (*counts, f"{job.samples_per_s:,.0f}", _duration(job.remaining_s), job.method)


def _duration(seconds: float) -> str:
    for unit, length in (("d", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.1f} {unit}"
    return f"{seconds:.0f} s"


def _print_rest(console: Console, count: int, what: str) -> None:
    if count > MAX_JOBS:
        console.print(f"{count - MAX_JOBS:,} {what}; --format json lists them.")
