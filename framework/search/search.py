"""A search from its first slot to its last trial: a state machine fed with events.

The policy says which trial is to hold which slot; this module makes it so, and survives what dies meanwhile: a trial's
process, its zygote, its executor, its agent, the connection to the master. A run's start is written to the database
before its slot is told, so that a search whose `dike` process was killed can go on.
"""

from __future__ import annotations

import dataclasses
import enum
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

from dike.exceptions import BadInputError
from dike.trial.spec import TrialSpec
from executor.trial_messages import Losses, RunEnd, SlotStatus, TrialRun, decode_slot_message
from framework import events
from framework.connection import Connection
from framework.driver import CallRefusedError, MasterUnavailableError
from framework.gathering import NO_OFFER_S, describe_offers
from framework.job import TaskState
from framework.job_plan import AllAgents
from framework.mesos_calls import MesosCalls, try_now
from framework.offer_desk import OfferDesk
from framework.policies.interface import Choice, Policy
from framework.search.exclusion import Exclusions
from framework.search.launching import SlotLaunch, check_ever_fits, slots_on, trial_arguments
from framework.search.observer import SearchObserver
from framework.search.records import SearchResult, SliceRecord, TrialRecord, TrialState
from framework.search.roster import Remedy, Roster
from framework.search.slots import ActiveRun, Slot
from framework.search.store import Store

logger = logging.getLogger(__name__)

SAVE_S = 1.0
"""How often what trials report is written to the database."""
SILENCE_S = 60.0
"""A slot that says nothing for so long, while the master is there, is ended."""
MAX_OPEN = 256
"""How many trials may be open at a time; policies and Optuna look at each of them again and again."""
MAX_BARREN = 3
"""Slots in a row that end by themselves before anything has trained in them: more would do no better."""
KILL_AGAIN_S = 5.0
LEAVE_MARGIN_S = 10.0
"""How much longer than a suspension the end of a slot may take before it is killed."""


class Phase(enum.Enum):
    """Where a search stands."""

    RUNNING = enum.auto()
    LEAVING = enum.auto()
    """Every slot is to give its trial back and end."""
    DONE = enum.auto()


