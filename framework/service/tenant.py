"""A job as the hub sees it: something that is fed events, wants offers now and then, and can be taken up again."""

from __future__ import annotations

import enum
from collections.abc import Hashable
from typing import Any, Protocol

from framework import events


class Need(enum.IntEnum):
    """What a job wants offers for; the smaller, the sooner it is served."""

    COME_BACK = 0
    """A job that has run wants back what it has lost."""
    START = 1
    """Its first tasks, or one more slot."""
    GROW = 2
    """It runs well, and looks whether more would pay."""
    NOTHING = 3


class Tenant(Protocol):
    """A job's state machine: `framework.training.TrainingJob`, `framework.search.search.Search`.

    All of it runs on the hub's thread. Offers that it is given have settled already; it accepts or declines them before
    `handle` or the following `tick` returns, or keeps them for a short while.
    """

    @property
    def done(self) -> bool:
        """Whether nothing of it runs any more."""

    @property
    def need(self) -> Need:
        """What it wants offers for at the moment."""

    @property
    def demand_key(self) -> Hashable:
        """Jobs of equal keys that want to start fit the same offers or do not; None for one like no other."""

    def handle(self, event: events.Event) -> None:
        """Takes one event in: those that concern its own tasks, its offers and the connection."""

    def tick(self) -> None:
        """Does what is due by time."""

    def cancel(self) -> None:
        """Ends all its tasks; `done` follows."""

    def to_state(self) -> dict[str, Any]:
        """What it needs to go on after a restart of the service, as JSON values; small enough to write often."""
