"""Order of jobs: by priority, then by weighted fair share between users, then by arrival."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from framework.scheduler.amounts import Amounts
from framework.scheduler.job import Need
from framework.scheduler.queue_options import Priority


@dataclass(frozen=True)
class QueueCandidate:
    """A job that requests offers; `rank` is its place among the priorities, 0 for the highest."""

    job_id: str
    user: str
    number: int
    need: Need
    rank: int = Priority.NORMAL.rank


class FairQueue:
    """Weighted dominant resource fairness (Ghodsi et al., NSDI 2011) between users.

    Replacements of lost tasks come first, regardless of the user's share: the rest of their job occupies resources, or
    the job had these a moment ago. Then jobs start by priority, and by share within a priority; then jobs grow.

    Args:
        weight: user -> weight, above 0; twice the weight entitles to twice the share.
    """

    def __init__(self, weight: Callable[[str], float] = lambda user: 1.0) -> None:
        self._weight = weight

    def order(
        self, candidates: Sequence[QueueCandidate], allocated: Mapping[str, Amounts], total: Amounts
    ) -> list[QueueCandidate]:
        """Returns the candidates in service order.

        Args:
            candidates: jobs that request offers.
            allocated: user -> amounts of the user's tasks.
            total: the cluster's amounts; resources that it lacks do not count.
        """
        shares = self.shares({candidate.user for candidate in candidates}, allocated, total)
        return sorted(candidates, key=lambda one: (one.need, one.rank, shares[one.user], one.number))

    def shares(self, users: Iterable[str], allocated: Mapping[str, Amounts], total: Amounts) -> dict[str, float]:
        """User -> dominant share of the cluster, divided by the user's weight."""
        return {user: dominant_share(allocated.get(user, {}), total) / self._weight(user) for user in users}


def dominant_share(allocated: Amounts, total: Amounts) -> float:
    """The largest share of any resource, 0 to 1."""
    return max((amount / total[name] for name, amount in allocated.items() if total.get(name, 0.0) > 0), default=0.0)
