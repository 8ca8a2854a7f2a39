"""The interface of policies for trials, used in real searches (`framework.search`) and simulated ones.

A policy decides for all slots together. One that binds trials to slots, as in the paper 'Hermes', stores the binding
itself.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Protocol

from pydantic import Field

from dike.described import MAX_ITEMS, UserOption
from dike.exceptions import BadInputError


@dataclass(frozen=True)
class Reading:
    """Aggregated losses of one stretch of a trial's training.

    Attributes:
        train_s: training time of the trial at the end of the stretch, over all slices; suspension, start and restore do
            not count.
        step: training steps at that time.
        loss: mean loss of the stretch, or the objective, negated if it is maximized; may be NaN or infinite.
        low, high: minimum and maximum loss; NaN if any loss was NaN.
        count: number of losses, at least 1.
    """

    train_s: float
    step: int
    loss: float
    low: float
    high: float
    count: int = 1


@dataclass(frozen=True)
class TrialView:
    """A trial that has not ended, as a policy sees it.

    Attributes:
        id: its number, unique in the search; trials arrive in the order of their numbers.
        arrived_s: when it entered the search, on the policy's clock.
        readings: everything reported, oldest first; older readings are merged as they become many.
        slices: for each time slice, the current one included, the number of readings before it.
        runnable: whether it can be given a slot now; false while it runs, starts or is being suspended.
        preemptible: whether it can be suspended; exact for running trials, an assumption for others.
        refused: slots it must not be given: its paused process is elsewhere and no checkpoint exists, or it failed
            there.
        paused_in: slots in which it could resume instantly, as its process is paused there; empty if it must be
            started.
        batch_size: samples per step; 1 if unknown.
        speeds: kind of slot -> measured samples/s; kinds on which it never ran are missing.
        left_s: estimated remaining training time; None if unknown.
        has_checkpoint: whether another trial could start as a copy of it.
    """

    id: int
    arrived_s: float
    readings: Sequence[Reading] = ()
    slices: Sequence[int] = ()
    runnable: bool = True
    preemptible: bool = True
    refused: frozenset[int] = frozenset()
    paused_in: frozenset[int] = frozenset()
    batch_size: float = 1.0
    speeds: Mapping[str, float] = field(default_factory=dict)
    left_s: float | None = None
    has_checkpoint: bool = True


@dataclass(frozen=True)
class SlotView:
    """A slot: one GPU, or a share of CPUs, that holds at most one running trial.

    Attributes:
        id: its number, unique in the search.
        trial: the trial that runs in it; None if it is empty.
        since_s: start of that trial's slice, on the policy's clock.
        busy: whether its trial is being started or suspended; a policy must not touch it, and is called again
            afterwards.
        kind: type of hardware, such as `v100`; slots of one kind are equally fast. Empty if unknown.
    """

    id: int
    trial: int | None = None
    since_s: float = 0.0
    busy: bool = False
    kind: str = ""


@dataclass(frozen=True)
class Choice:
    """A trial chosen for a slot, and why.

    Attributes:
        reason: a few words for people, such as `first slice` or `fastest convergence`.
        score: what trials were compared by (convergence, expected time, ...), greater is better; None without
            comparison.
        copies: another trial, whose newest checkpoint and parameters it continues with; the parameters are varied.
    """

    trial: int
    reason: str
    score: float | None = None
    copies: int | None = None


@dataclass(frozen=True)
class Decision:
    """A policy's desired assignment of trials to slots.

    Attributes:
        runs: slot -> trial to run there. The trial that runs there already continues; slots that are not listed are
            unchanged.
        wake_at_s: when to call the policy again if nothing happens before; None if only an event can change the
            decision.
        suspends: slots whose trial is suspended without a successor; once suspended it can be given any slot.
    """

    runs: Mapping[int, Choice] = field(default_factory=dict)
    wake_at_s: float | None = None
    suspends: frozenset[int] = frozenset()


class Policy(Protocol):
    """Decides which trials run.

    `decide` is called when a trial arrives or ends or its `refused` changes, when a slot is added, removed, emptied or
    filled, and at `Decision.wake_at_s`. It must not:
        * give one trial two slots, or a busy slot anything;
        * name a trial that is neither runnable nor running in that very slot (running trials do not move), or that
          refuses the slot;
        * replace or suspend a running trial that is not preemptible, or both suspend a slot's trial and give it
          another;
        * have a trial copy one without a checkpoint, or itself.
    Equal sequences of calls give equal decisions; randomness is seeded.
    """

    name: str

    def decide(self, now_s: float, trials: Sequence[TrialView], slots: Sequence[SlotView]) -> Decision:
        """Decides which trial runs in which slot, given all trials that have not ended and all slots, both by number.

        `now_s` is the time on any monotonic clock.
        """
        ...


@dataclass(frozen=True)
class Milestone:
    """A decrease of a trial's loss from which on its quantum is longer (paper 'Hermes', section 4.1.2).

    Attributes:
        decrease: decrease as a share of the first loss, between 0 and 1.
        quantum_s: quantum from then on, in seconds; None: `times` applies.
        times: quantum from then on, as a multiple of the search's.
    """

    decrease: Annotated[float, Field(gt=0, le=1)]
    quantum_s: Annotated[float | None, Field(gt=0, le=1e9, allow_inf_nan=False)] = None
    times: Annotated[float, Field(gt=0, le=1e9, allow_inf_nan=False)] = 1.0

    def __str__(self) -> str:
        """Formats it as `--milestones` takes it: `50%:2x` or `50%:20s`."""
        length = f"{self.times:g}x" if self.quantum_s is None else f"{self.quantum_s:g}s"
        return f"{100 * self.decrease:g}%:{length}"

    def length_s(self, quantum_s: float) -> float:
        """Returns the quantum from then on, in seconds."""
        return self.times * quantum_s if self.quantum_s is None else self.quantum_s


_MILESTONE = re.compile(r"(?P<percent>\d+(\.\d+)?)%:(?P<length>\d+(\.\d+)?)(?P<unit>[sx]?)")
PANEL = "Order and early stopping of trials"
MILESTONES = (Milestone(0.5, times=2.0), Milestone(0.75, times=4.0))
"""Default milestones of `hermes`."""
QUANTUM_GROWTH = 0.25
"""Default growth of a quantum with each preemption, as a share."""


def read_milestones(text: str) -> tuple[Milestone, ...]:
    """Reads `50%:20s,75%:40s`, `50%:2x,75%:4x` (multiples of the quantum), or `none`.

    Raises:
        BadInputError: if it is something else.
    """
    milestones = []
    for part in () if text == "none" else filter(None, text.split(",")):
        match = _MILESTONE.fullmatch(part.strip())
        if match is None or not 0 < float(match["percent"]) <= 100 or float(match["length"]) <= 0:
            raise BadInputError(
                f"'{part}' is not a value of --milestones; write a decrease of the loss and a quantum, as in 50%:20s "
                "or 50%:2x, or none."
            )
        decrease, length = float(match["percent"]) / 100, float(match["length"])
        milestones.append(Milestone(decrease, times=length) if match["unit"] == "x" else Milestone(decrease, length))
    return tuple(sorted(milestones, key=lambda milestone: milestone.decrease))


@dataclass(frozen=True)
class PolicySettings:
    """Settings of a search for its policy; each policy uses those that concern it.

    Attributes:
        quantum_s: seconds between two decisions on a slot.
        trials_per_slot: maximum number of trials bound to one slot (the paper's G_thres).
        milestones: longer quanta for trials that have made progress, by ascending decrease.
        quantum_growth: growth of a trial's quantum with each preemption, as a share.
        switch_s: estimated seconds to replace the trial in a slot.
        move_s: estimated additional seconds if the trial last ran in another slot, as its checkpoint moves.
    """

    quantum_s: Annotated[
        float,
        Field(ge=0.1, le=1e9, allow_inf_nan=False),
        UserOption(PANEL, "Time between two decisions of the policy about a slot, seconds."),
    ] = 10.0
    trials_per_slot: Annotated[
        int,
        Field(ge=1, le=MAX_ITEMS),
        UserOption(PANEL, "Maximum number of trials per slot: bound to it, or requested from a sampler that learns."),
    ] = 4
    milestones: Annotated[
        tuple[Milestone, ...],
        UserOption(
            PANEL,
            "Longer quanta after decreases of the loss (hermes, hermes2), such as 50%:2x or 50%:20s; or none.",
            default=",".join(map(str, MILESTONES)),
            read=read_milestones,
        ),
    ] = MILESTONES
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    switch_s: Annotated[float, Field(ge=0, le=1e9, allow_inf_nan=False)] = 1.0
    move_s: Annotated[float, Field(ge=0, le=1e9, allow_inf_nan=False)] = 0.0
    quantum_growth: Annotated[
        float,
        Field(ge=0, le=100, allow_inf_nan=False),
        UserOption(PANEL, "Growth of a trial's quantum with each preemption, as a share (hermes, hermes2)."),
    ] = QUANTUM_GROWTH
