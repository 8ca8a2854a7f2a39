"""What a policy sees of a search and what it answers.

The same objects decide in a real search (`framework.search`) and in virtual time (`benchmarks.simulation`). A policy
decides for all slots at once; one that binds trials to slots, as the paper 'Hermes' does, keeps the binding itself.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Protocol

from pydantic import Field

from dike.exceptions import BadInputError
from solver.described import MAX_ITEMS, UserOption


@dataclass(frozen=True)
class Reading:
    """What a trial reported of a stretch of its training.

    Attributes:
        train_s: seconds the trial had trained in all its slices when the stretch ended; time spent suspended, starting
            or restoring does not count.
        step: training steps it had done then.
        loss: mean of the losses of the stretch, or what stands for a loss: an objective to be maximised comes negated.
            NaN and infinities are passed on as they are.
        low, high: least and greatest loss of the stretch; NaN if one of its losses was.
        count: how many losses the stretch holds, at least 1.
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
        readings: all it has reported, oldest first; the older ones are merged as they become many.
        slices: for each time slice it has had, the current one included, the number of readings before it.
        runnable: whether it can be given a slot now; a trial in the middle of a suspension or a start is not, nor is
            one that is running.
        preemptible: whether it can be suspended; it is said of running trials and believed of others.
        refused: slots it must not be given: its process stands still in others, and no checkpoint holds it; or it has
            failed there.
        homes: the slots in which its process stands still, and would go on at once; empty if it has to be started.
        batch_size: samples of one of its steps; 1 where that is not known.
        speeds: kind of slot -> samples a second that it was measured to train there; kinds it never ran on are missing.
        left_s: seconds of training that it is believed to have left; None where nothing tells.
    """

    id: int
    arrived_s: float
    readings: Sequence[Reading] = ()
    slices: Sequence[int] = ()
    runnable: bool = True
    preemptible: bool = True
    refused: frozenset[int] = frozenset()
    homes: frozenset[int] = frozenset()
    batch_size: float = 1.0
    speeds: Mapping[str, float] = field(default_factory=dict)
    left_s: float | None = None


@dataclass(frozen=True)
class SlotView:
    """A slot: one GPU, or a share of CPUs, that holds one running trial.

    Attributes:
        id: its number, unique in the search.
        trial: the trial that runs in it; None if it is empty.
        since_s: when that trial's slice began, on the policy's clock.
        busy: whether it is being emptied or filled at the moment; a policy leaves it alone, and is asked again when
            that is over.
        kind: what it computes on, such as `v100`; slots of one kind are equally fast. Empty where that is not known.
    """

    id: int
    trial: int | None = None
    since_s: float = 0.0
    busy: bool = False
    kind: str = ""


@dataclass(frozen=True)
class Choice:
    """Why a trial was given a slot.

    Attributes:
        trial: its number.
        reason: a few words for people, such as `first slice` or `fastest convergence`.
        score: what it was compared by (convergence, expected time, ...), greater is better; None without comparison.
    """

    trial: int
    reason: str
    score: float | None = None


@dataclass(frozen=True)
class Decision:
    """What a policy wants now.

    Attributes:
        runs: slot -> the trial that is to hold it from now on. Naming the trial that runs there lets it go on; a slot
            that is not named keeps what it has, and stays empty if it has nothing.
        wake_at_s: when to ask again if nothing happens before; None if only an event can change the answer.
        suspends: slots whose trial is to be suspended with none in its place; once it is out it can be given any slot.
    """

    runs: Mapping[int, Choice] = field(default_factory=dict)
    wake_at_s: float | None = None
    suspends: frozenset[int] = frozenset()


class Policy(Protocol):
    """Decides which trials run.

    `decide` is called when a trial arrives or ends, or may refuse other slots than before, when a slot comes, goes, or
    has been emptied or filled, and at the time it asked for. It must not:
        * give one trial two slots, or a busy slot anything;
        * name a trial that is neither runnable nor running in that very slot (trials do not hop from one slot to
          another while they run), or that refuses the slot;
        * replace or suspend a running trial that is not preemptible, or both vacate a slot and give it a trial.
    Given the same calls it gives the same answers; what is random in it comes from a seed.
    """

    name: str

    def decide(self, now_s: float, trials: Sequence[TrialView], slots: Sequence[SlotView]) -> Decision:
        """Which trial is to hold which slot.

        Args:
            now_s: the time, on any clock that only moves forward.
            trials: all trials that have arrived and not ended, by number.
            slots: all slots there are, by number.
        """
        ...


@dataclass(frozen=True)
class Milestone:
    """From some decrease of a trial's loss on, its quantum is longer (paper 'Hermes', section 4.1.2).

    Attributes:
        decrease: share of its first loss that a trial has to have lost, between 0 and 1.
        quantum_s: its quantum from then on, in seconds; None: as `times` says.
        times: how many times as long as the search's quantum it is from then on.
    """

    decrease: Annotated[float, Field(gt=0, le=1)]
    quantum_s: Annotated[float | None, Field(gt=0, le=1e9, allow_inf_nan=False)] = None
    times: Annotated[float, Field(gt=0, le=1e9, allow_inf_nan=False)] = 1.0

    def __str__(self) -> str:
        """As `--milestones` has it: `50%:2x` or `50%:20s`."""
        length = f"{self.times:g}x" if self.quantum_s is None else f"{self.quantum_s:g}s"
        return f"{100 * self.decrease:g}%:{length}"

    def length_s(self, quantum_s: float) -> float:
        """The quantum from then on, where the search's is `quantum_s`; both in seconds."""
        return self.times * quantum_s if self.quantum_s is None else self.quantum_s


_MILESTONE = re.compile(r"(?P<percent>\d+(\.\d+)?)%:(?P<length>\d+(\.\d+)?)(?P<unit>[sx]?)")
PANEL = "Which trials run first, and which are stopped"
MILESTONES = (Milestone(0.5, times=2.0), Milestone(0.75, times=4.0))
"""Where the quantum of `hermes` grows unless it is told otherwise."""
QUANTUM_GROWTH = 0.25
"""By this share it grows with each preemption."""


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
    """What a search tells its policy; each policy takes what concerns it.

    Attributes:
        quantum_s: seconds between two decisions on a slot.
        trials_per_slot: how many trials are bound to one slot at most (the paper's G_thres).
        milestones: longer quanta for trials that have come far, by ascending decrease.
        quantum_growth: by this share a trial's quantum grows with each preemption.
        seed: for policies with something random in them.
        switch_s: seconds that replacing a trial on a slot takes, as far as is known.
        move_s: how many seconds more it takes if the trial ran in another slot before: its checkpoint moves.
    """

    quantum_s: Annotated[
        float,
        Field(ge=0.1, le=1e9, allow_inf_nan=False),
        UserOption(PANEL, "Seconds between two decisions on a slot."),
    ] = 10.0
    trials_per_slot: Annotated[
        int,
        Field(ge=1, le=MAX_ITEMS),
        UserOption(PANEL, "Trials that share a slot: bound to it, or asked of a sampler that learns."),
    ] = 4
    milestones: Annotated[
        tuple[Milestone, ...],
        UserOption(
            PANEL,
            "Longer quanta for trials whose loss has decreased much (hermes, hermes2): 50%:2x or 50%:20s, or none.",
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
        UserOption(PANEL, "Share by which each preemption lengthens a trial's quantum (hermes, hermes2)."),
    ] = QUANTUM_GROWTH
