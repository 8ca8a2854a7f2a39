"""The phases of a trial's run in a slot: a table of what leads from one to the next.

`executor.trial_run.SlotRun` reports what happens; anything that is not in the table is a defect. `docs/architecture.md`
shows the table as a diagram.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from types import MappingProxyType


class Phase(enum.StrEnum):
    """A phase of a run. It occupies its slot in all of them but the last two."""

    PREPARING = "preparing"
    """It has no process: its folder is being made, and then a fork is requested."""
    RUNNING = "running"
    SUSPENDING = "suspending"
    """It was asked to save and end, and is killed at its deadline if it can be saved."""
    PAUSING = "pausing"
    """It was asked to save and wait, and is killed at its deadline if it can be saved."""
    STOPPING = "stopping"
    """It was sent SIGTERM or SIGKILL, or has just died in memory."""
    PAUSED = "paused"
    """It has saved and waits. Its GPU memory is being moved to the host, and then its processes are frozen. If its slot
    ends, its process dies or the move fails, it is evicted; the trial resumes from its checkpoint.
    """
    EXITED = "exited"
    """It has no process any more, or never had one: leftovers are killed, and the release of GPU memory is awaited."""
    FROZEN = "frozen"
    """Its processes are frozen without GPU memory; its outputs are being saved."""
    CLEARED = "cleared"
    """Nothing of it runs; its outputs are being saved."""
    PARKED = "parked"
    """It waits in memory for the trial's next run (`executor.paused`)."""
    DONE = "done"


class Event(enum.StrEnum):
    """What happens to a run."""

    FORKED = "forked"
    CANCELLED = "cancelled"
    """It is not wanted any more, or cannot be started."""
    SUSPEND = "suspend"
    """It is not wanted any more, and can be saved."""
    PAUSE = "pause"
    """The same, and memory suffices to keep its process."""
    STOP = "stop"
    """Its slot or trial is ended while it trains or saves, or it has exceeded a limit."""
    DEADLINE = "deadline"
    """It has not ended in time."""
    WAITS = "waits"
    """It reports that it has saved and waits."""
    EXIT = "exit"
    """Its process has ended."""
    EVICT = "evict"
    """Its process may not stay in memory, because the slot ends or memory is short, or it has died there."""
    CLEAR = "clear"
    """The slot is free of it."""
    SAVED = "saved"


TRANSITIONS: Mapping[tuple[Phase, Event], Phase] = MappingProxyType(
    {
        (Phase.PREPARING, Event.FORKED): Phase.RUNNING,
        (Phase.PREPARING, Event.CANCELLED): Phase.EXITED,
        (Phase.RUNNING, Event.SUSPEND): Phase.SUSPENDING,
        (Phase.RUNNING, Event.PAUSE): Phase.PAUSING,
        (Phase.RUNNING, Event.STOP): Phase.STOPPING,
        (Phase.RUNNING, Event.EXIT): Phase.EXITED,
        (Phase.SUSPENDING, Event.STOP): Phase.STOPPING,
        (Phase.SUSPENDING, Event.DEADLINE): Phase.STOPPING,
        (Phase.SUSPENDING, Event.EXIT): Phase.EXITED,
        (Phase.PAUSING, Event.STOP): Phase.STOPPING,
        (Phase.PAUSING, Event.DEADLINE): Phase.STOPPING,
        (Phase.PAUSING, Event.WAITS): Phase.PAUSED,
        (Phase.PAUSING, Event.EXIT): Phase.EXITED,
        (Phase.STOPPING, Event.DEADLINE): Phase.STOPPING,
        (Phase.STOPPING, Event.EXIT): Phase.EXITED,
        (Phase.PAUSED, Event.EVICT): Phase.STOPPING,
        (Phase.PAUSED, Event.CLEAR): Phase.FROZEN,
        (Phase.FROZEN, Event.EVICT): Phase.STOPPING,
        (Phase.FROZEN, Event.SAVED): Phase.PARKED,
        (Phase.EXITED, Event.CLEAR): Phase.CLEARED,
        (Phase.CLEARED, Event.SAVED): Phase.DONE,
    }
)
WITH_PROCESS = frozenset({Phase.RUNNING, Phase.SUSPENDING, Phase.PAUSING, Phase.STOPPING})
"""Its process may use the slot."""
IN_MEMORY = frozenset({Phase.PAUSED, Phase.FROZEN, Phase.PARKED})
"""Its process waits."""
LEAVING = frozenset({Phase.PAUSED, Phase.EXITED, Phase.FROZEN, Phase.CLEARED, Phase.PARKED, Phase.DONE})
"""It has ended for the framework, unless it is evicted and still has to leave the slot."""


def diagram() -> str:
    """The table as a state diagram of Mermaid."""
    lines = ["stateDiagram-v2", f"    [*] --> {Phase.PREPARING}", f"    [*] --> {Phase.RUNNING}: resumed from memory"]
    lines += [f"    {before} --> {after}: {event}" for (before, event), after in TRANSITIONS.items()]
    return "\n".join([*lines, f"    {Phase.PARKED} --> [*]", f"    {Phase.DONE} --> [*]"])
