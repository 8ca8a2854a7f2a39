"""A search from its first slot to its last trial: a state machine fed with events.

The policy says which trial is to hold which slot; this module makes it so, and survives what dies meanwhile: a trial's
process, its zygote, its executor, its agent, the connection to the master. A run's start is written to the database
before its slot is told, so that a search whose `dike` process was killed can go on.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Hashable
from typing import Any

from framework import events
from framework.job_plan import AllAgents
from framework.mesos_calls import MesosCalls, try_now
from framework.policies.interface import Choice, Policy
from framework.search.demand import SlotDemand
from framework.search.endings import Endings
from framework.search.fleet import Fleet
from framework.search.inheritance import SearchState, seat_runs
from framework.search.launching import SlotLaunch, trial_run
from framework.search.listener import SlotListener
from framework.search.observer import SearchObserver
from framework.search.records import SearchResult, TrialState
from framework.search.result import outcome_of
from framework.search.roster import Roster
from framework.search.slice_log import SliceLog
from framework.search.slots import ActiveRun, Slot
from framework.search.store import Store
from framework.search.time_limit import TimeLimit
from framework.service.tenant import INTERRUPTED, Need, Outcome

logger = logging.getLogger(__name__)

SAVE_S = 1.0
"""How often what trials report is written to the database."""
MAX_OPEN = 256
"""How many trials may be open at a time; policies and Optuna look at each of them again and again."""


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
        state: where the service before this one has left it; None for a search without slots.
        patient: whether it waits for other agents where none that there are can hold a slot, instead of being an error.
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
        state: SearchState | None = None,
        *,
        patient: bool = False,
    ) -> None:
        left = state or SearchState(wall_clock(), first_slot, None, False, ())
        self._spec = launch.spec
        self._policy = policy
        self._mesos = mesos
        self._observer = observer
        self._roster = roster
        self._clock = clock
        self._wall = wall_clock
        self._fleet = Fleet(launch, mesos, observer, all_agents, left.next_slot, clock, left.slots, patient=patient)
        self._slices = SliceLog(store, roster.speeds, clock, wall_clock)
        self._endings = Endings(
            self._spec, roster, self._fleet, self._slices, observer, wall_clock, give_up=self._give_up
        )
        self._listener = SlotListener(self._fleet, roster, self._endings, clock)
        self._must_decide = True
        self._wake_at_s: float | None = None
        self._saved_s = clock()
        self._began_s = left.began_s
        timed_s = left.first_slot_s if patient else left.began_s  # waiting for others does not count
        self._time_limit = TimeLimit(launch.spec.timeout_s, timed_s, clock, wall_clock)
        self._demand = SlotDemand(self._spec, roster, self._fleet, self._endings)
        self._cancelled = left.cancelled
        self._failure = ""
        self.done = False
        self._take_over(left, store)

    @property
    def slots(self) -> list[Slot]:
        """The slots that have not ended, by number."""
        return self._fleet.slots

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

    @property
    def need(self) -> Need:
        """What it wants offers for at the moment."""
        return Need.START if not self.done and self._demand.more() > 0 else Need.NOTHING

    @property
    def demand_key(self) -> Hashable:
        """Equal for searches whose slots fit the same offers, and of which none may be ended by time alone."""
        spec = self._spec
        whose = (spec.name,) if self._time_limit.runs else ()
        slot = ("slot", spec.slot_cpus, spec.slot_mem_mib, spec.slot_gpus, *whose)
        return None if self._fleet.leaves_agents_out else slot

    def vacatable(self) -> frozenset[str]:
        """Ids of the tasks that it would end at the moment if it were asked to, and of those that it is ending."""
        return self._demand.vacatable()

    def vacate(self, agent_ids: frozenset[str]) -> None:
        """Suspends its trials on these agents and ends its slots there, others needing the place."""
        self._demand.vacate(agent_ids)

    def excluded_agents(self) -> dict[str, float]:
        """Id of each agent that is left out after failures -> for how many seconds it still is."""
        return self._fleet.excluded_agents()

    def to_state(self) -> dict[str, Any]:
        """What it needs to go on after a restart of the service, beside what is in the database of searches."""
        ending = self._failure if self._fleet.is_leaving else None
        slots, since_s = tuple(self._fleet.slots), self._time_limit.since_s
        return SearchState(self._began_s, self._fleet.next_slot, ending, self._cancelled, slots, since_s).to_json()

    def outcome(self) -> Outcome:
        """How it ended."""
        return outcome_of(self.result, cancelled=self._cancelled)

    def close(self) -> None:
        """Lets go of nothing: database and lease belong to whoever made it."""

    # Events.

    def handle(self, event: events.Event) -> None:
        """Takes one event in.

        Raises:
            BadInputError: if the master refuses the framework, or the script its arguments.
            JobFailedError: if the master has thrown the framework out.
        """
        match event:
            case events.Subscribed():
                self._fleet.subscribed(event)
            case events.Disconnected():
                self._fleet.disconnected()
            case events.OffersArrived():
                self._fleet.offered(event, wanted=self._demand.more() > 0)
            case events.OfferRescinded():
                self._fleet.rescinded(event)
            case events.StatusUpdate():
                self._status_update(event)
                try_now(self._mesos.acknowledgeStatusUpdate, event.status)
            case events.MessageArrived():
                if self._listener.message(event.data):
                    self._must_decide = True
            case events.Refused():
                self._fleet.refused(event)
            case events.AgentLost() | events.ExecutorLost():
                event.log(logger)

    def tick(self) -> None:
        """Does what is due by time.

        Raises:
            BadInputError: if no agent there is can ever hold a slot.
        """
        now = self._clock()
        self._fleet.keep_in_touch(now)
        if now - self._saved_s >= SAVE_S:
            self._saved_s = now
            self._save()
        if not self._fleet.is_leaving:
            self._run(now)
        if self._fleet.is_leaving:
            self._fleet.kill_overdue(now)
            if not self._fleet.slots and not self.done:
                self._save()
                self.done = True
        self._fleet.tell(now)

    def cancel(self) -> None:
        """Suspends all trials and ends all slots; `done` follows."""
        self._cancelled = True
        self._give_up(self._failure or INTERRUPTED)

    # The course of a search.

    def _take_over(self, left: SearchState, store: Store) -> None:
        """Goes on with the slots that a service before this one has launched."""
        if left.slots:
            seat_runs(self._spec, left.slots, self._roster, store.load_slices(), self._clock(), self._wall())
        for slot in left.slots:
            slot.heard_s = self._clock()
            if slot.current is not None and slot.current.since_s is None:
                self._slices.begin(slot, slot.current)
        if left.ending is not None:
            self._give_up(left.ending)

    def _run(self, now: float) -> None:
        if self._time_limit.is_over(has_slots=bool(self._fleet.slots)):
            self._give_up(f"the search was to end after {self._spec.timeout_s:g} s (--timeout)")
            return
        if self._roster.admit(self._capacity(), now, self._wall()):
            self._must_decide = True
        if not self._roster.open:
            self._fleet.leave()
            return
        self._fleet.provide(self._demand.more(), now)
        self._fleet.end_silent(now)
        if self._must_decide or (self._wake_at_s is not None and now >= self._wake_at_s):
            self._decide(now)

    def _capacity(self) -> int:
        """How many trials may be open: all of them, unless the sampler learns from those before."""
        if self._spec.sampler != "tpe":
            return min(self._spec.trial_count, MAX_OPEN)
        slots = len(self._fleet.staying) or self._spec.max_slots or 1
        return slots * self._spec.settings.jobs_per_slot

    def _decide(self, now: float) -> None:
        self._must_decide = False
        usable = {slot.id: slot for slot in self._fleet.slots if slot.is_up}
        preemptible = {}
        for slot in self._fleet.slots:
            if slot.current is not None:
                preemptible[slot.current.record.number] = self._demand.is_preemptible(slot, slot.current)
        views = [slot.view() for slot in usable.values()]
        decision = self._policy.decide(now, self._roster.views(preemptible), views)
        self._wake_at_s = decision.wake_at_s
        for slot_id, choice in sorted(decision.runs.items()):
            slot = usable[slot_id]
            if slot.current is not None and slot.current.record.number == choice.trial:
                slot.current.record.convergence = choice.score
            else:
                self._start(slot, choice)
        for slot_id in decision.vacates:
            usable[slot_id].hold(None)
        # A trial that is on its way out of one slot will need another.
        waits = any(record.state is not TrialState.RUNNING for record in self._roster.open)
        if not waits and not self._roster.to_come and not any(slot.suspending for slot in usable.values()):
            self._fleet.end_idle()

    def _start(self, slot: Slot, choice: Choice) -> None:
        record = self._roster.records[choice.trial]
        number = self._roster.starts(record, slot.id, slot.node, choice.score, slot.kind)
        run = ActiveRun(record, trial_run(self._spec, record, number), choice)
        slot.hold(run)
        if slot.current is run:
            self._slices.begin(slot, run)
            self._observer.trial_started(record, slot, choice.reason)

    def _give_up(self, reason: str) -> None:
        self._failure = reason
        if not self._fleet.is_leaving:
            self._fleet.leave()

    def _save(self) -> None:
        self._roster.save_losses()
        for slot in self._fleet.slots:
            for run in slot.runs:
                run.known = run.record.reports
        self._observer.trials_changed(self._roster.all)

    def _status_update(self, event: events.StatusUpdate) -> None:
        slot = self._fleet.status_update(event)
        if slot is None:
            return
        self._must_decide = True
        if slot.is_gone:
            if event.status.get("data"):
                self._listener.last_words(slot, event.status["data"])
            self._endings.slot_ended(slot)
