"""A job as the hub sees it: something that is fed events, wants offers now and then, and can be taken up again."""

from __future__ import annotations

import enum
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from framework import events
from framework.service.records import JobState

CANCELLED = "cancelled"
INTERRUPTED = "interrupted"
"""Failures of a training job and of a search that did nothing wrong, and that somebody has ended."""


class Need(enum.IntEnum):
    """What a job wants offers for; the smaller, the sooner it is served."""

    COME_BACK = 0
    """A job that has run wants back what it has lost, unless it fails again and again."""
    START = 1
    """Its first tasks, or one more slot."""
    GROW = 2
    """It runs well, and looks whether more would pay."""
    NOTHING = 3


@dataclass(frozen=True)
class Outcome:
    """How a job ended.

    Attributes:
        state: one that `has_ended`.
        failure: why it failed or ended early, in one sentence; empty if it did neither.
        result: as `dike run --format json` or `dike tune --format json` prints it; None where there is none.
    """

    state: JobState
    failure: str = ""
    result: dict[str, Any] | None = None


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

    def outcome(self) -> Outcome:
        """How it ended; asked once it is `done`."""

    def close(self) -> None:
        """Lets go of what it holds, such as a lease; called once, when it has lost its seat, `done` or not."""


@runtime_checkable
class Vacating(Protocol):
    """A tenant that can leave agents to others without losing anything."""

    def vacatable(self) -> frozenset[str]:
        """Ids of the tasks that it would end at the moment if it were asked to, and of those that it is ending."""

    def vacate(self, agent_ids: frozenset[str]) -> None:
        """Gives back what it holds on these agents, as soon as it can; may be asked for again and again."""


@dataclass(frozen=True)
class Spare:
    """What an elastic job could give up.

    Attributes:
        task_ids: tasks that it could do without, those that it misses least first.
        most: how many of them at the same time.
        leaving: tasks that it is giving up already.
    """

    task_ids: tuple[str, ...] = ()
    most: int = 0
    leaving: frozenset[str] = frozenset()


@runtime_checkable
class Shrinking(Protocol):
    """A tenant that can go on with fewer tasks."""

    def spare(self) -> Spare:
        """What it could give up now, or soon."""

    def give_up(self, task_ids: frozenset[str], reason: str) -> None:
        """Asks it to end these tasks as soon as it can, and not to grow meanwhile; may be asked again and again.

        Args:
            task_ids: which; those that have ended may be among them. None: it is not asked any more.
            reason: whose wish that is, as a sentence for its user.
        """


@runtime_checkable
class Planning(Protocol):
    """A tenant that may plan in the background."""

    @property
    def is_planning(self) -> bool:
        """Whether it does, and keeps the offers that it has looked at for that."""


@runtime_checkable
class Excluding(Protocol):
    """A tenant that leaves agents out for a while after failures there."""

    def excluded_agents(self) -> dict[str, float]:
        """Id of each such agent -> for how many seconds it still is left out."""


@runtime_checkable
class Holder(Protocol):
    """A tenant that holds something in the name of this service, such as a lease."""

    def leave(self) -> None:
        """Lets go of it: another service goes on with the job. Nothing else is called after that."""
