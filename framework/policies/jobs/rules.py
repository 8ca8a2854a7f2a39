"""Policies for training jobs: Optimus, Dike's own, dominant resource fairness, Tetris, and first come, first served."""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence

from framework.policies.jobs.interface import Account, Allocation, JobView, Limits, fits, share_of
from solver.jobs.free_capacity import plus
from solver.online import OnlineJob, allocate
from solver.resources import Amounts

MIN_REMAINING_S = 1.0
"""Lower bound of a job's remaining time when gains are weighted by it."""
NO_LIMITS: Limits = {}


def marginal_gain(jobs: Sequence[JobView], total: Amounts, limits: Limits = NO_LIMITS) -> Allocation:
    """Optimus (section 4.1) on estimates: adds tasks where they save most seconds per unit of resources.

    Small jobs are placed first (section 4.2). A job keeps its size if a larger one would not save the cost of the
    change, or if no other job needs what a smaller one would free.
    """
    return _by_gain(jobs, total, limits, [1.0] * len(jobs))


def relative_gain(jobs: Sequence[JobView], total: Amounts, limits: Limits = NO_LIMITS) -> Allocation:
    """Like `marginal_gain`, but saved time counts as a share of the time needed at minimum size.

    A task saves a long job more seconds than a short one, so `marginal_gain` makes short jobs wait, which harms the
    mean completion time. Here tasks go where they speed up a job by the largest factor, without estimates of
    convergence. Close to proportional fairness (Kelly, 1997).
    """
    weights = [1 / max(job.seconds_left(job.one_to_one(job.min_workers)), MIN_REMAINING_S) for job in jobs]
    return _by_gain(jobs, total, limits, weights)


def _by_gain(jobs: Sequence[JobView], total: Amounts, limits: Limits, weights: Sequence[float]) -> Allocation:
    online = [
        OnlineJob(
            str(job.id),
            job.samples_left,
            job.samples_per_s,
            job.needs.worker,
            job.needs.ps,
            chief=job.chief,
            min_workers=job.min_workers,
            min_ps=max(1, job.min_ps),
            kept=job.kept,
            user=job.user,
            weight=weight,
            young=job.young,
            waited=job.waited,
            is_gang=job.max_ps == 0,
        )
        for job, weight in zip(jobs, weights, strict=True)
    ]
    by_name = allocate(online, total, limits)
    by_id = {job.id: job for job in jobs}
    counts = {job.id: by_name[str(job.id)] for job in jobs if str(job.id) in by_name}
    counts = drop_unprofitable_changes(jobs, counts, total)
    return dict(sorted(counts.items(), key=lambda item: share_of(by_id[item[0]].need(item[1]), total)))


def drop_unprofitable_changes(
    jobs: Sequence[JobView], allocation: Mapping[int, tuple[int, int]], total: Amounts
) -> Allocation:
    """Returns the allocation with the current size for jobs whose change does not pay.

    A larger size does not pay if it saves less time than the change costs; a smaller one, if no other job needs what it
    frees.
    """
    by_id, counts = {job.id: job for job in jobs}, dict(allocation)
    left = total
    for id_, wanted in counts.items():
        left = plus(left, by_id[id_].need(wanted), -1)
    changes = [id_ for id_, wanted in counts.items() if by_id[id_].now[0] and wanted != by_id[id_].now]
    # Jobs that would grow most come first: they free what others need to keep their size.
    for id_ in sorted(changes, key=lambda one: -share_of(by_id[one].need(counts[one]), total)):
        job = by_id[id_]
        more = plus(job.need(job.now), job.need(counts[id_]), -1)
        if fits(more, left) and job.seconds_left(job.now) - job.seconds_left(counts[id_]) <= job.change_s:
            left = plus(left, more, -1)
            counts[id_] = job.now
    return counts


def fair(jobs: Sequence[JobView], total: Amounts, limits: Limits = NO_LIMITS) -> Allocation:
    """Dominant resource fairness (Ghodsi et al., NSDI 2011, Algorithm 1), work-conserving.

    Repeatedly gives one more worker and ps to the job with the smallest dominant share, among those that can use them
    and fit.
    """
    account = Account(jobs, total, limits)
    heap = [(share_of(job.need(job.kept), total), job.arrival_s, job.id, job) for job in jobs]
    heapq.heapify(heap)
    while heap:
        _, arrival_s, id_, job = heapq.heappop(heap)
        if (following := account.give_next(job)) is not None:
            heapq.heappush(heap, (share_of(job.need(following), total), arrival_s, id_, job))
    return dict(sorted(account.counts.items()))


def tetris(jobs: Sequence[JobView], total: Amounts, limits: Limits = NO_LIMITS) -> Allocation:
    """Tetris (Grandl et al., SIGCOMM 2014, section 3.3): packing combined with shortest remaining time.

    Score: alignment of one worker and ps with the total (inner product of shares) minus remaining work (time at the
    requested size x dominant share), weighted so that both count equally on average. By score, jobs get what they
    request; then one more worker and ps at a time while the estimated speed rises.
    """

    def remaining(job: JobView) -> float:
        counts = job.one_to_one(job.requested)
        return job.seconds_left(counts) * share_of(job.need(counts), total)

    def alignment(job: JobView) -> float:
        need = job.need(job.one_to_one(1))
        return sum(amount / available for amount, available in zip(need, total, strict=True) if available)

    weight = sum(map(alignment, jobs)) / max(sum(map(remaining, jobs)), 1e-12)
    ordered = sorted(jobs, key=lambda job: (weight * remaining(job) - alignment(job), job.id))
    account = Account(jobs, total, limits)
    for beyond_request in (False, True):
        for job in ordered:
            most = job.max_workers if beyond_request else job.requested
            now = account.counts.get(job.id, (0, 0))
            while (following := job.one_to_one(max(now[0] + 1, job.min_workers)))[0] <= most:
                slower = beyond_request and now[0] and job.seconds_left(following) >= job.seconds_left(now)
                if slower or not account.fits(job, following):
                    break
                account.give(job, following)
                now = following
    return account.counts


def first_come(jobs: Sequence[JobView], total: Amounts, limits: Limits = NO_LIMITS) -> Allocation:
    """Gives each job what it requests, in order of arrival, until it ends. A job that does not fit blocks later ones.

    A job that would exceed its user's limit blocks only the user's other jobs.
    """
    account = Account([], total, limits)
    for job in jobs:
        if job.now[0]:
            account.give(job, job.now)
    full: set[str] = set()
    for job in sorted(jobs, key=lambda one: one.id):
        counts = job.one_to_one(job.requested)
        if job.now[0] or job.user in full:
            continue
        if account.fits(job, counts):
            account.give(job, counts)
        elif fits(job.need(counts), account.left):
            full.add(job.user)
        else:
            break
    return account.counts
