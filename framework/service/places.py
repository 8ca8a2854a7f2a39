"""Where jobs would start, remembered, since the loop waits while it is planned."""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable

from framework.service.seat import Seat
from framework.service.sizing import Fit, Nodes

logger = logging.getLogger(__name__)

KEPT = 64
"""Answers kept, for different jobs and agents."""
LONG_S = 0.1
"""A plan that took longer is not followed by another one at once."""
REST = 10
"""So many times as long as it took nothing is planned then: the loop has other things to do."""


class Places:
    """Answers of jobs' sizings, one for jobs that are alike.

    Args:
        clock: seconds, monotonic; tells how long planning took.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._known: OrderedDict[Hashable, Fit] = OrderedDict()
        self._failed: set[str] = set()
        self._rests_until_s = 0.0

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
        if began_s < self._rests_until_s:
            return None
        fit = self._known[key] = self._asked(seat.job_id, seat.sizing.fit, nodes)
        took_s = self._clock() - began_s
        if took_s > LONG_S:
            self._rests_until_s = began_s + (1 + REST) * took_s
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
