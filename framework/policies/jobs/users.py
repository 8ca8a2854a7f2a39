"""Shares of the cluster for users, by their weights."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence

from framework.policies.jobs.interface import Account, JobView, share_of
from solver.jobs.free_capacity import NOTHING
from solver.resources import Amounts


def user_limits(jobs: Sequence[JobView], total: Amounts, weight: Callable[[str], float]) -> dict[str, float]:
    """Computes weighted dominant resource fairness between users (Ghodsi et al., NSDI 2011), in whole tasks.

    Repeatedly gives one more worker and ps to the user with the smallest ratio of dominant share to weight (above 0),
    among those with a job that can use them and fits; of the user's jobs, to the one with the smallest share.

    Returns:
        User -> maximum dominant share of the user's jobs together; empty if there is only one user.
    """
    users = sorted({job.user for job in jobs})
    if len(users) < 2:
        return {}
    account = Account(jobs, total, {})

    def share(user: str) -> float:
        return share_of(account.used.get(user, NOTHING), total)

    queues: dict[str, list[tuple[float, float, int, JobView]]] = {user: [] for user in users}
    for job in jobs:
        queues[job.user].append((share_of(job.need(job.kept), total), job.arrival_s, job.id, job))
    for queue in queues.values():
        heapq.heapify(queue)
    first = {user: queue[0][1] for user, queue in queues.items()}
    heap = [(share(user) / weight(user), first[user], user) for user in users]
    heapq.heapify(heap)
    while heap:
        _, _, user = heapq.heappop(heap)
        queue = queues[user]
        while queue:
            _, arrival_s, id_, job = heapq.heappop(queue)
            if (following := account.give_next(job)) is not None:
                heapq.heappush(queue, (share_of(job.need(following), total), arrival_s, id_, job))
                heapq.heappush(heap, (share(user) / weight(user), first[user], user))
                break
    return {user: share(user) for user in users}
