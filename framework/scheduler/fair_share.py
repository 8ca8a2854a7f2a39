"""Who looks at the offers first: weighted fair share between users, order of arrival within a user's jobs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from framework.scheduler.amounts import Amounts
from framework.scheduler.job import Need


@dataclass(frozen=True)
class Candidate:
    """A job that wants offers.

    Attributes:
        job_id, user: whose it is.
        number: order of arrival.
        need: what it wants them for.
    """

    job_id: str
    user: str
    number: int
    need: Need


class FairQueue:
    """Weighted dominant resource fairness (Ghodsi et al., NSDI 2011) between users.

    What a job has lost comes first, whoever it belongs to: its other tasks hold resources, or it held them just now.

    Args:
        weight: user -> weight, above 0; one with twice the weight is entitled to twice the share.
    """

    def __init__(self, weight: Callable[[str], float] = lambda user: 1.0) -> None:
        self._weight = weight

    def order(self, candidates: Sequence[Candidate], held: Mapping[str, Amounts], total: Amounts) -> list[Candidate]:
        """The candidates, who is to be served first first.

        Args:
            candidates: who wants offers.
            held: user -> what the user's tasks hold.
            total: what the cluster has; a resource that it does not have counts for nothing.
        """
        shares = self.shares({candidate.user for candidate in candidates}, held, total)
        return sorted(candidates, key=lambda one: (one.need, shares[one.user], one.number))

    def shares(self, users: Iterable[str], held: Mapping[str, Amounts], total: Amounts) -> dict[str, float]:
        """User -> dominant share of the cluster, divided by the user's weight."""
        return {user: dominant_share(held.get(user, {}), total) / self._weight(user) for user in users}


def dominant_share(held: Amounts, total: Amounts) -> float:
    """The largest share of any resource, 0 to 1."""
    return max((amount / total[name] for name, amount in held.items() if total.get(name, 0.0) > 0), default=0.0)
