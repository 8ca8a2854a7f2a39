"""Draws the schedules of all policies for the same training jobs: workers over time, and waiting times."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from benchmarks.jobs.cases import DATA, SEEDS, ratio
from benchmarks.search.policy_plots import GOOD_COLOURS, HOUR_S, OTHER_COLOURS, PICTURES
from benchmarks.simulation.jobs.comparison import Sources, Workload, compare, reference
from benchmarks.simulation.jobs.machines import Machines
from benchmarks.simulation.jobs.scheduler import REFERENCE, scheduler_named
from benchmarks.simulation.jobs.schedulers import SCHEDULERS
from benchmarks.simulation.jobs.workload import SimulatedJob
from benchmarks.simulation.jobs.world import JobsOutcome, JobsSettings, JobsWorld, Stretch
from solver.drawing.figure_files import new_figure, save_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

TITLE = "What each policy does, drawn"
MACHINES = Machines(count=4)
WORKLOAD = Workload(jobs=12, per_hour=8)
SEED = 0
"""Seed of the jobs; its times are close to the means of the case all-reduce."""


@dataclass(frozen=True)
class Schedule:
    """Outcome of one policy, and the time spans in which jobs had workers, in time order."""

    outcome: JobsOutcome
    stretches: Sequence[Stretch]


def schedule_of(policy: str, jobs: Sequence[SimulatedJob], machines: Machines, seed: int) -> Schedule:
    """Runs one policy. `jobs`: in order of arrival; `seed`: of the measurement noise."""
    stretches: list[Stretch] = []
    outcome = JobsWorld(jobs, machines, scheduler_named(policy), JobsSettings(), seed, stretches.append).run()
    return Schedule(outcome, stretches)


def measure() -> Iterator[str]:
    """Reports the figures, and draws the pictures of docs/policies.md."""
    sources = Sources.read(DATA / "pollux", None, MACHINES)
    jobs = WORKLOAD.draw(sources.models(SEED), MACHINES, SEED)
    schedules = {name: schedule_of(name, jobs, MACHINES, SEED) for name in SCHEDULERS}
    of_seeds = compare(sources, WORKLOAD, tuple(SCHEDULERS), JobsSettings(), SEEDS)
    unit, unit_of_seeds = schedules[REFERENCE].outcome, reference(of_seeds)
    gpus = MACHINES.count * MACHINES.gpus
    shortest_h, *_, longest_h = sorted(_alone_s(job) / HOUR_S for job in jobs)
    yield f"{WORKLOAD.jobs} jobs of the models of all-reduce, {WORKLOAD.per_hour:g} an hour on average, on {gpus} GPUs:"
    yield f"those of seed {SEED}, which take {shortest_h:.1f} to {longest_h:.1f} hours with one worker, and which the"
    yield "pictures in [docs/policies.md](../../docs/policies.md#policies-for-training-jobs) show."
    yield f"x: as a multiple of {REFERENCE}' mean completion time; in the last column by seed, {len(SEEDS)} seeds."
    yield ""
    yield "| policy | mean completion, h | x | makespan, h | GPUs in use | resizes | x of all seeds |"
    yield "|---|---|---|---|---|---|---|"
    for (name, schedule), result in zip(schedules.items(), of_seeds, strict=True):
        outcome = schedule.outcome
        yield (
            f"| {name} | {outcome.mean_completion_s / HOUR_S:.2f} "
            f"| {outcome.mean_completion_s / unit.mean_completion_s:.2f} | {outcome.makespan_s / HOUR_S:.2f} "
            f"| {outcome.gpu_share:.0%} | {outcome.resizes} | {ratio(result, unit_of_seeds)} |"
        )
    PICTURES.mkdir(exist_ok=True)
    end_s = max(stretch.end_s for schedule in schedules.values() for stretch in schedule.stretches)
    for name, schedule in schedules.items():
        _draw(name, jobs, schedule, end_s)


def colours_of(jobs: Sequence[SimulatedJob]) -> dict[int, str]:
    """Job -> colour; the jobs with the least work are coloured, the others grey."""
    by_length = sorted(jobs, key=_alone_s)
    short = {job.id: colour for job, colour in zip(by_length, GOOD_COLOURS, strict=False)}
    return {job.id: short.get(job.id, OTHER_COLOURS[job.id % len(OTHER_COLOURS)]) for job in jobs}


def _alone_s(job: SimulatedJob) -> float:
    """Seconds of training with one worker."""
    return job.samples / job.model.samples_per_s(((1, min(1, job.model.max_ps)),), job.batch_size, sharding="greedy")


def stacked(stretches: Sequence[Stretch]) -> Iterator[tuple[Stretch, int]]:
    """Yields each span and the number of workers of earlier jobs in the same round, for a stacked plot."""
    start_s, below = -1.0, 0
    for stretch in sorted(stretches, key=lambda one: (one.start_s, one.job)):
        if stretch.start_s != start_s:
            start_s, below = stretch.start_s, 0
        yield stretch, below
        below += stretch.workers


def _draw(name: str, jobs: Sequence[SimulatedJob], schedule: Schedule, end_s: float) -> None:
    figure = new_figure(9, 4.6)
    workers, lives = figure.subplots(2, height_ratios=(1.3, 1), sharex=True)
    colours = colours_of(jobs)
    _draw_workers(workers, schedule, colours)
    _draw_lives(lives, jobs, schedule, colours)
    outcome = schedule.outcome
    workers.set_title(
        f"{name}: {outcome.mean_completion_s / HOUR_S:.2f} h from arrival to end in the mean, "
        f"{outcome.gpu_share:.0%} of the GPUs in use",
        loc="left",
    )
    workers.set_xlim(0, end_s / HOUR_S)
    lives.set_xlabel("hours since the first job came")
    figure.tight_layout()
    save_figure(figure, PICTURES / f"jobs-{name}.png")


def _draw_workers(axes: Axes, schedule: Schedule, colours: dict[int, str]) -> None:
    for stretch, below in stacked(schedule.stretches):
        span_h = (stretch.start_s / HOUR_S, (stretch.end_s - stretch.start_s) / HOUR_S)
        axes.broken_barh([span_h], (below, stretch.workers), facecolors=colours[stretch.job])
        axes.hlines(below, span_h[0], sum(span_h), colors="white", linewidth=0.8)
    gpus = MACHINES.count * MACHINES.gpus
    axes.axhline(gpus, color="#d6604d", linewidth=0.8)
    axes.set_ylim(0, gpus + 0.5)
    axes.set_ylabel(f"workers, of {gpus} GPUs")


def _draw_lives(axes: Axes, jobs: Sequence[SimulatedJob], schedule: Schedule, colours: dict[int, str]) -> None:
    for row, (job, completion_s) in enumerate(zip(jobs, schedule.outcome.completion_s, strict=True)):
        axes.hlines(row, job.arrival_s / HOUR_S, (job.arrival_s + completion_s) / HOUR_S, colors="black", linewidth=0.8)
        held = [stretch for stretch in schedule.stretches if stretch.job == job.id]
        axes.broken_barh(
            [(stretch.start_s / HOUR_S, (stretch.end_s - stretch.start_s) / HOUR_S) for stretch in held],
            (row - 0.42, 0.84),
            facecolors=colours[job.id],
        )
    axes.set_yticks([])
    axes.invert_yaxis()
    axes.set_ylabel("jobs, by arrival")
