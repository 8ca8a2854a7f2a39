"""What the pictures of training jobs' policies are drawn from."""

from __future__ import annotations

from itertools import pairwise

import pytest

from benchmarks.jobs.job_plots import colours_of, schedule_of, stacked
from benchmarks.simulation.jobs.machines import Machines
from benchmarks.simulation.jobs.scheduler import SCHEDULERS
from tests.benchmarks.jobs_cases import job

MACHINES = Machines(count=2, gpus=4)
LENGTHS_H = (3.0, 0.5, 2.0, 1.0, 4.0, 1.5)
JOBS = [
    job(number, arrival_s=400.0 * number, samples=36_000 * hours, requested=2 + number % 3)
    for number, hours in enumerate(LENGTHS_H)
]


@pytest.mark.parametrize("policy", SCHEDULERS)
def test_what_is_drawn_is_what_happened(policy: str) -> None:
    schedule = schedule_of(policy, JOBS, MACHINES, seed=0)
    gpus = MACHINES.count * MACHINES.gpus
    for one, completion_s in zip(JOBS, schedule.outcome.completion_s, strict=True):
        held = [stretch for stretch in schedule.stretches if stretch.job == one.id]
        assert held[0].start_s >= one.arrival_s
        assert all(before.end_s <= after.start_s for before, after in pairwise(held))
        assert held[-1].end_s == pytest.approx(one.arrival_s + completion_s)
        # 10 samples a second for each worker, 8 where the job is spread; less what beginning costs.
        done = sum(10 * stretch.workers * (stretch.end_s - stretch.start_s) for stretch in held)
        assert one.samples < done < 2 * one.samples
    held_s = sum(stretch.workers * (stretch.end_s - stretch.start_s) for stretch in schedule.stretches)
    assert held_s == pytest.approx(schedule.outcome.gpu_share * gpus * schedule.outcome.makespan_s)
    drawn = list(stacked(schedule.stretches))
    assert len(drawn) == len(schedule.stretches)
    assert all(below >= 0 and below + stretch.workers <= gpus for stretch, below in drawn)
    assert any(below > 0 for _, below in drawn), "jobs run side by side"
    for (stretch, below), (following, above) in pairwise(drawn):
        together = following.start_s == stretch.start_s
        assert above == (below + stretch.workers if together else 0), "bands touch, and none lies on another"


def test_the_shortest_jobs_are_those_in_colour() -> None:
    colours = colours_of(JOBS)
    grey = [number for number, colour in colours.items() if colour[1:3] in ("b8", "cf", "df")]
    assert sorted(colours) == list(range(len(JOBS)))
    assert grey == [0, 4], "the two longest"
