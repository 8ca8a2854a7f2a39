"""How many tasks each job gets in a round.

A rule sees all jobs that are not finished and the resources of all machines in sum, and returns the counts of the jobs
that run, in the order in which they are to be placed.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from framework.simulation.jobs.machines import Counts, Hosts, TaskNeeds, counts_of, fits, share_of
from solver.calibration.nnls import Floats
from solver.jobs.free_capacity import NOTHING, Amounts, plus
from solver.online import OnlineJob, allocate

SHORTEST_S = 1.0
"""No job counts as if it had less time left."""


@dataclass(frozen=True)
class JobView:
    """What a scheduler sees of a job.

    Attributes:
        id: its place in the order of arrival.
        arrival_s: when it came.
        needs: what its tasks take.
        requested: workers that the user asks for.
        max_workers: most workers.
        max_ps: most parameter servers; 0 where there are none.
        hosts: where it is; empty where it waits.
        samples_left: those that it is believed to need still.
        samples_per_s: speeds that are believed: [ps - 1, workers - 1].
        young: whether little is known of it yet.
        waited: rounds in a row in which it had nothing.
    """

    id: int
    arrival_s: float
    needs: TaskNeeds
    requested: int
    max_workers: int
    max_ps: int
    hosts: Hosts
    samples_left: float
    samples_per_s: Floats
    young: bool
    waited: int

    def seconds_left(self, counts: Counts) -> float:
        """How long it is believed to take with so many tasks."""
        workers, ps = counts
        return self.samples_left / float(self.samples_per_s[max(1, ps) - 1, workers - 1])

    def one_to_one(self, workers: int) -> Counts:
        """So many workers and as many parameter servers, if it has any use for them."""
        return workers, min(workers, self.max_ps)

    def need(self, counts: Counts) -> Amounts:
        """What so many tasks take."""
        return self.needs.of(*counts)


Allocation = dict[int, Counts]
Allocate = Callable[[Sequence[JobView], Amounts, float], Allocation]
"""(jobs, resources of all machines, seconds that a change of size costs) -> counts by the job's id."""


def marginal_gain(jobs: Sequence[JobView], total: Amounts, resize_s: float) -> Allocation:
    """Optimus' (section 4.1), on what is believed: tasks go where they save most seconds per unit of what they take.

    Small jobs are placed first (section 4.2). A job keeps its size where a larger one would not save what the change
    costs, and where nobody needs what a smaller one would set free.
    """
    return _by_gain(jobs, total, resize_s, [1.0] * len(jobs))


def relative_gain(jobs: Sequence[JobView], total: Amounts, resize_s: float) -> Allocation:
    """As `marginal_gain`, but what is saved counts as a share of the time that one worker would need.

    A task saves a long job more seconds than a short one, so `marginal_gain` lets short jobs wait for long ones, which
    the mean completion time does not reward. Here the length cancels out: tasks go where they make a job faster by the
    largest factor, and no estimate of convergence is needed. It is close to proportional fairness (Kelly, 1997).
    """
    weights = [1 / max(job.seconds_left(job.one_to_one(1)), SHORTEST_S) for job in jobs]
    return _by_gain(jobs, total, resize_s, weights)


def _by_gain(jobs: Sequence[JobView], total: Amounts, resize_s: float, weights: Sequence[float]) -> Allocation:
    online = [
        OnlineJob(
            str(job.id),
            job.samples_left,
            job.samples_per_s,
            job.needs.worker,
            job.needs.ps,
            weight=weight,
            young=job.young,
            waited=job.waited,
        )
        for job, weight in zip(jobs, weights, strict=True)
    ]
    of_name = allocate(online, total)
    by_id = {job.id: job for job in jobs}
    counts = {
        job.id: (of_name[str(job.id)][0], min(of_name[str(job.id)][1], job.max_ps))
        for job in jobs
        if str(job.id) in of_name
    }
    _keep_sizes(by_id, counts, total, resize_s)
    return dict(sorted(counts.items(), key=lambda item: share_of(by_id[item[0]].need(item[1]), total)))


