"""A search from its first slot to its last trial: a state machine fed with events.

The policy decides which trial runs in which slot; this module carries that out, and survives the end of a trial's
process, its zygote, its executor, its agent, and the connection to the master. A run's start is stored before its slot
is notified, so that a search can resume after its `dike` process was killed.
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
from framework.project.failure_summary import is_out_of_gpu_memory
from framework.scheduler.agents import AllAgents
from framework.scheduler.job import INTERRUPTED, Answer, JobOutcome, Message, Need
from framework.scheduler.records import JobState
from framework.search.limits import Budget, FailureRule, TimeLimit
from framework.search.observer import SearchObserver
from framework.search.records import SearchOutcome, SliceRecord, TrialRecord, TrialState
from framework.search.recovery import SearchState, restore_runs
from framework.search.samplers import learns
from framework.search.slot_pool import SlotLaunch, SlotPool, gpu_memory_bytes
from framework.search.slots import ActiveRun, Slot, prefer_paused
from framework.search.store import Store
from framework.search.trials import RetryAction, TrialTracker, trial_run

logger = logging.getLogger(__name__)

SAVE_INTERVAL_S = 1.0
"""Interval of storing reports in the database."""
MAX_OPEN_TRIALS = 256
"""Maximum number of open trials, as policies and Optuna iterate over all of them."""
MAX_FAILED_EXECUTORS = 3
"""Consecutive executors whose slots fail before anything has trained in them, after which the search ends."""
LATE_REPORTS_TIMEOUT_S = 10.0
"""Maximum delay of the end of a run for reports and output that were lost in transit."""


class SearchController:
    """One search.

    Pass it every event by `handle` and call `tick` a few times per second, from one thread, until `done`.

    Args:
        all_agents: lists every agent with all its resources, used or not, or None if unknown.
        first_slot: number of the first slot; a resumed search does not reuse numbers.
        clock: seconds, monotonic; also the policy's.
        wall_clock: seconds since the epoch.
        state: state left by an earlier service; None for a search without slots.
        patient: whether to wait for new agents if none can ever hold a slot, instead of raising an error.
        storage_option: option of `dike logs` that names the database.
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
        restored = state or SearchState(wall_clock(), first_slot, None, False, ())
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
            restored.next_slot,
            clock,
            self._may_end,
            restored.slots,
            restored.executors,
            patient=patient,
        )
        self._must_decide = True
        self._wake_at_s: float | None = None
        self._saved_s = clock()
        self._began_s = restored.began_s
        timed_s = restored.first_slot_s if patient else restored.began_s  # waiting for other jobs does not count
        self._time_limit = TimeLimit(launch.spec.timeout_s, timed_s, clock, wall_clock)
        self._budget = Budget.parse(launch.spec.budget) if launch.spec.budget else None
        self._failed_executors: set[str] = set()
        """Executors whose slots failed since anything last trained."""
        self._failed_in: dict[int, str] = {}
        """Trial without a step since its failure -> executor of the failure."""
        self._failure_rule = FailureRule.parse(launch.spec.on_failure)
        self._outgrown: dict[int, int] = {}
        """Trial that ran out of GPU memory -> memory of that GPU, bytes."""
        self._too_slow: set[int] = set()
        self._learns = learns(launch.spec)
        self._ends_waiting_since_s: dict[tuple[int, int], float] = {}
        """Trial and run -> since when its end waits for reports."""
        self._cancelled = restored.cancelled
        self._failure = ""
        self._last_words = ""
        self.done = False
        if ended := trials.take_ended_before():
            # Policies remember ended trials; this one is new.
            policy.decide(clock(), ended, ())
        self._restore(restored)

    @property
    def slots(self) -> list[Slot]:
        return self._pool.slots

    @property
    def result(self) -> SearchOutcome:
        return SearchOutcome(
            name=self._spec.name,
            complete=not self._trials.open and self._trials.unsampled == 0,
            trials=self._trials.all,
            mode=self._spec.mode,
            checkpoint_dir=self._spec.checkpoint_dir,
            failure=self._failure,
            last_words=self._last_words,
        )

    def wanted_tasks(self) -> Set[str]:
        return self._pool.wanted_tasks()

    @property
    def need(self) -> Need:
        return Need.START if not self.done and self._missing_slots() > 0 else Need.NOTHING

    @property
    def equivalence_class(self) -> Hashable:
        """Equal for searches whose slots fit the same offers; unique for one with a running time limit."""
        spec = self._spec
        whose = (spec.name,) if self._time_limit.runs else ()
        slot = ("slot", spec.slot_cpus, spec.slot_mem_mib, spec.slot_gpus, *whose)
        # What a slot needs that shares the GPU of another one depends on the slots there are.
        return None if self._pool.excludes_agents or self._pool.slots_per_gpu > 1 else slot

    def preemptible_tasks(self) -> frozenset[str]:
        leaving = (slot for slot in self._pool.slots if slot.leaving)
        may_end = self._pool.endable(self._pool.active)
        return frozenset(slot.task_id for slot in (*leaving, *may_end))

    def preempt(self, agent_ids: frozenset[str]) -> None:
        """Ends the slots on these agents that can end, for another job."""
        there = [slot for slot in self._pool.active if slot.agent_id in agent_ids]
        self._pool.vacate(self._pool.endable(there))

    def missing_tasks(self) -> int:
        # Of those that share a GPU, each GPU counts once.
        return max(0, math.ceil(self._missing_slots() / self._pool.slots_per_gpu))

    def excluded_agents(self) -> dict[str, float]:
        return self._pool.excluded_agents()

    def to_state(self) -> dict[str, Any]:
        """Returns the state to resume after a restart of the service, beside the database of searches."""
        ending = self._failure if self._pool.is_draining else None
        slots, since_s = tuple(self._pool.slots), self._time_limit.since_s
        executors = self._pool.shared_executors
        return SearchState(
            self._began_s, self._pool.next_slot, ending, self._cancelled, slots, since_s, executors
        ).to_json()

    def outcome(self) -> JobOutcome:
        result = self.result
        values = result.to_json()
        if self._cancelled and not result.complete:
            return JobOutcome(JobState.KILLED, result.failure, values)
        failure = "" if self._cancelled else result.failure
        if result.best is None:
            failure = failure or "no trial has succeeded"
        return JobOutcome(JobState.FAILED if failure else JobState.FINISHED, failure, values)

    def close(self) -> None:
        """No-op: the caller owns database and lease."""

    # Events, offers and time.

    def handle(self, event: events.Event) -> None:
        """Applies one event.

        Raises:
            BadInputError: if the script refuses its arguments.
        """
        match event:
            case events.Subscribed():
                self._pool.subscribed()
            case events.Disconnected():
                self._pool.disconnected()
            case events.StatusUpdate():
                self._apply_task_status(event)
            case events.MessageArrived():
                if self._handle_message(event.data):
                    self._must_decide = True

    def tick(self) -> None:
        """Performs periodic tasks.

        Raises:
            BadInputError: if no agent can ever hold a slot.
        """
        now = self._clock()
        if now - self._saved_s >= SAVE_INTERVAL_S:
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
        """Launches as many slots as are useful.

        Raises:
            BadInputError: if no agent can ever hold a slot.
        """
        return self._pool.consider(agents, self._missing_slots(), self._clock())

    def launched(self) -> None:
        self._pool.launched()

    def refused(self, error: MasterUnavailableError | CallRefusedError) -> None:
        """The master may have received the launch anyway; it reports the state of the tasks later."""
        logger.warning("the master did not receive or accept the launch of slots: %s", error)
        self._pool.launched()

    def messages(self) -> list[Message]:
        messages = list(self._outbox)
        self._outbox.clear()
        return messages

    def cancel(self) -> None:
        """Suspends all trials and ends all slots; `done` follows."""
        self._cancelled = True
        self._end_search(self._failure or INTERRUPTED)

    # The course of a search.

    def _restore(self, restored: SearchState) -> None:
        """Takes over the slots launched by an earlier service."""
        if restored.slots:
            slices = self._store.load_slices()
            restore_runs(self._spec, restored.slots, self._trials, slices, self._clock(), self._wall())
        for slot in restored.slots:
            slot.last_message_s = self._clock()
            if slot.current is not None and slot.current.since_s is None:
                self._begin_slice(slot, slot.current)
        if restored.ending is not None:
            self._end_search(restored.ending)

    def _run(self, now: float) -> None:
        if self._time_limit.start_or_check(has_slots=bool(self._pool.slots)):
            self._end_search(f"the search reached its time limit of {self._spec.timeout_s:g} s (--timeout)")
            return
        if self._is_budget_used_up():
            self._end_search(f"the search has used its budget of {self._spec.budget}; continue with a greater --budget")
            return
        if self._trials.admit(self._max_open_trials(), now, self._wall()):
            self._must_decide = True
        if not self._trials.open:
            self._pool.drain()
            return
        self._pool.share_gpus(now)
        self._pool.report_shortage(self._missing_slots(), now)
        self._pool.end_unresponsive(now)
        if self._must_decide or (self._wake_at_s is not None and now >= self._wake_at_s):
            self._decide(now)

    def _is_budget_used_up(self) -> bool:
        """Raises BadInputError if the budget is of GPUs, and slots have none."""
        gpus = self._pool.slot_gpus
        if self._budget is None or gpus is None:
            return False
        gpus_of_slot = gpus / self._pool.slots_per_gpu
        return self._budget.is_used_up(self._trials.records.values(), self._wall(), gpus_of_slot, self._spec.slot_cpus)

    def _max_open_trials(self) -> int:
        """Returns the maximum number of open trials: all of them, unless the sampler learns from earlier ones."""
        if not self._learns:
            return min(self._spec.trial_count, MAX_OPEN_TRIALS)
        slots = len(self._pool.active) or self._spec.max_slots or 1
        return slots * self._spec.settings.trials_per_slot

    def _decide(self, now: float) -> None:
        self._must_decide = False
        usable = {slot.id: slot for slot in self._pool.slots if slot.is_up}
        preemptible = {}
        for slot in self._pool.slots:
            if slot.current is not None:
                preemptible[slot.current.record.number] = self._is_preemptible(slot, slot.current)
        paused_in = self._paused_in((slot.id, slot.paused) for slot in usable.values())
        trials = self._trials.views(preemptible, self._refused(usable), paused_in)
        decision = self._policy.decide(now, trials, [slot.view() for slot in usable.values()])
        self._wake_at_s = decision.wake_at_s
        for slot_id, choice in sorted(prefer_paused(decision.runs, usable, paused_in).items()):
            slot = usable[slot_id]
            if slot.current is not None and slot.current.record.number == choice.trial:
                slot.current.record.convergence = choice.score
            else:
                self._start(slot, choice)
        for slot_id in decision.suspends:
            usable[slot_id].request_run(None)
        # A trial that is being suspended will need another slot.
        waits = any(record.state is not TrialState.RUNNING for record in self._trials.open)
        if not waits and not self._trials.unsampled and not any(slot.suspending for slot in usable.values()):
            self._pool.end_idle()

    def _refused(self, slots: Collection[int]) -> dict[int, frozenset[int]]:
        """Returns trial -> slots that it must not be given.

        A trial without a checkpoint can resume only where it is paused. One that failed, without a step since, is
        retried in another executor; one that ran out of GPU memory, on a larger GPU. One that is being copied waits.
        """
        paused_in = self._paused_in((slot.id, slot.unsaved) for slot in self._pool.slots)
        if any(slot.inherited for slot in self._pool.slots):
            # Such a slot has not reported yet which runs are paused in it.
            unknown = (one for one in self._trials.open if one.state is TrialState.SUSPENDED and one.checkpoint is None)
            paused_in = {record.number: frozenset[int]() for record in unknown} | paused_in
        refused = {trial: frozenset(slots) - slot_ids for trial, slot_ids in paused_in.items()}
        for trial, executor_id in self._failed_in.items():
            there = frozenset(slot.id for slot in self._pool.active if slot.executor_id == executor_id)
            # Unless there is no other executor, or it is paused there.
            if trial not in paused_in and len(there) < len(self._pool.active):
                refused[trial] = refused.get(trial, frozenset()) | there
        for trial, memory_bytes in self._outgrown.items():
            small = frozenset(slot.id for slot in self._pool.slots if gpu_memory_bytes(slot.kind) <= memory_bytes)
            refused[trial] = refused.get(trial, frozenset()) | small
        for slot in self._pool.slots:
            for run in slot.runs:
                # A trial that is being copied must keep that checkpoint until the copy trains.
                if run.choice.copies is not None and not run.training:
                    refused[run.choice.copies] = frozenset(slots)
        return refused

    def _paused_in(self, listed: Iterable[tuple[int, Iterable[RunKey]]]) -> dict[int, frozenset[int]]:
        """Returns trial -> slots that list its newest run, if it waits to resume."""
        paused_in: defaultdict[int, set[int]] = defaultdict(set)
        for slot, keys in listed:
            for key in keys:
                if not self._is_stale(key):
                    paused_in[key[0]].add(slot)
        return {trial: frozenset(slot_ids) for trial, slot_ids in paused_in.items()}

    def _rank_paused(self) -> None:
        """Discards stale paused runs, and ranks the others by how likely they resume.

        Likelier are better scores by the policy, then longer waiting times.
        """
        starting = (run.key for slot in self._pool.slots for run in slot.runs if not run.training)
        resuming = {(trial, run - 1) for trial, run in starting}
        for slot in self._pool.slots:
            stale = [key for key in slot.paused if self._is_stale(key) and key not in resuming]
            slot.evict(stale)
            slot.likely = tuple(sorted((key for key in slot.paused if key not in stale), key=self._rank))

    def _is_stale(self, key: RunKey) -> bool:
        """Returns whether the trial of a paused run has ended or runs again."""
        record = self._trials.records.get(key[0])
        return record is None or record.state.has_ended() or record.runs - 1 != key[1]

    def _rank(self, key: RunKey) -> float:
        score = self._trials.records[key[0]].convergence
        return -math.inf if score is None or math.isnan(score) else -score

    def _start(self, slot: Slot, choice: Choice) -> None:
        record = self._trials.records[choice.trial]
        is_there = any(key[0] == record.number for key in slot.unsaved)
        if record.state is TrialState.SUSPENDED and record.checkpoint is None and not is_there:
            self._observer.notify(
                f"trial {record.number} starts anew: its paused process is gone, and it has no checkpoint"
            )
        if choice.copies is not None:
            changed = self._trials.copy(record, self._trials.records[choice.copies])
            choice = dataclasses.replace(choice, reason=f"{choice.reason}: {changed}")
            self._observer.notify(f"trial {record.number} continues as a copy of trial {choice.copies}: {changed}")
        number = self._trials.start(record, slot.id, slot.node, choice.score, slot.kind)
        run = ActiveRun(record, trial_run(self._spec, record, number), choice)
        slot.request_run(run)
        if slot.current is run:
            self._begin_slice(slot, run)
            self._observer.trial_started(record, slot, choice.reason)

    def _end_search(self, reason: str) -> None:
        self._failure = self._failure or reason
        if not self._pool.is_draining:
            self._pool.drain()

    def _save(self) -> None:
        self._trials.save_progress()
        for slot in self._pool.slots:
            for run in slot.runs:
                run.stored_reports = run.record.reports
                run.stored_output_bytes = self._trials.output_received(run.record)
        self._observer.trials_changed(self._trials.all)

    # Number of useful slots, and which can end.

    def _missing_slots(self) -> int:
        """Returns how many more slots are useful; negative if there are too many."""
        if self._pool.is_draining:
            return 0
        useful = len(self._trials.open) + self._trials.unsampled
        if self._spec.max_slots is not None:
            useful = min(useful, self._spec.max_slots)
        return useful - len(self._pool.active)

    def _is_preemptible(self, slot: Slot, run: ActiveRun) -> bool:
        return slot.pausable or self._is_saveable(slot, run)

    def _is_saveable(self, slot: Slot, run: ActiveRun) -> bool:
        return slot.preemptible and run.record.number not in self._too_slow

    def _may_end(self, slot: Slot) -> bool:
        """Returns whether ending a slot loses nothing of its runs; `SlotPool.endable` checks paused runs."""
        return all(self._loses_nothing(slot, run) for run in slot.runs)

    def _loses_nothing(self, slot: Slot, run: ActiveRun) -> bool:
        if run is slot.current and self._is_saveable(slot, run):
            return True
        status = slot.status
        is_training = run.training or (status is not None and status.run == run.key and status.training)
        # A run that resumes a paused process without a checkpoint can lose progress before its first step.
        return not is_training and (run.record.checkpoint is not None or run.order.trial.run == 0)

    # Messages of slots: status, reports, ends of runs.

    def _handle_message(self, data: str) -> bool:
        """Applies a message, and returns whether the policy must decide again.

        Raises:
            BadInputError: if the script rejected its arguments before any trial trained.
        """
        message = _decoded(data)
        slot = None if message is None else self._pool.find(message.task_id)
        if message is None or slot is None:
            return False
        slot.last_message_s = self._clock()
        if isinstance(message, SlotStatus):
            return self._apply_status(slot, message)
        if not self._receive(message):
            slot.request_resend()
        return self._stop_hopeless()

    def _handle_final_message(self, slot: Slot, data: str) -> None:
        """Applies the message attached to the end of a slot's task: ends of runs that may be unknown yet.

        Raises:
            BadInputError: see `_handle_message`.
        """
        message = _decoded(data)
        if not isinstance(message, SlotStatus):
            return
        for losses in message.losses:
            self._receive(losses)
        self._stop_hopeless()
        for piece in message.output:
            self._receive(piece, is_last=True)
        self._apply_status(slot, message)

    def _receive(self, message: Losses | TrialOutput, *, is_last: bool = False) -> bool:
        """Applies reports or output; returns False if earlier ones are missing and `is_last` is not set."""
        record = self._trials.records.get(message.trial)
        if record is None:
            return True
        if isinstance(message, TrialOutput):
            return self._trials.receive_output(record, message, is_last=is_last)
        return record.state.has_ended() or self._trials.receive(record, message)

    def _stop_hopeless(self) -> bool:
        """Stops hopeless trials and their runs; returns whether there are any."""
        stopped = self._trials.stop_hopeless(self._wall())
        for record in stopped:
            self._observer.trial_stopped(record)
            for slot in self._pool.slots:
                if slot.current is not None and slot.current.record is record:
                    slot.stop_run()
        return bool(stopped)

    def _apply_status(self, slot: Slot, status: SlotStatus) -> bool:
        before = slot.view(), slot.unsaved
        slot.status = status
        is_news = slot.inherited
        if slot.inherited:
            slot.adopt(status)
        run = slot.current
        if run is not None and status.run == run.key:
            self._trials.set_checkpoint(run.record, status.checkpoint, status.checkpoint_step)
            self._trials.set_batch_size(run.record, status.batch_size)
            if status.training:
                self._pool.measured(status.usage.gpu_mem_bytes, has_finished=False)
            if status.training and not run.training:
                run.training = slot.has_trained = True
                if run.slice is not None:
                    run.slice.process = "continued" if status.continued else "new"
                    if status.continued and run.before_step is not None:
                        # A process that was paused is beyond its checkpoint.
                        run.slice.from_step = run.before_step
                self._first_step(run)
        for end in status.ends:
            if not self._await_reports(slot, end):
                is_news |= self._run_ended(slot, end)
        unknown = slot.superseded_run()
        if unknown is not None:
            logger.info("slot %d never received run %s", slot.id, unknown.key)
            trial = unknown.order.trial
            step = unknown.record.checkpoint_step
            end = RunEnd(trial.number, trial.run, "killed", checkpoint=trial.resume_from, step=step)
            is_news |= self._run_ended(slot, end)
        return is_news or (slot.view(), slot.unsaved) != before

    def _await_reports(self, slot: Slot, end: RunEnd) -> bool:
        """Returns whether to delay the end of a run until its reports and output arrive, and requests them."""
        run = next((run for run in slot.runs if run.key == end.key), None)
        # Late reports of stopped trials do not matter.
        is_awaited = run is not None and not run.record.state.has_ended() and not slot.is_gone
        if run is None or not is_awaited or not self._trials.lacks_data(run.record, end):
            self._ends_waiting_since_s.pop(end.key, None)
            return False
        now_s = self._clock()
        if now_s - self._ends_waiting_since_s.setdefault(end.key, now_s) >= LATE_REPORTS_TIMEOUT_S:
            logger.warning("some reports or output of trial %d, run %d never came", *end.key)
            return False
        slot.request_resend()
        return True

    def _apply_task_status(self, event: events.StatusUpdate) -> None:
        slot = self._pool.apply_task_status(event)
        if slot is None:
            return
        self._must_decide = True
        if slot.is_gone:
            if event.status.get("data"):
                self._handle_final_message(slot, event.status["data"])
            self._slot_ended(slot)

    # Ends of runs and slots.

    def _run_ended(self, slot: Slot, end: RunEnd) -> bool:
        """Ends a run; returns False if it had ended already.

        Raises:
            BadInputError: if the script rejected its arguments before any trial trained.
        """
        run = slot.run_ended(end)
        if run is None:
            return False
        self._end_slice(run, end.outcome, end)
        if run.training:
            self._pool.measured(end.usage.gpu_mem_bytes, has_finished=end.outcome == "finished")
        if end.outcome == "bad_input" and not self._trials.has_readings:
            if not self._observer.is_public:
                if end.message not in end.tail:
                    self._observer.output(end.tail)
                raise BadInputError(end.message)
            self._last_words = end.message
            self._end_search("the script refuses its arguments")
        why = ""
        if end.outcome == "failed":
            why = self._trials.why_hopeless(run.record, end, lambda: self._pool.is_only_agent(slot))
            if self._failure_rule.needs_larger_gpu and is_out_of_gpu_memory(end.tail):
                memory_bytes = self._outgrown[run.record.number] = gpu_memory_bytes(slot.kind)
                why = self._pool.why_no_gpu_above(memory_bytes)
        action = self._trials.run_ended(run.record, end, self._wall(), is_hopeless=bool(why))
        self._report_end(run.record, slot, end, run.slice.from_step if run.slice is not None else 0, why)
        if slot.current is not None and slot.current.since_s is None and not (slot.leaving or slot.is_gone):
            self._begin_slice(slot, slot.current)
            self._observer.trial_started(slot.current.record, slot, slot.current.choice.reason)
            if slot.current.record.state.has_ended():
                # An inherited slot may have reported its values before the end of the previous run.
                slot.stop_run()
        if action is not RetryAction.NONE and self._pool.replace(slot):
            self._failed_in[run.record.number] = slot.executor_id
        elif run.record.state.has_ended():
            self._failed_in.pop(run.record.number, None)
            self._outgrown.pop(run.record.number, None)
        if action is RetryAction.AVOID_AGENT:
            self._pool.exclude_agent(slot, f"trial {run.record.number} failed again")
        return True

    def _slot_ended(self, slot: Slot) -> None:
        if not (slot.leaving and slot.state is TaskState.FINISHED):
            self._observer.notify(slot.failure())
        for run in slot.runs:
            self._end_slice(run, "lost")
            counts = run.since_s is not None and self._pool.may_have_caused_end(slot)
            self._trials.run_lost(run.record, slot.failure(), self._wall(), counts=counts)
            if run.record.state is TrialState.FAILED:
                self._trial_failed(run.record, f": {slot.failure()}")
        slot.current = slot.next = None
        if slot.state is not TaskState.FAILED or slot.has_trained or slot.missed_executor:
            return
        is_known = slot.executor_id in self._failed_executors
        self._failed_executors.add(slot.executor_id)
        if len(self._failed_executors) >= MAX_FAILED_EXECUTORS and not self._pool.slots and not self._pool.is_draining:
            self._end_search(f"{slot.failure()}; so did the slots of {MAX_FAILED_EXECUTORS - 1} executors before it")
        elif not slot.executor_seen and not is_known:
            self._pool.exclude_agent(slot, "an executor did not start")

    def _report_end(self, record: TrialRecord, slot: Slot, end: RunEnd, from_step: int, why_hopeless: str) -> None:
        self._observer.trial_ended(record, slot, end.outcome)
        if record.state is TrialState.STOPPED:
            return  # reported before, and it never resumes
        if end.outcome == "killed" and end.exit_code is not None:
            self._trial_stopped(record, end, from_step)
        elif end.outcome in ("failed", "bad_input", "timed_out"):
            self._report_failed(record, slot, end, why_hopeless)

    def _trial_stopped(self, record: TrialRecord, end: RunEnd, from_step: int) -> None:
        if record.checkpoint_step <= from_step and not self._pool.is_draining:
            # Its steps or saves take longer than a slice and the suspend timeout: it would never progress.
            self._too_slow.add(record.number)
            self._observer.notify(
                f"trial {record.number} did not reach a checkpoint; it runs to its end without preemption"
            )
        why = f" ({end.message})" if end.message and not self._observer.is_public else ""
        self._observer.notify(
            f"the run of trial {record.number} was stopped{why}; the trial resumes from its last checkpoint, step "
            f"{record.checkpoint_step}"
        )

    def _report_failed(self, record: TrialRecord, slot: Slot, end: RunEnd, why_hopeless: str) -> None:
        what = "ran out of GPU memory" if is_out_of_gpu_memory(end.tail) else "failed"
        where = (
            f"trial {record.number} {what} on {slot.node}{self._quoted(end)}; its output: dike logs {self._spec.name} "
            f"--trial {record.number}{self._storage_option}{f'; the end of it is also in {end.log}' if end.log else ''}"
        )
        if record.state is not TrialState.FAILED:
            self._observer.notify(f"{where}; Dike retries it")
            return
        self._observer.output(end.tail)
        self._observer.notify(f"{where}; Dike does not retry it{f': {why_hopeless}' if why_hopeless else ''}")
        self._trial_failed(record, self._quoted(end), end.message if self._observer.is_public else "")

    def _quoted(self, end: RunEnd) -> str:
        """Returns the script's message, unless the observer is public."""
        return "" if self._observer.is_public else f": {end.message}"

    def _trial_failed(self, record: TrialRecord, quoted: str, last_words: str = "") -> None:
        if self._failure_rule.aborts and not self._failure:
            self._last_words = last_words
            self._end_search(f"trial {record.number} failed{quoted}")

    # Time slices.

    def _begin_slice(self, slot: Slot, run: ActiveRun) -> None:
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
        """Records a run's first step. The policy counts its slice from here, without the start."""
        self._failed_in.pop(run.record.number, None)
        self._failed_executors.clear()
        run.since_s = self._clock()
        if run.slice is not None:
            run.slice.first_step_s = self._wall()
            self._store.save_slice(run.slice)
        self._trials.first_step_taken(run.record)

    def _end_slice(self, run: ActiveRun, outcome: str, end: RunEnd | None = None) -> None:
        """Ends the time slice of a run, with the slot's report if there is one; no-op if the run never got its slot."""
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


def _decoded(data: str) -> SlotStatus | Losses | TrialOutput | None:
    """Decodes a slot's message; None if it is malformed."""
    try:
        return decode_slot_message(data)
    except ValueError as error:
        logger.warning("message ignored: %s", error)
        return None