class Search:
    """One search.

    Feed it every event with `handle` and call `tick` a few times a second, from one thread, until `done`.

    Args:
        launch: what to search, and with what slots are launched.
        policy: decides which trials run.
        mesos: where to run them.
        observer: who is told.
        roster: the trials.
        store: keeps the time slices.
        all_agents: lists every agent with all its resources, used or not, or None where that is not known.
        first_slot: number of the first slot; a search that goes on does not use numbers again.
        clock: seconds, monotonic; also the policy's.
        wall_clock: seconds since the epoch.
    """

    def __init__(
        self,
        launch: SlotLaunch,
        policy: Policy,
        mesos: MesosCalls,
        observer: SearchObserver,
        roster: Roster,
        store: Store,
        all_agents: AllAgents,
        first_slot: int = 0,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._launch = launch
        self._spec = launch.spec
        self._policy = policy
        self._mesos = mesos
        self._observer = observer
        self._roster = roster
        self._store = store
        self._all_agents = all_agents
        self._clock = clock
        self._wall = wall_clock
        self._phase = Phase.RUNNING
        self._connection = Connection(observer.note)
        self._desk = OfferDesk(mesos, clock())
        self._exclusions = Exclusions(self._spec.blacklist_s)
        self._next_slot = first_slot
        self._gpus = self._spec.slot_gpus
        self._slots: dict[str, Slot] = {}
        self._offers_wanted = True
        self._must_decide = True
        self._wake_at_s: float | None = None
        self._saved_s = clock()
        self._started_s = clock()
        self._leaving_since_s = 0.0
        self._killed_s = 0.0
        self._barren = 0
        self._too_slow: set[int] = set()
        self._failure = ""

    @property
    def done(self) -> bool:
        """Whether nothing of the search runs any more."""
        return self._phase is Phase.DONE

    @property
    def slots(self) -> list[Slot]:
        """The slots that have not ended, by number."""
        return sorted((slot for slot in self._slots.values() if not slot.is_gone), key=lambda slot: slot.id)

    @property
    def result(self) -> SearchResult:
        """How the search stands."""
        return SearchResult(
            name=self._spec.name,
            complete=not self._roster.open and self._roster.to_come == 0,
            trials=self._roster.all,
            mode=self._spec.mode,
            checkpoint_dir=self._spec.checkpoint_dir,
            failure=self._failure,
        )

    # Events.

    def handle(self, event: events.Event) -> None:
        """Takes one event in.

        Raises:
            BadInputError: if the master refuses the framework, or the script its arguments.
            JobFailedError: if the master has thrown the framework out.
        """
        match event:
            case events.Subscribed():
                self._connection.subscribed(self._clock())
                self._offers_wanted = True
                for slot in self.slots:
                    # What it said meanwhile has not reached us.
                    slot.heard_s = self._clock()
            case events.Disconnected():
                self._desk.forget()
                self._connection.disconnected()
            case events.OffersArrived():
                if self._slots_wanted() > 0:
                    self._desk.gathering.add(event.offers, self._clock())
                else:
                    self._desk.refuse(event.offers)
            case events.OfferRescinded():
                self._desk.gathering.rescind(event.offer_id)
            case events.StatusUpdate():
                self._status_update(event)
                try_now(self._mesos.acknowledgeStatusUpdate, event.status)
            case events.MessageArrived():
                self._message(event.data)
            case events.Refused():
                self._connection.refused(event)
            case events.AgentLost() | events.ExecutorLost():
                # Mesos also sends a status update for each slot that went with it.
                logger.info("%s", event)

    def tick(self) -> None:
        """Does what is due by time.

        Raises:
            BadInputError: if no agent there is can ever hold a slot.
        """
        now = self._clock()
        self._desk.give_back()
        if self._connection.must_reconcile(now):
            try_now(self._mesos.reconcile, {slot.task_id: slot.agent_id for slot in self.slots})
        if now - self._saved_s >= SAVE_S:
            self._saved_s = now
            self._roster.save_losses()
            self._observer.trials_changed(self._roster.all)
        if self._phase is Phase.RUNNING:
            self._run(now)
        if self._phase is Phase.LEAVING:
            self._continue_leaving(now)
        self._tell_slots(now)

    def cancel(self) -> None:
        """Suspends all trials and ends all slots; `done` follows."""
        self._failure = self._failure or "interrupted"
        self._leave()

    # The course of a search.

    def _run(self, now: float) -> None:
        if self._spec.timeout_s is not None and now - self._started_s >= self._spec.timeout_s:
            self._failure = f"the search was to end after {self._spec.timeout_s:g} s (--timeout)"
            self._leave()
            return
        if self._roster.admit(self._capacity(), now, self._wall()):
            self._must_decide = True
        if not self._roster.open:
            self._leave()
            return
        self._ask_for_slots(now)
        self._end_silent_slots(now)
        if self._must_decide or (self._wake_at_s is not None and now >= self._wake_at_s):
            self._decide(now)

    def _capacity(self) -> int:
        """How many trials may be open: all of them, unless the sampler learns from those before."""
        if self._spec.sampler != "tpe":
            return min(self._spec.trial_count, MAX_OPEN)
        slots = len([slot for slot in self.slots if not slot.leaving]) or self._spec.max_slots or 1
        return slots * self._spec.settings.jobs_per_slot

    def _decide(self, now: float) -> None:
        self._must_decide = False
        usable = {slot.id: slot for slot in self.slots if slot.is_up}
        preemptible = {
            slot.current.record.number: slot.preemptible and slot.current.record.number not in self._too_slow
            for slot in self.slots
            if slot.current is not None
        }
        views = [slot.view() for slot in usable.values()]
        decision = self._policy.decide(now, self._roster.views(preemptible), views)
        self._wake_at_s = decision.wake_at_s
        for slot_id, choice in sorted(decision.runs.items()):
            slot = usable[slot_id]
            if slot.current is not None and slot.current.record.number == choice.trial:
                slot.current.record.convergence = choice.score
            else:
                self._start(slot, choice, now)
        self._end_idle_slots()

    def _start(self, slot: Slot, choice: Choice, now: float) -> None:
        record = self._roster.records[choice.trial]
        number = self._roster.starts(record, slot.id, slot.node, choice.score)
        trial = TrialSpec(
            search=self._spec.name,
            number=record.number,
            run=number,
            parameters=record.parameters,
            folder=f"{self._spec.checkpoint_dir.rstrip('/')}/trial-{record.number}",
            resume_from=record.checkpoint,
            checkpoint_interval_s=self._spec.checkpoint_interval_s,
            metric=self._spec.metric,
            call=self._spec.call,
            earlier_results=self._spec.earlier_results,
        )
        run = ActiveRun(record, TrialRun(trial, trial_arguments(self._spec, record)), choice)
        slot.hold(run)
        if slot.current is run:
            self._begin_slice(slot, run, now)

    def _begin_slice(self, slot: Slot, run: ActiveRun, now: float) -> None:
        run.since_s = now
        run.slice = SliceRecord(
            trial=run.record.number,
            run=run.order.trial.run,
            slot=slot.id,
            agent=slot.node,
            start_s=self._wall(),
            reason=run.choice.reason,
            convergence=run.choice.score,
            from_step=run.record.checkpoint_step,
        )
        self._store.add_slice(run.slice)
        self._observer.trial_started(run.record, slot, run.choice.reason)

    # Slots.

    def _slots_wanted(self) -> int:
        """How many more slots there is use for."""
        if self._phase is not Phase.RUNNING:
            return 0
        useful = len(self._roster.open) + self._roster.to_come
        if self._spec.max_slots is not None:
            useful = min(useful, self._spec.max_slots)
        return useful - len([slot for slot in self.slots if not slot.leaving])

    def _ask_for_slots(self, now: float) -> None:
        wanted = self._slots_wanted()
        if (wanted > 0) != self._offers_wanted and self._connection.connected:
            call = self._mesos.reviveOffers if wanted > 0 else self._mesos.suppressOffers
            if try_now(call):
                self._offers_wanted = wanted > 0
        if wanted <= 0:
            self._desk.decline_rest()
        elif self._desk.gathering.settled(now):
            self._launch_slots(wanted, now)
        elif self._desk.gathering.is_overdue(now) and not self.slots and self._connection.connected:
            try_now(self._mesos.reviveOffers)
            self._check_agents()
            self._observer.waiting(
                f"No offer has come for {NO_OFFER_S:g} s: other frameworks hold what the agents have, or none of it is "
                "for this role (--role)."
            )

    def _gpus_of_a_slot(self) -> int:
        if self._gpus is None:
            nodes = self._all_agents()
            offered = any(agent.pool.scalar("gpus") >= 1 for agent in self._desk.gathering.agents)
            self._gpus = 1 if offered or any(node.gpus for node in nodes or ()) else 0
        return self._gpus

    def _check_agents(self) -> None:
        nodes = self._all_agents()
        if nodes == []:
            self._observer.waiting("No agent is registered with the Mesos master.")
        if not self._slots:
            # Later the agents that held slots may only be away for a while.
            check_ever_fits(self._spec, self._gpus_of_a_slot(), nodes)

    def _launch_slots(self, wanted: int, now: float) -> None:
        agents = self._desk.gathering.agents
        launched: list[Slot] = []
        for agent in agents:
            if self._exclusions.excludes(agent.agent_id, now) or len(launched) >= wanted:
                continue
            used = {
                device
                for slot in [*self.slots, *launched]
                if slot.address == agent.address
                for device in slot.gpu_devices
            }
            slots, operation = slots_on(
                self._launch, agent, self._gpus_of_a_slot(), self._next_slot, wanted - len(launched), used
            )
            if slots and self._accept(agent, slots, operation, now):
                launched += slots
        excluded = [agent.node for agent in agents if self._exclusions.excludes(agent.agent_id, now)]
        if excluded and not launched and not self.slots:
            self._observer.waiting(
                f"Offers come only from {', '.join(excluded)}, left out after failures (--blacklist-for)."
            )
        elif not launched and not self.slots:
            self._check_agents()
            self._observer.waiting(
                f"No offer holds a slot of {self._spec.slot_cpus:g} cpus, {self._spec.slot_mem_mib:g} MiB and "
                f"{self._gpus_of_a_slot()} gpus. On offer: {describe_offers(agents)}."
            )
        self._desk.decline_rest()

    def _accept(self, agent: Any, slots: Sequence[Slot], operation: dict[str, Any], now: float) -> bool:
        try:
            self._desk.accept(agent, operation)
        except (MasterUnavailableError, CallRefusedError) as error:
            # Had the master taken it after all, its tasks are not ours and are ended when they report.
            logger.warning("launch of slots not delivered: %s", error)
            return False
        self._next_slot += len(slots)
        for slot in slots:
            slot.heard_s = now
            self._slots[slot.task_id] = slot
            self._observer.slot_changed(slot)
        return True

    def _end_idle_slots(self) -> None:
        """A slot that nobody will need ends at once, so that Mesos has its GPU back (paper 'Hops')."""
        if any(record.state is not TrialState.RUNNING for record in self._roster.open) or self._roster.to_come:
            return
        for slot in self.slots:
            if slot.is_up and slot.current is None:
                slot.leave()

    def _end_silent_slots(self, now: float) -> None:
        for slot in self.slots:
            is_silent = slot.state is TaskState.RUNNING and now - slot.heard_s >= SILENCE_S
            if is_silent and self._connection.connected:
                slot.heard_s = now
                self._observer.note(f"slot {slot.id} on {slot.node} has said nothing for {SILENCE_S:g} s: ending it")
                try_now(self._mesos.kill, slot.task_id, slot.agent_id)

    def _tell_slots(self, now: float) -> None:
        for slot in self.slots:
            wanted = slot.to_tell(now)
            if wanted is not None:
                try_now(
                    self._mesos.sendFrameworkMessage,
                    {"value": slot.task_id},
                    {"value": slot.agent_id},
                    wanted.encode(),
                )

    def _status_update(self, event: events.StatusUpdate) -> None:
        state = TaskState.of(event.state)
        slot = self._slots.get(event.task_id)
        if slot is None:
            agent_id = event.status.get("agent_id", {}).get("value", "")
            if not state.is_terminal() and agent_id:
                logger.warning("task %s is not ours any more: ending it", event.task_id)
                try_now(self._mesos.kill, event.task_id, agent_id)
            return
        if slot.is_gone:
            return
        changed = slot.state is not state
        slot.state = state
        slot.executor_seen = slot.executor_seen or event.status.get("source") == "SOURCE_EXECUTOR"
        slot.message = event.status.get("message", "")
        slot.reason = event.status.get("reason", "")
        slot.heard_s = self._clock()
        if changed:
            self._must_decide = True
            self._observer.slot_changed(slot)
        if slot.is_gone:
            # Its last words: how the runs ended that we may not have heard of.
            message = _decoded(event.status["data"]) if event.status.get("data") else None
            if isinstance(message, SlotStatus):
                self._slot_status(slot, message)
            self._slot_ended(slot)

    def _slot_ended(self, slot: Slot) -> None:
        expected = slot.leaving and slot.state is TaskState.FINISHED
        if not expected:
            self._observer.note(slot.failure())
        for run in (slot.current, slot.next):
            if run is not None:
                self._close_slice(run, "lost", None)
                self._roster.lost(run.record, slot.failure(), self._wall())
        slot.current = slot.next = None
        if slot.state is TaskState.FAILED and not slot.has_trained:
            self._barren += 1
            if self._barren >= MAX_BARREN and not self.slots and self._phase is Phase.RUNNING:
                self._failure = f"{slot.failure()}, as {MAX_BARREN - 1} slots before it"
                self._leave()
            elif not slot.executor_seen:
                self._exclude_agent(slot, "an executor could not be started there")

    # What slots say.

    def _message(self, data: str) -> None:
        message = _decoded(data)
        slot = None if message is None else self._slots.get(message.task_id)
        if message is None or slot is None or slot.is_gone:
            return
        slot.heard_s = self._clock()
        if isinstance(message, Losses):
            record = self._roster.records.get(message.trial)
            if record is not None and not record.state.has_ended():
                self._roster.reported(record, message.run, message.reports)
            return
        self._slot_status(slot, message)

    def _slot_status(self, slot: Slot, status: SlotStatus) -> None:
        before = slot.view()
        slot.status = status
        run = slot.current
        if run is not None and status.run == run.key:
            self._roster.checkpointed(run.record, status.checkpoint, status.checkpoint_step)
            if status.training and not run.training:
                run.training = slot.has_trained = True
                self._barren = 0
                # A slice counts from its first step: what it takes to get there is not the trial's.
                run.since_s = self._clock()
                if run.slice is not None:
                    run.slice.first_step_s = self._wall()
        for end in status.ends:
            self._run_ended(slot, end)
        unknown = slot.unknown_run()
        if unknown is not None:
            logger.info("slot %d has never heard of run %s", slot.id, unknown.key)
            trial = unknown.order.trial
            step = unknown.record.checkpoint_step
            self._run_ended(slot, RunEnd(trial.number, trial.run, "stopped", checkpoint=trial.resume_from, step=step))
        if slot.view() != before:
            self._must_decide = True

    def _run_ended(self, slot: Slot, end: RunEnd) -> None:
        run = slot.run_ended(end)
        if run is None:
            return
        self._must_decide = True
        self._close_slice(run, end.outcome, end)
        if end.outcome == "bad_input" and not self._roster.has_readings:
            if end.message not in end.tail:
                self._observer.output(end.tail)
            raise BadInputError(end.message)
        remedy = self._roster.ended(run.record, end, self._wall())
        self._tell_of(run.record, slot, end, run.slice.from_step if run.slice is not None else 0)
        if slot.current is not None and slot.current.since_s is None:
            self._begin_slice(slot, slot.current, self._clock())
        if remedy is not Remedy.NONE and not slot.leaving:
            slot.leave()
        if remedy is Remedy.AVOID_AGENT:
            self._exclude_agent(slot, f"trial {run.record.number} has failed again")

    def _tell_of(self, record: TrialRecord, slot: Slot, end: RunEnd, from_step: int) -> None:
        self._observer.trial_ended(record, slot, end.outcome)
        if end.outcome == "stopped" and end.exit_code is not None:
            if record.checkpoint_step <= from_step and self._phase is Phase.RUNNING:
                # Its steps, or its saves, take longer than a slice and the time to suspend: it would never get on.
                self._too_slow.add(record.number)
                self._observer.note(f"trial {record.number} did not get to a checkpoint; it will run to its end")
            why = f" ({end.message})" if end.message else ""
            self._observer.note(
                f"trial {record.number} was stopped{why}; it goes on from its last checkpoint, step "
                f"{record.checkpoint_step}"
            )
        elif end.outcome in ("failed", "bad_input"):
            where = f"trial {record.number} failed on {slot.node}: {end.message}; its output is in {end.sandbox}"
            if record.state is TrialState.FAILED:
                self._observer.output(end.tail)
                self._observer.note(f"{where}; it is given up")
                if self._spec.on_failure == "abort":
                    self._failure = f"trial {record.number} failed: {end.message}"
                    self._leave()
            else:
                self._observer.note(f"{where}; it will be tried again")

    def _close_slice(self, run: ActiveRun, outcome: str, end: RunEnd | None) -> None:
        if run.slice is None:
            return
        ended = run.slice
        ended.end_s = self._wall()
        ended.outcome = outcome
        ended.to_step = max(run.record.step, ended.from_step)
        if end is not None:
            ended.suspend_s = end.suspend_s
            for name, value in dataclasses.asdict(end.usage).items():
                setattr(ended, name, value)
        run.record.slot_s += ended.end_s - ended.start_s
        self._store.close_slice(ended)

    def _exclude_agent(self, slot: Slot, reason: str) -> None:
        now = self._clock()
        nodes = self._all_agents()
        left_out = self._exclusions.count(now) + (not self._exclusions.excludes(slot.agent_id, now))
        if nodes is not None and len(nodes) <= left_out:
            self._observer.note(f"{reason} on {slot.node}; there is no other agent to go to")
            return
        self._exclusions.exclude(slot.agent_id, now)
        self._observer.note(f"{reason}: agent {slot.node} is left out for {self._spec.blacklist_s:g} s")
        for other in self.slots:
            # A trial that cannot be suspended would lose what it has done.
            if other.agent_id == slot.agent_id and (other.current is None or other.preemptible):
                other.leave()

    # The end.

    def _leave(self) -> None:
        if self._phase is Phase.RUNNING:
            self._phase = Phase.LEAVING
            self._leaving_since_s = self._killed_s = self._clock()
            self._desk.decline_rest()
            for slot in self.slots:
                slot.leave()

    def _continue_leaving(self, now: float) -> None:
        if not self.slots:
            self._roster.save_losses()
            self._observer.trials_changed(self._roster.all)
            self._phase = Phase.DONE
            return
        patience = self._spec.suspend_timeout_s + LEAVE_MARGIN_S
        for slot in self.slots:
            # A slot that has never come up cannot be told to end.
            overdue = now - self._leaving_since_s >= patience or slot.state is not TaskState.RUNNING
            if overdue and now - self._killed_s >= KILL_AGAIN_S:
                try_now(self._mesos.kill, slot.task_id, slot.agent_id)
        if now - self._killed_s >= KILL_AGAIN_S:
            self._killed_s = now


def _decoded(data: str) -> SlotStatus | Losses | None:
    """What a slot sent; None if it cannot be read."""
    try:
        return decode_slot_message(data)
    except ValueError as error:
        logger.warning("message ignored: %s", error)
        return None
