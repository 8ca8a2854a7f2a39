"""The loop that feeds events to a work."""

from __future__ import annotations

import time

import pytest

from framework.mesos import events
from framework.mesos.events import EventScheduler
from framework.scheduler.session import _pump

DEADLINE_S = 30.0


class FakeWork:
    """Gets a new event for each one it has dealt with."""

    def __init__(self, scheduler: EventScheduler) -> None:
        self.ticks = 0
        self._scheduler = scheduler
        self._until = time.monotonic() + DEADLINE_S

    @property
    def done(self) -> bool:
        return self.ticks == 3

    def handle(self, event: events.Event) -> None:
        if time.monotonic() < self._until:
            self._scheduler.events.put(event)

    def tick(self) -> None:
        self.ticks += 1

    def cancel(self) -> None:
        """Nothing runs."""


@pytest.mark.slow
def test_what_is_due_is_done_however_many_events_come() -> None:
    scheduler = EventScheduler()
    work = FakeWork(scheduler)
    scheduler.events.put(events.AgentLost("S0"))
    started = time.monotonic()
    _pump(work, scheduler, deadline=started + DEADLINE_S)
    assert work.done
    assert time.monotonic() - started < DEADLINE_S
