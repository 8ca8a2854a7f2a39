"""A search from its first slot to its last trial: a state machine fed with events.

The policy says which trial is to hold which slot; this module makes it so, and survives what dies meanwhile: a trial's
process, its zygote, its executor, its agent, the connection to the master. A run's start is written to the database
before its slot is told, so that a search whose `dike` process was killed can go on.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence, Set
from typing import Any

from dike.exceptions import BadInputError
from executor.trial_messages import Losses, RunEnd, RunKey, SlotStatus, TrialOutput, decode_slot_message
from framework.mesos import events
from framework.mesos.driver import CallRefusedError, MasterUnavailableError
from framework.mesos.offers import AgentOffer
from framework.mesos.tasks import TaskState
from framework.policies.trials.interface import Choice, Policy
from framework.scheduler.agents import AllAgents
from framework.scheduler.job import INTERRUPTED, Answer, JobOutcome, Message, Need
from framework.scheduler.records import JobState
from framework.search.observer import SearchObserver
from framework.search.records import SearchResult, SliceRecord, TrialRecord, TrialState
from framework.search.recovery import SearchState, restore_runs
from framework.search.samplers import learns
from framework.search.slot_pool import SlotLaunch, SlotPool
from framework.search.slots import ActiveRun, Slot, at_home
from framework.search.store import Store
from framework.search.trials import Remedy, TrialTracker, trial_run

logger = logging.getLogger(__name__)

SAVE_S = 1.0
"""How often what trials report is written to the database."""
MAX_OPEN = 256
"""How many trials may be open at a time; policies and Optuna look at each of them again and again."""
MAX_BARREN = 3
"""Executors in a row whose slots end by themselves before anything has trained in them: more would do no better."""
LATE_REPORTS_S = 10.0
"""How long the end of a run waits for reports and output that were lost on their way."""


class SearchController:
    """One search.

    Feed it every event with `handle` and call `tick` a few times a second, from one thread, until `done`.

    Args:
        launch: what to search, and with what slots are launched.
        policy: decides which trials run.
        observer: who is told.
        trials: its trials.
        store: keeps the time slices, and what a search before this one has left.
        all_agents: lists every agent with all its resources, used or not, or None where that is not known.
        first_slot: number of the first slot; a search that goes on does not use numbers again.
        clock: seconds, monotonic; also the policy's.
        wall_clock: seconds since the epoch.
        state: where the service before this one has left it; None for a search without slots.
        patient: whether it waits for other agents where none that there are can hold a slot, instead of being an error.
        storage_option: what `dike logs` needs besides, to find the search.
    """

    def __init__(
        self,
        launch: SlotLaunch,
        policy: Policy,
        observer: SearchObserver,
        trials: TrialTracker,
        store: Store,
        all_agents: AllAgents,
        first_slot: int = 0,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
        state: SearchState | None = None,
        *,
        patient: bool = False,
        storage_option: str = "",
    ) -> None:
        left = state or SearchState(wall_clock(), first_slot, None, False, ())
        self._spec = launch.spec
        self._storage_option = storage_option
        self._policy = policy
        self._outbox: list[Message] = []
        self._observer = observer
        self._trials = trials
        self._store = store
        self._clock = clock
        self._wall = wall_clock
        self._pool = SlotPool(
            launch,
            self._outbox,
            observer,
            all_agents,
            left.next_slot,
            clock,
            self._may_end,
            left.slots,
            patient=patient,
        )
        self._must_decide = True
        self._wake_at_s: float | None = None
        self._saved_s = clock()
        self._began_s = left.began_s
        timed_s = left.first_slot_s if patient else left.began_s  # waiting for others does not count
        self._time_limit = TimeLimit(launch.spec.timeout_s, timed_s, clock, wall_clock)
        self._barren: set[str] = set()
        """Executors of slots that have ended so since something has last trained."""
        self._failed_in: dict[int, str] = {}
        """Trial that has taken no step since it failed -> the executor in which that was."""
        self._too_slow: set[int] = set()
        self._learns = learns(launch.spec)
        self._ends_held_since_s: dict[tuple[int, int], float] = {}
        """Trial and run -> since when its end waits for reports."""
        self._cancelled = left.cancelled
        self._failure = ""
        self._last_words = ""
        self.done = False
        if ended := trials.take_ended_before():
            # A policy keeps what it has seen of trials that have ended, and this one has just been made.
            policy.decide(clock(), ended, ())
        self._take_over(left)

    @property
    def slots(self) -> list[Slot]:
        """The slots that have not ended, by number."""
        return self._pool.slots

    @property
    def result(self) -> SearchResult:
        """How the search stands."""
        return SearchResult(
            name=self._spec.name,
            complete=not self._trials.open and self._trials.unsampled == 0,
            trials=self._trials.all,
            mode=self._spec.mode,
            checkpoint_dir=self._spec.checkpoint_dir,
            failure=self._failure,
            last_words=self._last_words,
        )

    def wanted_tasks(self) -> Set[str]:
        """Ids of the tasks of slots that may go on, or end by themselves."""
        return self._pool.wanted_tasks()

    @property
    def need(self) -> Need:
        """What it wants offers for at the moment."""
        return Need.START if not self.done and self._missing_slots() > 0 else Need.NOTHING

    @property
    def equivalence_class(self) -> Hashable:
        """Equal for searches whose slots fit the same offers, and of which none may be ended by time alone."""
        spec = self._spec
        whose = (spec.name,) if self._time_limit.runs else ()
        slot = ("slot", spec.slot_cpus, spec.slot_mem_mib, spec.slot_gpus, *whose)
        return None if self._pool.excludes_agents else slot

    def preemptible_tasks(self) -> frozenset[str]:
        """Ids of the tasks that it would end at the moment if it were asked to, and of those that it is ending."""
        leaving = (slot for slot in self._pool.slots if slot.leaving)
        may_end = self._pool.endable(self._pool.active)
        return frozenset(slot.task_id for slot in (*leaving, *may_end))

    def preempt(self, agent_ids: frozenset[str]) -> None:
        """Suspends its trials on these agents and ends its slots there, others needing the place."""
        there = [slot for slot in self._pool.active if slot.agent_id in agent_ids]
        self._pool.vacate(self._pool.endable(there))

    def excluded_agents(self) -> dict[str, float]:
        """Id of each agent that is left out after failures -> for how many seconds it still is."""
        return self._pool.excluded_agents()

    def to_state(self) -> dict[str, Any]:
        """What it needs to go on after a restart of the service, beside what is in the database of searches."""
        ending = self._failure if self._pool.is_draining else None
        slots, since_s = tuple(self._pool.slots), self._time_limit.since_s
        return SearchState(self._began_s, self._pool.next_slot, ending, self._cancelled, slots, since_s).to_json()

    def outcome(self) -> JobOutcome:
        """How it ended."""
        result = self.result
        values = result.to_json()
        if self._cancelled and not result.complete:
            return JobOutcome(JobState.KILLED, result.failure, values)
        failure = "" if self._cancelled else result.failure
        if result.best is None:
            failure = failure or "no trial has succeeded"
        return JobOutcome(JobState.FAILED if failure else JobState.FINISHED, failure, values)

    def close(self) -> None:
        """Lets go of nothing: database and lease belong to whoever made it."""

    # Events, offers and time.

    def handle(self, event: events.Event) -> None:
        """Takes one event in.

        Raises:
            BadInputError: if the script refuses its arguments.
        """
        match event:
            case events.Subscribed():
                self._pool.subscribed()
            case events.Disconnected():
                self._pool.disconnected()
            case events.StatusUpdate():
                self._status_update(event)
            case events.MessageArrived():
                if self._message(event.data):
                    self._must_decide = True

    def tick(self) -> None:
        """Does what is due by time.

        Raises:
            BadInputError: if no agent there is can ever hold a slot.
        """
        now = self._clock()
        if now - self._saved_s >= SAVE_S:
            self._saved_s = now
            self._save()
        if not self._pool.is_draining:
            self._run(now)
        if self._pool.is_draining:
            self._pool.end_overdue(now)
            if not self._pool.slots and not self.done:
                self._save()
                self.done = True
        self._rank_paused()
        self._pool.send_wanted(now)

    def match_offers(self, agents: Sequence[AgentOffer]) -> Answer:
        """Launches as many slots as there is use for.

        Raises:
            BadInputError: if no agent there is can ever hold a slot.
        """
        return self._pool.consider(agents, self._missing_slots(), self._clock())

    def launched(self) -> None:
        """The master has taken its launch."""
        self._pool.launched()

    def refused(self, error: MasterUnavailableError | CallRefusedError) -> None:
        """The master may have heard of the slots all the same: it says later what has become of them."""
        logger.warning("launch of slots not delivered, or refused: %s", error)
        self._pool.launched()

    def messages(self) -> list[Message]:
        """What its slots are to be told."""
        messages = list(self._outbox)
        self._outbox.clear()
        return messages

    def cancel(self) -> None:
        """Suspends all trials and ends all slots; `done` follows."""
        self._cancelled = True
        self._give_up(self._failure or INTERRUPTED)

    # The course of a search.

    def _take_over(self, left: SearchState) -> None:
        """Goes on with the slots that a service before this one has launched."""
        if left.slots:
            slices = self._store.load_slices()
            restore_runs(self._spec, left.slots, self._trials, slices, self._clock(), self._wall())
        for slot in left.slots:
            slot.heard_s = self._clock()
            if slot.current is not None and slot.current.since_s is None:
                self._begin_slice(slot, slot.current)
        if left.ending is not None:
            self._give_up(left.ending)

    def _run(self, now: float) -> None:
        if self._time_limit.is_over(has_slots=bool(self._pool.slots)):
            self._give_up(f"the search was to end after {self._spec.timeout_s:g} s (--timeout)")
            return
        if self._trials.admit(self._capacity(), now, self._wall()):
            self._must_decide = True
        if not self._trials.open:
            self._pool.drain()
            return
        self._pool.report_shortage(self._missing_slots(), now)
        self._pool.end_unresponsive(now)
        if self._must_decide or (self._wake_at_s is not None and now >= self._wake_at_s):
            self._decide(now)

    def _capacity(self) -> int:
        """How many trials may be open: all of them, unless the sampler learns from those before."""
        if not self._learns:
            return min(self._spec.trial_count, MAX_OPEN)
        slots = len(self._pool.active) or self._spec.max_slots or 1
        return slots * self._spec.settings.trials_per_slot

    def _decide(self, now: float) -> None:
        self._must_decide = False
        usable = {slot.id: slot for slot in self._pool.slots if slot.is_up}
        preemptible = {}
        for slot in self._pool.slots:
            if slot.current is not None:
                preemptible[slot.current.record.number] = self._is_preemptible(slot, slot.current)
        homes = self._homes((slot.id, slot.paused) for slot in usable.values())
        trials = self._trials.views(preemptible, self._refused(usable), homes)
        decision = self._policy.decide(now, trials, [slot.view() for slot in usable.values()])
        self._wake_at_s = decision.wake_at_s
        for slot_id, choice in sorted(at_home(decision.runs, usable, homes).items()):
            slot = usable[slot_id]
            if slot.current is not None and slot.current.record.number == choice.trial:
                slot.current.record.convergence = choice.score
            else:
                self._start(slot, choice)
        for slot_id in decision.suspends:
            usable[slot_id].hold(None)
        # A trial that is on its way out of one slot will need another.
        waits = any(record.state is not TrialState.RUNNING for record in self._trials.open)
        if not waits and not self._trials.unsampled and not any(slot.suspending for slot in usable.values()):
            self._pool.end_idle()

    def _refused(self, slots: Collection[int]) -> dict[int, frozenset[int]]:
        """Trial -> slots that it must not be given.

        One that no checkpoint holds can go on only where its process stands still; one that has failed, and not taken a
        step since, is tried in another executor.
        """
        homes = self._homes((slot.id, slot.unsaved) for slot in self._pool.slots)
        if any(slot.inherited for slot in self._pool.slots):
            # Such a slot has not said yet which processes it keeps.
            unknown = (one for one in self._trials.open if one.state is TrialState.SUSPENDED and one.checkpoint is None)
            homes = {record.number: frozenset[int]() for record in unknown} | homes
        refused = {trial: frozenset(slots) - its for trial, its in homes.items()}
        for trial, executor_id in self._failed_in.items():
            there = frozenset(slot.id for slot in self._pool.active if slot.executor_id == executor_id)
            # Unless there is no other executor, or its process stands still there.
            if trial not in homes and len(there) < len(self._pool.active):
                refused[trial] = refused.get(trial, frozenset()) | there
        return refused

    def _homes(self, listed: Iterable[tuple[int, Iterable[RunKey]]]) -> dict[int, frozenset[int]]:
        """Trial -> the slots that list its newest run, if it waits to go on."""
        homes: defaultdict[int, set[int]] = defaultdict(set)
        for slot, keys in listed:
            for key in keys:
                if not self._is_stale(key):
                    homes[key[0]].add(slot)
        return {trial: frozenset(its) for trial, its in homes.items()}

    def _rank_paused(self) -> None:
        """Says of the runs that stand still which nobody will go on with, and how likely the others are to go on.

        That is by what the policy last compared their trials by; without that those that have waited longest come
        first.
        """
        starting = (run.key for slot in self._pool.slots for run in slot.runs if not run.training)
        may_go_on = {(trial, run - 1) for trial, run in starting}
        for slot in self._pool.slots:
            stale = [key for key in slot.paused if self._is_stale(key) and key not in may_go_on]
            slot.let_go(stale)
            slot.likely = tuple(sorted((key for key in slot.paused if key not in stale), key=self._rank))

    def _is_stale(self, key: RunKey) -> bool:
        """Whether the trial of a run that stands still has ended, or runs again."""
        record = self._trials.records.get(key[0])
        return record is None or record.state.has_ended() or record.runs - 1 != key[1]

    def _rank(self, key: RunKey) -> float:
        score = self._trials.records[key[0]].convergence
        return -math.inf if score is None or math.isnan(score) else -score

    def _start(self, slot: Slot, choice: Choice) -> None:
        record = self._trials.records[choice.trial]
        is_there = any(key[0] == record.number for key in slot.unsaved)
        if record.state is TrialState.SUSPENDED and record.checkpoint is None and not is_there:
            self._observer.notify(f"trial {record.number} begins anew: its process is gone, and it could not be saved")
        number = self._trials.start(record, slot.id, slot.node, choice.score, slot.kind)
        run = ActiveRun(record, trial_run(self._spec, record, number), choice)
        slot.hold(run)
        if slot.current is run:
            self._begin_slice(slot, run)
            self._observer.trial_started(record, slot, choice.reason)

    def _give_up(self, reason: str) -> None:
        self._failure = self._failure or reason
        if not self._pool.is_draining:
            self._pool.drain()

    def _save(self) -> None:
        self._trials.save_progress()
        for slot in self._pool.slots:
            for run in slot.runs:
                run.known = run.record.reports
                run.known_output = self._trials.output_received(run.record)
        self._observer.trials_changed(self._trials.all)

    # How many slots it has use for, and which it can do without.

    def _missing_slots(self) -> int:
        """How many more slots there is use for; below 0 if there are too many."""
        if self._pool.is_draining:
            return 0
        useful = len(self._trials.open) + self._trials.unsampled
        if self._spec.max_slots is not None:
            useful = min(useful, self._spec.max_slots)
        return useful - len(self._pool.active)

    def _is_preemptible(self, slot: Slot, run: ActiveRun) -> bool:
        """Whether a slot's run can be suspended, and would have something to go on from."""
        return slot.pausable or self._is_saveable(slot, run)

    def _is_saveable(self, slot: Slot, run: ActiveRun) -> bool:
        return slot.preemptible and run.record.number not in self._too_slow

    def _may_end(self, slot: Slot) -> bool:
        """Whether ending a slot loses nothing of its runs; of what stands still `SlotPool.endable` says so."""
        return all(self._loses_nothing(slot, run) for run in slot.runs)

    def _loses_nothing(self, slot: Slot, run: ActiveRun) -> bool:
        if run is slot.current and self._is_saveable(slot, run):
            return True
        status = slot.status
        is_training = run.training or (status is not None and status.run == run.key and status.training)
        # One that is to go on in a process that no checkpoint holds has something to lose before its first step.
        return not is_training and (run.record.checkpoint is not None or run.order.trial.run == 0)

    # What slots say: how they are, what their runs report, how these ended.

    def _message(self, data: str) -> bool:
        """A message has come; whether a policy has something new to decide upon.

        Raises:
            BadInputError: if the script has refused its arguments before any trial has trained.
        """
        message = _decoded(data)
        slot = None if message is None else self._pool.find(message.task_id)
        if message is None or slot is None:
            return False
        slot.heard_s = self._clock()
        if isinstance(message, SlotStatus):
            return self._slot_status(slot, message)
        if not self._receive(message):
            slot.ask_again()
        return self._free_stopped()

    def _final_message(self, slot: Slot, data: str) -> None:
        """What came with the end of a slot's task: how runs ended that we may not have heard of.

        Raises:
            BadInputError: as `_message`.
        """
        message = _decoded(data)
        if not isinstance(message, SlotStatus):
            return
        for losses in message.losses:
            self._receive(losses)
        self._free_stopped()
        for piece in message.output:
            self._receive(piece, is_last=True)
        self._slot_status(slot, message)

    def _receive(self, message: Losses | TrialOutput, *, is_last: bool = False) -> bool:
        """Takes reports or output in; false if something before it is missing, and no last words."""
        record = self._trials.records.get(message.trial)
        if record is None:
            return True
        if isinstance(message, TrialOutput):
            return self._trials.receive_output(record, message, is_last=is_last)
        return record.state.has_ended() or self._trials.receive(record, message)

    def _free_stopped(self) -> bool:
        """Makes trials leave their slots that have just been stopped; whether there are any."""
        stopped = self._trials.stop_hopeless(self._wall())
        for record in stopped:
            self._observer.trial_stopped(record)
            for slot in self._pool.slots:
                if slot.current is not None and slot.current.record is record:
                    slot.stop()
        return bool(stopped)

    def _slot_status(self, slot: Slot, status: SlotStatus) -> bool:
        before = slot.view(), slot.unsaved
        slot.status = status
        is_news = slot.inherited
        if slot.inherited:
            slot.adopt(status)
        run = slot.current
        if run is not None and status.run == run.key:
            self._trials.set_checkpoint(run.record, status.checkpoint, status.checkpoint_step)
            self._trials.set_batch_size(run.record, status.batch_size)
            if status.training and not run.training:
                run.training = slot.has_trained = True
                if run.slice is not None:
                    run.slice.process = "continued" if status.continued else "new"
                    if status.continued and run.before_step is not None:
                        # A process that stayed in memory is beyond its checkpoint, if it has one at all.
                        run.slice.from_step = run.before_step
                self._first_step(run)
        for end in status.ends:
            if not self._must_wait(slot, end):
                is_news |= self._run_ended(slot, end)
        unknown = slot.unknown_run()
        if unknown is not None:
            logger.info("slot %d has never heard of run %s", slot.id, unknown.key)
            trial = unknown.order.trial
            step = unknown.record.checkpoint_step
            end = RunEnd(trial.number, trial.run, "stopped", checkpoint=trial.resume_from, step=step)
            is_news |= self._run_ended(slot, end)
        return is_news or (slot.view(), slot.unsaved) != before

    def _must_wait(self, slot: Slot, end: RunEnd) -> bool:
        """Whether the end of a run is not taken in yet, because reports or output of it are still to come."""
        run = next((run for run in slot.runs if run.key == end.key), None)
        # Nobody waits for what a trial still says that has been stopped.
        is_awaited = run is not None and not run.record.state.has_ended() and not slot.is_gone
        if run is None or not is_awaited or not self._trials.lacks_anything(run.record, end):
            self._ends_held_since_s.pop(end.key, None)
            return False
        now_s = self._clock()
        if now_s - self._ends_held_since_s.setdefault(end.key, now_s) >= LATE_REPORTS_S:
            logger.warning("some reports or output of trial %d, run %d never came", *end.key)
            return False
        slot.ask_again()
        return True

    def _status_update(self, event: events.StatusUpdate) -> None:
        slot = self._pool.status_update(event)
        if slot is None:
            return
        self._must_decide = True
        if slot.is_gone:
            if event.status.get("data"):
                self._final_message(slot, event.status["data"])
            self._slot_ended(slot)

    # How runs and slots end: the next slice, another executor, another agent, giving up.

    def _run_ended(self, slot: Slot, end: RunEnd) -> bool:
        """A run has ended; whether that is news.

        Raises:
            BadInputError: if the script has refused its arguments before any trial has trained.
        """
        run = slot.run_ended(end)
        if run is None:
            return False
        self._end_slice(run, end.outcome, end)
        if end.outcome == "bad_input" and not self._trials.has_readings:
            if not self._observer.is_public:
                if end.message not in end.tail:
                    self._observer.output(end.tail)
                raise BadInputError(end.message)
            self._last_words = end.message
            self._give_up("the script refuses its arguments")
        why = ""
        if end.outcome == "failed":
            why = self._trials.why_hopeless(run.record, end, lambda: self._pool.is_only_agent(slot))
        remedy = self._trials.run_ended(run.record, end, self._wall(), is_hopeless=bool(why))
        self._report_end(run.record, slot, end, run.slice.from_step if run.slice is not None else 0, why)
        if slot.current is not None and slot.current.since_s is None and not (slot.leaving or slot.is_gone):
            self._begin_slice(slot, slot.current)
            self._observer.trial_started(slot.current.record, slot, slot.current.choice.reason)
            if slot.current.record.state.has_ended():
                # An inherited slot may have said that it is hopeless before how the run before it ended.
                slot.stop()
        if remedy is not Remedy.NONE and self._pool.replace(slot):
            self._failed_in[run.record.number] = slot.executor_id
        elif run.record.state.has_ended():
            self._failed_in.pop(run.record.number, None)
        if remedy is Remedy.AVOID_AGENT:
            self._pool.exclude_agent(slot, f"trial {run.record.number} has failed again")
        return True

    def _slot_ended(self, slot: Slot) -> None:
        """A slot is gone, and its runs with it."""
        if not (slot.leaving and slot.state is TaskState.FINISHED):
            self._observer.notify(slot.failure())
        for run in slot.runs:
            self._end_slice(run, "lost")
            counts = run.since_s is not None and self._pool.is_to_blame(slot)
            self._trials.run_lost(run.record, slot.failure(), self._wall(), counts=counts)
            if run.record.state is TrialState.FAILED:
                self._trial_failed(run.record, f": {slot.failure()}")
        slot.current = slot.next = None
        if slot.state is not TaskState.FAILED or slot.has_trained or slot.missed_executor:
            return
        is_known = slot.executor_id in self._barren
        self._barren.add(slot.executor_id)
        if len(self._barren) >= MAX_BARREN and not self._pool.slots and not self._pool.is_draining:
            self._give_up(f"{slot.failure()}; the slots of {MAX_BARREN - 1} executors before it ended like that, too")
        elif not slot.executor_seen and not is_known:
            self._pool.exclude_agent(slot, "an executor could not be started there")

    def _report_end(self, record: TrialRecord, slot: Slot, end: RunEnd, from_step: int, why_hopeless: str) -> None:
        self._observer.trial_ended(record, slot, end.outcome)
        if record.state is TrialState.STOPPED:
            return  # that has been said, and it never goes on
        if end.outcome == "stopped" and end.exit_code is not None:
            self._trial_stopped(record, end, from_step)
        elif end.outcome in ("failed", "bad_input", "timed_out"):
            self._report_failed(record, slot, end, why_hopeless)

    def _trial_stopped(self, record: TrialRecord, end: RunEnd, from_step: int) -> None:
        if record.checkpoint_step <= from_step and not self._pool.is_draining:
            # Its steps, or its saves, take longer than a slice and the time to suspend: it would never get on.
            self._too_slow.add(record.number)
            self._observer.notify(f"trial {record.number} did not get to a checkpoint; it will run to its end")
        why = f" ({end.message})" if end.message and not self._observer.is_public else ""
        self._observer.notify(
            f"trial {record.number} was stopped{why}; it goes on from its last checkpoint, step "
            f"{record.checkpoint_step}"
        )

    def _report_failed(self, record: TrialRecord, slot: Slot, end: RunEnd, why_hopeless: str) -> None:
        where = (
            f"trial {record.number} failed on {slot.node}{self._said(end)}; its output: dike logs {self._spec.name} "
            f"--trial {record.number}{self._storage_option}{f'; its end is kept in {end.log}' if end.log else ''}"
        )
        if record.state is not TrialState.FAILED:
            self._observer.notify(f"{where}; it is tried again")
            return
        self._observer.output(end.tail)
        self._observer.notify(f"{where}; it is not tried again{f': {why_hopeless}' if why_hopeless else ''}")
        self._trial_failed(record, self._said(end), end.message if self._observer.is_public else "")

    def _said(self, end: RunEnd) -> str:
        """What the script has said, where only its user reads it."""
        return "" if self._observer.is_public else f": {end.message}"

    def _trial_failed(self, record: TrialRecord, said: str, last_words: str = "") -> None:
        if self._spec.on_failure == "abort" and not self._failure:
            self._last_words = last_words
            self._give_up(f"trial {record.number} failed{said}")

    # Time slices: which run held which slot, when, and how fast it trained.

    def _begin_slice(self, slot: Slot, run: ActiveRun) -> None:
        """A run has got its slot."""
        run.since_s = self._clock()
        run.before_step = run.record.step
        run.slice = SliceRecord(
            trial=run.record.number,
            run=run.order.trial.run,
            slot=slot.id,
            agent=slot.node,
            kind=slot.kind,
            start_s=self._wall(),
            reason=run.choice.reason,
            convergence=run.choice.score,
            from_step=run.record.checkpoint_step,
        )
        run.record.current = run.slice
        self._store.save_slice(run.slice)

    def _first_step(self, run: ActiveRun) -> None:
        """A run has begun to train. For the policy its slice counts from here: what it took is not the trial's."""
        self._failed_in.pop(run.record.number, None)
        self._barren.clear()
        run.since_s = self._clock()
        if run.slice is not None:
            run.slice.first_step_s = self._wall()
            self._store.save_slice(run.slice)
        self._trials.stepped(run.record)

    def _end_slice(self, run: ActiveRun, outcome: str, end: RunEnd | None = None) -> None:
        """A run has ended.

        Args:
            run: which; nothing happens if it never got its slot.
            outcome: see `SliceRecord.outcome`.
            end: what its slot said of its end; None if nothing.
        """
        ended = run.slice
        if ended is None:
            return
        ended.end_s = self._wall()
        ended.outcome = outcome
        ended.to_step = max(run.record.step, ended.from_step)
        ended.samples_per_s = self._trials.speeds.of_run(run.record, ended.run)
        if end is not None:
            ended.suspend_s = end.suspend_s
            for name, value in dataclasses.asdict(end.usage).items():
                setattr(ended, name, value)
        run.record.slot_s += ended.end_s - ended.start_s
        run.record.current = None
        self._store.save_slice(ended)


