"""Exchanges resources between pairs of jobs if that saves time in sum; for few jobs only."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence

from solver.jobs.allocation import Counts
from solver.jobs.forms import Form
from solver.jobs.job import PlanJob
from solver.jobs.one_job import OneJob
from solver.jobs.packing import JobPlacement, Packer
from solver.units import SPEED_TIE_SHARE

MAX_EXCHANGE_JOBS = 12
"""Maximum number of jobs: with more there are too many pairs, and gains of a pair average out."""


def exchange(
    jobs: Sequence[PlanJob],
    forms: Mapping[int, Sequence[Form]],
    placements: dict[int, JobPlacement],
    packer: Packer,
    one_job: OneJob,
    is_time_over: Callable[[], bool],
) -> bool:
    """Removes two jobs, places the first in every way it might grow and the second as fast as then possible.

    Updates `placements` where that is better; returns whether any pair improved.
    """
    better = False
    ways = {index: _ways(jobs[index], forms[index]) for index in placements}
    alone = {index: min(_least_s(jobs[index], form) for form in forms[index]) for index in placements}
    for first, second in itertools.permutations(sorted(placements), 2):
        if is_time_over():
            break
        old = placements[first], placements[second]
        packer.release(old[0])
        packer.release(old[1])
        least = (1 - SPEED_TIE_SHARE) * sum(
            _weighted_s(jobs[index], placement) for index, placement in zip((first, second), old, strict=True)
        )
        best = old
        for promised_s, form, counts in ways[first]:
            if promised_s + alone[second] >= least:
                break
            one = packer.place(form, *counts)
            if one is None:
                continue
            spent = _weighted_s(jobs[first], one)
            if spent < least:
                one_job.clear_failures()
                floor = jobs[second].weight * jobs[second].samples / (least - spent)
                other = one_job.fastest(jobs[second], forms[second], floor)
                if other is not None:
                    best = one, other.placement
                    least = spent + _weighted_s(jobs[second], other.placement)
            packer.release(one)
        for index, placement in zip((first, second), best, strict=True):
            packer.restore(placement)
            placements[index] = placement
        better |= best is not old
    return better


def _weighted_s(job: PlanJob, placement: JobPlacement) -> float:
    return job.weight * job.samples / placement.samples_per_s


def _least_s(job: PlanJob, form: Form) -> float:
    """Weighted time of the job with the form to itself; infinite if the form cannot hold its minimum."""
    return job.weight * job.samples * form.table.least_s_per_sample(job.min_workers, form.most_workers(job))


def _ways(job: PlanJob, forms: Sequence[Form]) -> list[tuple[float, Form, Counts]]:
    """Ways to run the job as it grows from its minimum, with the table's weighted time; fastest first.

    Leaves out ways that take no less of the same machines than a faster one.
    """
    ways: list[tuple[float, float, Form, Counts]] = []
    for form in forms:
        table = form.table
        counts: Counts | None = (job.min_workers, 1) if job.min_workers <= form.most_workers(job) else None
        while counts is not None:
            weighted_s = job.weight * job.samples * table.s_per_sample(*counts)
            ways.append((weighted_s, table.share(table.needs(*counts)), form, counts))
            more = table.next_tasks(counts, form.most_workers(job))
            counts = None if more is None else more.counts
    ways.sort(key=lambda way: way[:2])
    least: dict[bytes, float] = {}
    worth = []
    for weighted_s, share, form, counts in ways:
        if share < least.get(form.pool, 2.0):
            least[form.pool] = share
            worth.append((weighted_s, form, counts))
    return worth