def _keep_sizes(jobs: dict[int, JobView], counts: Allocation, total: Amounts, resize_s: float) -> None:
    """Gives jobs the size back that they have, where another one is not worth the change."""
    left = _left(jobs, counts, total)
    changes = [id_ for id_, wanted in counts.items() if jobs[id_].hosts and wanted != counts_of(jobs[id_].hosts)]
    # Those that would grow most set free what others need to stay as they are.
    for id_ in sorted(changes, key=lambda one: -share_of(jobs[one].need(counts[one]), total)):
        job, now = jobs[id_], counts_of(jobs[id_].hosts)
        more = plus(job.need(now), job.need(counts[id_]), -1)
        if fits(more, left) and job.seconds_left(now) - job.seconds_left(counts[id_]) <= resize_s:
            left = plus(left, more, -1)
            counts[id_] = now


def fair(jobs: Sequence[JobView], total: Amounts, resize_s: float) -> Allocation:
    """Dominant resource fairness (Ghodsi et al., NSDI 2011, Algorithm 1), work-conserving.

    Again and again the job with the least dominant share gets a worker and a ps more, of those that can use them and
    for which there is room.
    """
    counts: Allocation = {}
    left = total
    heap = [(0.0, job.arrival_s, job.id, job) for job in jobs]
    heapq.heapify(heap)
    while heap:
        _, arrival_s, id_, job = heapq.heappop(heap)
        now = counts.get(id_, (0, 0))
        following = job.one_to_one(now[0] + 1)
        more = plus(job.need(following), job.need(now), -1)
        if now[0] < job.max_workers and fits(more, left):
            left = plus(left, more, -1)
            counts[id_] = following
            heapq.heappush(heap, (share_of(job.need(following), total), arrival_s, id_, job))
    return dict(sorted(counts.items()))


def tetris(jobs: Sequence[JobView], total: Amounts, resize_s: float) -> Allocation:
    """Tetris' (Grandl et al., SIGCOMM 2014, section 3.3): packing and the shortest remaining time together.

    A job's score is the alignment of what a worker and a ps take with what there is (the inner product of shares), plus
    the negative remaining work (time left with the requested size x its dominant share), weighed so that both count
    alike on average. By score jobs get what was requested; what is left then goes to them by the same order, a worker
    and a ps at a time as long as that is believed to make the job faster.
    """

    def remaining(job: JobView) -> float:
        counts = job.one_to_one(job.requested)
        return job.seconds_left(counts) * share_of(job.need(counts), total)

    def alignment(job: JobView) -> float:
        need = job.need(job.one_to_one(1))
        return sum(wanted / there for wanted, there in zip(need, total, strict=True) if there)

    weight = sum(map(alignment, jobs)) / max(sum(map(remaining, jobs)), 1e-12)
    ordered = sorted(jobs, key=lambda job: (weight * remaining(job) - alignment(job), job.id))
    counts: Allocation = {}
    left = total
    for beyond_request in (False, True):
        for job in ordered:
            for workers in range(counts.get(job.id, (0, 0))[0], job.max_workers if beyond_request else job.requested):
                now, following = job.one_to_one(workers), job.one_to_one(workers + 1)
                more = plus(job.need(following), job.need(now), -1)
                slower = beyond_request and workers and job.seconds_left(following) >= job.seconds_left(now)
                if slower or not fits(more, left):
                    break
                left = plus(left, more, -1)
                counts[job.id] = following
    return counts


def first_come(jobs: Sequence[JobView], total: Amounts, resize_s: float) -> Allocation:
    """Each gets what it has requested, in the order of arrival, and keeps it; who does not fit makes others wait."""
    counts = {job.id: counts_of(job.hosts) for job in jobs if job.hosts}
    left = _left({job.id: job for job in jobs}, counts, total)
    for job in sorted(jobs, key=lambda one: one.id):
        if job.hosts:
            continue
        need = job.need(job.one_to_one(job.requested))
        if not fits(need, left):
            break
        left = plus(left, need, -1)
        counts[job.id] = job.one_to_one(job.requested)
    return counts


def _left(jobs: dict[int, JobView], counts: Allocation, total: Amounts) -> Amounts:
    used = NOTHING
    for id_, wanted in counts.items():
        used = plus(used, jobs[id_].need(wanted))
    return plus(total, used, -1)