class TimeLimit:
    """The time that a search may take.

    Args:
        limit_s: how long; None for as long as it takes.
        since_s: from when on, seconds since the epoch; None: from its first slot on.
        clock: seconds, monotonic.
        wall_clock: seconds since the epoch.

    Attributes:
        since_s: from when on it counts, seconds since the epoch; None before.
    """

    def __init__(
        self,
        limit_s: float | None,
        since_s: float | None,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self.since_s = since_s
        self._limit_s = limit_s
        self._clock = clock
        self._wall = wall_clock
        self._begun_s = clock() - (wall_clock() - since_s) if since_s is not None else None

    @property
    def runs(self) -> bool:
        """Whether it will be over by time alone."""
        return self._limit_s is not None and self._begun_s is not None

    def is_over(self, *, has_slots: bool) -> bool:
        """Whether the search, which has slots now or has none, has taken so long."""
        if self._begun_s is None and has_slots:
            self.since_s, self._begun_s = self._wall(), self._clock()
        if self._limit_s is None or self._begun_s is None:
            return False
        return self._clock() - self._begun_s >= self._limit_s


def _decoded(data: str) -> SlotStatus | Losses | TrialOutput | None:
    """What a slot sent; None if it cannot be read."""
    try:
        return decode_slot_message(data)
    except ValueError as error:
        logger.warning("message ignored: %s", error)
        return None
