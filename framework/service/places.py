"""Where jobs would start, remembered, since the loop waits while it is planned."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Hashable

from framework.service.seat import Seat
from framework.service.sizing import Fit, Nodes

logger = logging.getLogger(__name__)

KEPT = 512
"""Answers kept, for different jobs and agents: more than it takes to find out who makes way for one job."""
ALLOWED_S = 0.5
"""Plans that have taken so long together are not followed by another one at once: the loop has other things to do."""
REST = 10
"""So many times as long as plans take beyond that nothing is planned then."""


class Places:
    """Answers of jobs' sizings, one for jobs that are alike.

    Args:
        clock: seconds, monotonic; tells how long planning took.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._known: OrderedDict[Hashable, Fit] = OrderedDict()
        self._failed: set[str] = set()
        self._spent_s = 0.0
        self._counted_s = clock()

    def fit(self, seat: Seat, nodes: Nodes) -> Fit | None:
        """Where a job would start on these agents; nowhere if its sizing raises, and None if there is no time now."""
        if seat.sizing is None:
            return Fit()
        kind = seat.tenant.demand_key
        key = (seat.job_id if kind is None else (kind,), nodes)
        if key in self._known:
            self._known.move_to_end(key)
            return self._known[key]
        began_s = self._clock()
        self._spent_s = max(0.0, self._spent_s - (began_s - self._counted_s) / REST)
        self._counted_s = began_s
        if self._spent_s >= ALLOWED_S:
            return None
        fit = self._known[key] = self._asked(seat.job_id, seat.sizing.fit, nodes)
        self._counted_s = self._clock()
        self._spent_s += self._counted_s - began_s
        if len(self._known) > KEPT:
            self._known.popitem(last=False)
        return fit

    def forget(self, job_ids: set[str]) -> None:
        """Only these jobs are left."""
        self._failed &= job_ids

    def _asked(self, job_id: str, ask: Callable[[Nodes], Fit], nodes: Nodes) -> Fit:
        try:
            return ask(nodes)
        except Exception as error:
            # Whatever is wrong with one job is for itself to find out when it plans; the others go on.
            if job_id not in self._failed:
                self._failed.add(job_id)
                logger.warning("it cannot be said where job %s would start: %r", job_id, error, exc_info=True)
            return Fit()
