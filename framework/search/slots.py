"""A slot as the framework sees it: a Mesos task that holds one trial at a time."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from executor.trial_messages import RunEnd, RunKey, SlotStatus, TrialRun, Wanted
from framework.mesos.tasks import TaskState, ended_with_executor, why_ended
from framework.policies.trials.interface import Choice, SlotView
from framework.search.records import SliceRecord, TrialRecord

REPEAT_S = 1.0
"""How often a slot is told what it is to hold until it has answered."""
MORE_MEMORY = "--slot-mem MIB gives each slot more"
KNOWN_ENDS = 8
"""How many recorded ends a slot is reminded of; it keeps no more than two of its own."""
STRIDE = 1000
"""What a service before this one has told a slot last may arrive after its death, under a number that much above what
the slot knows at most."""
CONFIRM_S = 10.0
"""How often a slot is told which reports have been written down, so that it need not keep them."""


@dataclass
class ActiveRun:
    """A run that a slot holds or is to hold next.

    Attributes:
        record: its trial.
        order: what the executor is sent.
        choice: why it was chosen.
        since_s: when it got the slot, on the search's clock; None while another run is still being suspended there.
        slice: its time slice; None for as long.
        training: whether it has taken its first step.
        before_step: the trial's step when it got the slot.
        known: how many of its reports have been written down, and
        confirmed: how many of these its slot has been told of.
        known_output: how many bytes of its output have been written down.
    """

    record: TrialRecord
    order: TrialRun
    choice: Choice
    since_s: float | None = None
    slice: SliceRecord | None = None
    training: bool = False
    before_step: int | None = None
    known: int = 0
    confirmed: int = 0
    known_output: int = 0

    @property
    def key(self) -> RunKey:
        return self.order.key


@dataclass
class Slot:
    """One slot.

    Attributes:
        id: its number in the search.
        task_id: Mesos' id of its task.
        agent_id, node, address: where it is: for Mesos, for people, and its host or IP address.
        gpu_devices: device indices it was given; empty if none.
        kind: what it computes on (`framework.search.slot_pool.kind_of`); empty where that is not known.
        state: the last state Mesos reported.
        message, reason: what came with it.
        executor_seen: whether its executor ever reported it.
        current: the run that holds it; None if it is empty.
        next: the run that gets it when the current one is out; None if there is none. If the slot is told to end first,
            the run is given back then.
        leaving: whether it has been told to end.
        is_wanted: whether it may go on, or end by itself; otherwise its task is killed.
        has_trained: whether a run has ever taken a step in it.
        status: what it last said of itself; None before.
        heard_s: when that was, on the search's clock.
        inherited: whether it was launched by a service before this one, and has not been heard of since.
        memory_bytes: its memory, if processes of suspended trials may stay in it; else 0.
        likely: the runs whose processes stand still and that it can go on with, the likeliest to go on first.
        executor_id: Mesos' id of its executor, which other slots of the search on its agent may share; where none is
            given, the task's own id.
        hosts_executor: whether what its executor has for itself is a part of its share.
        mates_seen: whether its executor ever reported another slot.
        is_lost: whether its executor is known to have ended, and its own end is still to be said.
    """

    id: int
    task_id: str
    agent_id: str
    node: str
    address: str
    gpu_devices: tuple[int, ...] = ()
    kind: str = ""
    state: TaskState = TaskState.STAGING
    message: str = ""
    reason: str = ""
    executor_seen: bool = False
    current: ActiveRun | None = None
    next: ActiveRun | None = None
    leaving: bool = False
    is_wanted: bool = True
    has_trained: bool = False
    status: SlotStatus | None = None
    heard_s: float = 0.0
    inherited: bool = False
    memory_bytes: int = 0
    likely: tuple[RunKey, ...] = ()
    executor_id: str = ""
    hosts_executor: bool = True
    mates_seen: bool = False
    is_lost: bool = False
    _stops: bool = False
    _wanted: Wanted = field(default_factory=lambda: Wanted(0))
    _ends: tuple[RunKey, ...] = ()
    _let_go: tuple[RunKey, ...] = ()
    _sent_s: float | None = None

    def __post_init__(self) -> None:
        self.executor_id = self.executor_id or self.task_id

    @property
    def is_up(self) -> bool:
        """Whether it can hold a trial: its executor runs and it is not about to end."""
        return self.state is TaskState.RUNNING and not (self.leaving or self.inherited or self.is_lost)

    @property
    def runs(self) -> list[ActiveRun]:
        """The run that holds it, and the one that is to be next."""
        return [run for run in (self.current, self.next) if run is not None]

    @property
    def is_gone(self) -> bool:
        return self.state.is_terminal()

    @property
    def executor_has_ended(self) -> bool:
        """Whether it ended with its executor, and so with all slots of that."""
        return ended_with_executor(self.state, self.reason)

    @property
    def missed_executor(self) -> bool:
        """Whether its executor, which has had other slots, ended before it came there: nobody's failure."""
        return self.executor_has_ended and self.mates_seen and not self.executor_seen

    @property
    def suspending(self) -> bool:
        """Whether its current run is to be suspended."""
        return self.current is not None and (self._wanted.run is None or self._wanted.run.key != self.current.key)

    @property
    def preemptible(self) -> bool:
        """Whether its current run can be saved, and so suspended."""
        return self.status is not None and self.status.run == self._current_key and self.status.preemptible

    @property
    def pausable(self) -> bool:
        """Whether its current run can at least be suspended in memory."""
        return self.status is not None and self.status.run == self._current_key and self.status.pausable

    @property
    def paused(self) -> tuple[RunKey, ...]:
        """Suspended runs whose processes it can go on with; other slots may list them too."""
        return () if self.status is None else self.status.paused

    @property
    def unsaved(self) -> tuple[RunKey, ...]:
        """Those of them that no checkpoint holds."""
        return () if self.status is None else self.status.unsaved

    @property
    def unsaved_bytes(self) -> int:
        """Memory of the runs that no checkpoint holds."""
        return 0 if self.status is None else self.status.unsaved_bytes

    @property
    def held_bytes(self) -> int:
        """Memory of its run, with what that shares with others; 0 where nothing is known."""
        return 0 if self.status is None else self.status.usage.rss_bytes or 0

    def view(self) -> SlotView:
        """What a policy sees of it."""
        if self.current is None:
            return SlotView(self.id, kind=self.kind)
        since_s = self.current.since_s or 0.0
        busy = self.suspending or not self.current.training
        return SlotView(self.id, self.current.record.number, since_s, busy, self.kind)

    def hold(self, run: ActiveRun | None) -> None:
        """Wants this run in the slot and no other; None: none at all."""
        if self.current is None:
            self.current = run
        else:
            self.next = run
        self._want(run.order if run is not None else None)

    def leave(self) -> None:
        """Wants the slot to end, as soon as its run is suspended."""
        if not self.leaving:
            self.leaving = True
            self._want(None)

    def stop(self) -> None:
        """Wants its current run to end, even if it cannot be suspended: its trial will never run again."""
        self._stops = True
        self._want(self.next.order if self.next is not None else None)

    def let_go(self, runs: Iterable[RunKey]) -> None:
        """Nobody will go on with the processes of these suspended runs, in this slot or another."""
        told = tuple(key for key in runs if key not in self._let_go)
        if told:
            self._let_go = (*(key for key in self._let_go if key in self.paused), *told)
            self._want(self._wanted.run)

    def adopt(self, status: SlotStatus) -> None:
        """An inherited slot has said how it is: from now on it is told what to hold, under numbers new to it.

        With that it sends again what its run has reported meanwhile, which has reached nobody.
        """
        self.inherited = False
        run = None if self.leaving else self.next or (None if self._stops else self.current)
        self._wanted = Wanted(status.number + STRIDE)
        self._want(run.order if run is not None else None)

    def ask_again(self) -> None:
        """Reports or output of its runs are missing: it is to send all that has not been written down."""
        if self._knows_all:
            self._want(self._wanted.run)

    def run_ended(self, end: RunEnd) -> ActiveRun | None:
        """Takes the end of a run in: the next one, if there is one, becomes the current.

        Returns:
            The run that ended; None if it is not ours, or its end is known already.
        """
        if end.key in self._ends:
            return None
        self._ends = (*self._ends, end.key)[-KNOWN_ENDS:]
        ended = None
        if self.current is not None and self.current.key == end.key:
            ended, self.current, self.next = self.current, self.next, None
            self._stops = False
        elif self.next is not None and self.next.key == end.key:
            ended, self.next = self.next, None
        wanted = self._wanted.run
        self._want(None if wanted is None or wanted.key == end.key else wanted)
        return ended

    def unknown_run(self) -> ActiveRun | None:
        """The current run, if the slot knows the newest wish and yet neither holds that run nor has seen its end.

        It was superseded before the slot had heard of it.
        """
        if self.current is None or self.status is None or not self._knows_all:
            return None
        is_there = self.status.run == self.current.key or any(end.key == self.current.key for end in self.status.ends)
        return None if is_there else self.current

    def message_due(self, now_s: float) -> Wanted | None:
        """What has to be sent to the slot now; None if it knows, or was told a moment ago."""
        if self.state is not TaskState.RUNNING or self.inherited or self._wanted.number == 0:
            return None
        runs = self.runs
        pause_s = REPEAT_S
        if self._knows_all:
            if all(run.known <= run.confirmed for run in runs):
                return None
            pause_s = CONFIRM_S
        if self._sent_s is not None and now_s - self._sent_s < pause_s:
            return None
        self._sent_s = now_s
        for run in runs:
            run.confirmed = run.known
        return dataclasses.replace(
            self._wanted,
            acknowledged_reports=tuple((*run.key, run.known) for run in runs),
            acknowledged_output=tuple((*run.key, run.known_output) for run in runs),
            resume_order=self.likely,
        )

    def failure(self) -> str:
        """Why it ended, in one sentence."""
        seen = self.executor_seen or self.mates_seen
        why = why_ended(self.state, self.message, self.reason, executor_seen=seen, more_memory=MORE_MEMORY)
        return f"slot {self.id} {self.state.verb} on {self.node}: {why}"

    @property
    def _knows_all(self) -> bool:
        """Whether it has heard what it was told last."""
        return self.status is not None and self.status.number >= self._wanted.number

    @property
    def _current_key(self) -> RunKey | None:
        return None if self.current is None else self.current.key

    def _want(self, run: TrialRun | None) -> None:
        self._wanted = Wanted(
            self._wanted.number + 1,
            run,
            self.leaving,
            self._ends,
            stop=self._stops,
            memory_bytes=self.memory_bytes,
            evict=self._let_go,
        )
        self._sent_s = None


def at_home(
    runs: Mapping[int, Choice], slots: Mapping[int, Slot], homes: Mapping[int, Collection[int]]
) -> dict[int, Choice]:
    """Gives trials the slots in which their processes stand still, where that changes nothing else.

    A trial that a policy has put into another slot of the same kind comes to one of its own if that is empty, or
    changes places with the one that was to begin there.

    Args:
        runs: slot -> the trial that a policy wants there.
        slots: those that it was asked for.
        homes: trial -> the slots in which its process stands still.
    """
    given = dict(runs)

    def is_here(slot: int, choice: Choice) -> bool:
        """Whether it must not be moved: it runs in the slot, or stands still there."""
        held = slots[slot].current
        return (held is not None and held.record.number == choice.trial) or slot in homes.get(choice.trial, ())

    for slot_id, choice in sorted(runs.items()):
        if given[slot_id] is not choice or is_here(slot_id, choice):
            continue
        for home in sorted(homes.get(choice.trial, ())):
            other = given.get(home)
            is_free = slots[home].current is None if other is None else not is_here(home, other)
            if is_free and slots[home].kind == slots[slot_id].kind:
                del given[slot_id]
                given |= {home: choice} if other is None else {home: choice, slot_id: other}
                break
    return given
