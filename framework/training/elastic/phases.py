"""The phases of an elastic job's size: a table of what leads from one to the next.

`Resizer` and `RunningResize` report what happens; anything that is not in the table is a defect. `docs/architecture.md`
shows the table as a diagram.
"""

from __future__ import annotations

import enum
import logging
from collections.abc import Mapping
from types import MappingProxyType

logger = logging.getLogger(__name__)


class Phase(enum.StrEnum):
    """A phase of a job's size."""

    IDLE = "idle"
    """No attempt runs."""
    ADOPTING = "adopting"
    """The service was restarted: the slots are asked what they run."""
    STEADY = "steady"
    """The job trains."""
    GATHERING = "gathering"
    """The job trains, and offers are awaited for a size that may be better."""
    LAUNCHING = "launching"
    """The job trains, and additional tasks are being launched."""
    WARMING = "warming"
    """The job trains, and additional tasks warm up."""
    SAVING = "saving"
    """The chief saves and ends."""
    CLEARING = "clearing"
    """All other processes end."""
    STARTING = "starting"
    """The next attempt has started and has not made a step."""


class Event(enum.StrEnum):
    """What happens to a job's size."""

    BEGIN = "begin"
    """The job is launched."""
    ADOPT = "adopt"
    ADOPTED = "adopted"
    """Each slot runs its process of the saved attempt."""
    GATHER = "gather"
    DECIDE = "decide"
    """Offers have arrived, or are not awaited any more."""
    LAUNCH = "launch"
    """A size with additional tasks was chosen."""
    LAUNCHED = "launched"
    REFUSED = "refused"
    """The master did not launch them."""
    CHANGE = "change"
    """A size without additional tasks was chosen."""
    READY = "ready"
    """All additional tasks have warmed up."""
    SAVED = "saved"
    CLEARED = "cleared"
    STEP = "step"
    """The next attempt has made its first step."""
    ABANDON = "abandon"
    """An additional task failed or was late, or the script has ended: the job keeps its size."""
    STOP = "stop"
    """The attempt ends: the job is over, or restarts."""


TRANSITIONS: Mapping[tuple[Phase, Event], Phase] = MappingProxyType(
    {
        (Phase.IDLE, Event.BEGIN): Phase.STEADY,
        (Phase.STEADY, Event.ADOPT): Phase.ADOPTING,
        (Phase.ADOPTING, Event.ADOPTED): Phase.STEADY,
        (Phase.STEADY, Event.GATHER): Phase.GATHERING,
        (Phase.GATHERING, Event.DECIDE): Phase.STEADY,
        (Phase.STEADY, Event.LAUNCH): Phase.LAUNCHING,
        (Phase.LAUNCHING, Event.LAUNCHED): Phase.WARMING,
        (Phase.LAUNCHING, Event.REFUSED): Phase.STEADY,
        (Phase.STEADY, Event.CHANGE): Phase.WARMING,
        (Phase.WARMING, Event.READY): Phase.SAVING,
        (Phase.WARMING, Event.ABANDON): Phase.STEADY,
        (Phase.SAVING, Event.SAVED): Phase.CLEARING,
        (Phase.SAVING, Event.ABANDON): Phase.STEADY,
        (Phase.CLEARING, Event.CLEARED): Phase.STARTING,
        (Phase.STARTING, Event.STEP): Phase.STEADY,
        **{(phase, Event.STOP): Phase.IDLE for phase in Phase},
    }
)
TRAINING = frozenset({Phase.STEADY, Phase.GATHERING, Phase.LAUNCHING, Phase.WARMING})
"""The processes of the attempt train undisturbed."""
CHANGING = frozenset({Phase.WARMING, Phase.SAVING, Phase.CLEARING, Phase.STARTING})
"""A change of size is under way."""


class SizePhase:
    """The phase of one job's size.

    Attributes:
        phase: the current one.
        since_s: when it was entered.
    """

    def __init__(self) -> None:
        self.phase, self.since_s = Phase.IDLE, 0.0

    def happened(self, event: Event, now_s: float) -> None:
        """Enters the next phase.

        Raises:
            RuntimeError: this cannot happen in its phase.
        """
        if (self.phase, event) not in TRANSITIONS:
            raise RuntimeError(f"the size of the job is {self.phase}, and '{event}' has happened")
        before, self.phase = self.phase, TRANSITIONS[self.phase, event]
        logger.info("size: %s, %s -> %s after %.2f s", event, before, self.phase, now_s - self.since_s)
        self.since_s = now_s


def diagram() -> str:
    """The table as a state diagram of Mermaid; from every phase the end of the attempt leads to the first."""
    lines = ["stateDiagram-v2", f"    [*] --> {Phase.IDLE}"]
    lines += [
        f"    {before} --> {after}: {event}" for (before, event), after in TRANSITIONS.items() if event != Event.STOP
    ]
    return "\n".join(lines)
