"""A slot as the framework sees it: a Mesos task that holds one trial at a time."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from executor.trial_messages import RunEnd, RunKey, SlotStatus, TrialRun, Wanted
from framework.mesos.tasks import TaskState, ended_with_executor, why_ended
from framework.policies.trials.interface import Choice, SlotView
from framework.search.records import SliceRecord, TrialRecord

RESEND_INTERVAL_S = 1.0
"""Interval of sending the desired state to a slot until it acknowledges."""
MEMORY_HINT = "--slot-mem MIB gives each slot more"
MAX_ACKNOWLEDGED_ENDS = 8
"""Maximum number of recorded run ends acknowledged to a slot; it keeps at most two of its own."""
ADOPTION_NUMBER_STEP = 1000
"""Increment of the sequence number when adopting a slot, above any late message of the previous service."""
ACKNOWLEDGE_INTERVAL_S = 10.0
"""Interval of acknowledging stored reports, so that the slot can drop them."""


@dataclass
class ActiveRun:
    """A run that a slot holds or is to hold next.

    Attributes:
        since_s: when it got the slot, on the search's clock; None while another run is still being suspended there.
        slice: its time slice; None as long as `since_s`.
        before_step: the trial's step when it got the slot.
        stored_reports: number of its stored reports.
        acknowledged_reports: number of these acknowledged to the slot.
        stored_output_bytes: bytes of its stored output.
    """

    record: TrialRecord
    order: TrialRun
    choice: Choice
    since_s: float | None = None
    slice: SliceRecord | None = None
    training: bool = False
    before_step: int | None = None
    stored_reports: int = 0
    acknowledged_reports: int = 0
    stored_output_bytes: int = 0

    @property
    def key(self) -> RunKey:
        return self.order.key


@dataclass
class Slot:
    """One slot.

    Attributes:
        task_id: Mesos' id of its task.
        agent_id, node, address: its agent: Mesos' id, display name, and host name or IP address.
        kind: kind of the slot (`framework.search.slot_pool.kind_of`); empty if unknown.
        state: last state from Mesos.
        message, reason: of that state.
        executor_seen: whether its executor ever reported it.
        next: the run it gets when the current one has left; dropped if the slot is asked to end first.
        leaving: whether it has been asked to end.
        is_wanted: whether its task may run; otherwise it is killed.
        has_trained: whether any run took a step in it.
        last_message_s: time of its last message, on the search's clock.
        inherited: whether an earlier service launched it, and it has sent no status since.
        memory_bytes: its memory, if processes may be paused in it; else 0.
        likely: paused runs that it can resume, the likeliest first.
        executor_id: Mesos' id of its executor, which slots of the search on one agent may share; by default the task's
            id.
        cpus, mem_mib: its CPUs and memory.
        slots_per_gpu: slots that share its GPU; they share its executor, which holds the GPU.
        hosts_executor: whether its resources include the executor's own.
        mates_seen: whether its executor ever reported another slot.
        executor_lost: whether its executor has ended and the end of its own task is still to be reported.
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
    last_message_s: float = 0.0
    inherited: bool = False
    memory_bytes: int = 0
    likely: tuple[RunKey, ...] = ()
    executor_id: str = ""
    cpus: float = 0.0
    mem_mib: float = 0.0
    slots_per_gpu: int = 1
    hosts_executor: bool = True
    mates_seen: bool = False
    executor_lost: bool = False
    _stops_run: bool = False
    _wanted: Wanted = field(default_factory=lambda: Wanted(0))
    _ends: tuple[RunKey, ...] = ()
    _to_evict: tuple[RunKey, ...] = ()
    _sent_s: float | None = None

    def __post_init__(self) -> None:
        self.executor_id = self.executor_id or self.task_id

    @property
    def is_up(self) -> bool:
        """Whether it can hold a trial."""
        return self.state is TaskState.RUNNING and not (self.leaving or self.inherited or self.executor_lost)

    @property
    def runs(self) -> list[ActiveRun]:
        return [run for run in (self.current, self.next) if run is not None]

    @property
    def is_gone(self) -> bool:
        return self.state.is_terminal()

    @property
    def executor_has_ended(self) -> bool:
        """Whether it ended with its executor, and so with all slots of that executor."""
        return ended_with_executor(self.state, self.reason)

    @property
    def missed_executor(self) -> bool:
        """Whether its shared executor ended before the slot started there; not a failure of the slot."""
        return self.executor_has_ended and self.mates_seen and not self.executor_seen

    @property
    def suspending(self) -> bool:
        return self.current is not None and (self._wanted.run is None or self._wanted.run.key != self.current.key)

    @property
    def preemptible(self) -> bool:
        """Whether its current run can be suspended to a checkpoint."""
        return self.status is not None and self.status.run == self._current_key and self.status.preemptible

    @property
    def pausable(self) -> bool:
        """Whether its current run can at least be paused in memory."""
        return self.status is not None and self.status.run == self._current_key and self.status.pausable

    @property
    def paused(self) -> tuple[RunKey, ...]:
        """Paused runs that it can resume; slots that share an executor list the same ones."""
        return () if self.status is None else self.status.paused

    @property
    def unsaved(self) -> tuple[RunKey, ...]:
        """Paused runs without a checkpoint."""
        return () if self.status is None else self.status.unsaved

    @property
    def unsaved_bytes(self) -> int:
        return 0 if self.status is None else self.status.unsaved_bytes

    @property
    def run_bytes(self) -> int:
        """Memory of its run, including shared memory; 0 if unknown."""
        return 0 if self.status is None else self.status.usage.rss_bytes or 0

    def view(self) -> SlotView:
        if self.current is None:
            return SlotView(self.id, kind=self.kind)
        since_s = self.current.since_s or 0.0
        busy = self.suspending or not self.current.training
        return SlotView(self.id, self.current.record.number, since_s, busy, self.kind)

    def request_run(self, run: ActiveRun | None) -> None:
        """Requests this run in the slot and no other; None for an empty slot."""
        if self.current is None:
            self.current = run
        else:
            self.next = run
        self._want(run.order if run is not None else None)

    def request_end(self) -> None:
        """Requests the end of the slot once its run is suspended."""
        if not self.leaving:
            self.leaving = True
            self._want(None)

    def stop_run(self) -> None:
        """Requests the end of its current run even if it cannot be suspended: its trial never runs again."""
        self._stops_run = True
        self._want(self.next.order if self.next is not None else None)

    def evict(self, runs: Iterable[RunKey]) -> None:
        """Discards paused runs that will not be resumed in any slot."""
        new = tuple(key for key in runs if key not in self._to_evict)
        if new:
            self._to_evict = (*(key for key in self._to_evict if key in self.paused), *new)
            self._want(self._wanted.run)

    def adopt(self, status: SlotStatus) -> None:
        """Takes over an inherited slot on its first status, with sequence numbers above the earlier service's.

        The slot then resends the reports of its run that no service received.
        """
        self.inherited = False
        run = None if self.leaving else self.next or (None if self._stops_run else self.current)
        self._wanted = Wanted(status.number + ADOPTION_NUMBER_STEP)
        self._want(run.order if run is not None else None)

    def request_resend(self) -> None:
        """Requests all reports and output that are not stored, as some are missing."""
        if self._is_up_to_date:
            self._want(self._wanted.run)

    def run_ended(self, end: RunEnd) -> ActiveRun | None:
        """Applies the end of a run; the next run becomes the current one.

        Returns:
            The run that ended; None if it is unknown, or its end was applied before.
        """
        if end.key in self._ends:
            return None
        self._ends = (*self._ends, end.key)[-MAX_ACKNOWLEDGED_ENDS:]
        ended = None
        if self.current is not None and self.current.key == end.key:
            ended, self.current, self.next = self.current, self.next, None
            self._stops_run = False
        elif self.next is not None and self.next.key == end.key:
            ended, self.next = self.next, None
        wanted = self._wanted.run
        self._want(None if wanted is None or wanted.key == end.key else wanted)
        return ended

    def superseded_run(self) -> ActiveRun | None:
        """Returns the current run if it was superseded before the slot received it.

        That is, the slot has acknowledged the newest desired state, but neither holds the run nor ended it.
        """
        if self.current is None or self.status is None or not self._is_up_to_date:
            return None
        is_there = self.status.run == self.current.key or any(end.key == self.current.key for end in self.status.ends)
        return None if is_there else self.current

    def take_due_message(self, now_s: float) -> Wanted | None:
        """Returns the message to send now, and marks it as sent; None if acknowledged or sent a moment ago."""
        if self.state is not TaskState.RUNNING or self.inherited or self._wanted.number == 0:
            return None
        runs = self.runs
        pause_s = RESEND_INTERVAL_S
        if self._is_up_to_date:
            if all(run.stored_reports <= run.acknowledged_reports for run in runs):
                return None
            pause_s = ACKNOWLEDGE_INTERVAL_S
        if self._sent_s is not None and now_s - self._sent_s < pause_s:
            return None
        self._sent_s = now_s
        for run in runs:
            run.acknowledged_reports = run.stored_reports
        return dataclasses.replace(
            self._wanted,
            acknowledged_reports=tuple((*run.key, run.stored_reports) for run in runs),
            acknowledged_output=tuple((*run.key, run.stored_output_bytes) for run in runs),
            resume_order=self.likely,
        )

    def failure(self) -> str:
        seen = self.executor_seen or self.mates_seen
        why = why_ended(self.state, self.message, self.reason, executor_seen=seen, more_memory=MEMORY_HINT)
        return f"slot {self.id} {self.state.verb} on {self.node}: {why}"

    @property
    def _is_up_to_date(self) -> bool:
        """Whether it has acknowledged the newest desired state."""
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
            stop=self._stops_run,
            memory_bytes=self.memory_bytes,
            evict=self._to_evict,
        )
        self._sent_s = None


def prefer_paused(
    runs: Mapping[int, Choice], slots: Mapping[int, Slot], paused_in: Mapping[int, Collection[int]]
) -> dict[int, Choice]:
    """Moves chosen trials to slots in which they are paused, if that changes nothing else.

    A trial that a policy put into another slot of the same kind moves to such a slot if it is empty, or swaps with the
    trial that was to start there.
    """
    given = dict(runs)

    def is_here(slot: int, choice: Choice) -> bool:
        """Returns whether it must stay, as it runs or is paused in the slot."""
        held = slots[slot].current
        return (held is not None and held.record.number == choice.trial) or slot in paused_in.get(choice.trial, ())

    for slot_id, choice in sorted(runs.items()):
        if given[slot_id] is not choice or is_here(slot_id, choice):
            continue
        for home in sorted(paused_in.get(choice.trial, ())):
            other = given.get(home)
            is_free = slots[home].current is None if other is None else not is_here(home, other)
            if is_free and slots[home].kind == slots[slot_id].kind:
                del given[slot_id]
                given |= {home: choice} if other is None else {home: choice, slot_id: other}
                break
    return given
