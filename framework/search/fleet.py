"""The slots of a search: what Mesos says of them, what they are told, how they come to leave."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

from framework import events
from framework.connection import Connection
from framework.job import TaskState
from framework.job_plan import AllAgents
from framework.mesos_calls import MesosCalls, try_now
from framework.search.launching import SlotLaunch
from framework.search.observer import SearchObserver
from framework.search.slot_source import SlotSource
from framework.search.slots import Slot

logger = logging.getLogger(__name__)

SILENCE_S = 60.0
"""A slot that says nothing for so long, while the master is there, is ended."""
UNSEEN_S = 30.0
"""The master is asked what has become of a slot that has not come up for so long."""
KILL_AGAIN_S = 5.0
LEAVE_MARGIN_S = 10.0
"""How much longer than a suspension the end of a slot may take before it is killed."""


class Fleet:
    """All slots of one search.

    Args:
        launch: what slots are launched with.
        mesos: where they run.
        observer: who is told.
        all_agents: lists every agent with all its resources, used or not, or None where that is not known.
        first_slot: number of the first slot.
        clock: seconds, monotonic.
        slots: those that a service before this one has launched.
        patient: see `SlotSource`.

    Attributes:
        is_leaving: whether every slot is to give its trial back and end.
    """

    def __init__(
        self,
        launch: SlotLaunch,
        mesos: MesosCalls,
        observer: SearchObserver,
        all_agents: AllAgents,
        first_slot: int,
        clock: Callable[[], float],
        slots: Iterable[Slot] = (),
        *,
        patient: bool = False,
    ) -> None:
        self._mesos = mesos
        self._observer = observer
        self._clock = clock
        self._slots = {slot.task_id: slot for slot in slots}
        self._connection = Connection(observer.note, has_tasks=bool(self._slots))
        self._source = SlotSource(
            launch, mesos, self._connection, observer, all_agents, first_slot, clock, patient=patient
        )
        self._patience_s = launch.spec.suspend_timeout_s + LEAVE_MARGIN_S
        self._leaving_since_s = 0.0
        self._killed_s = 0.0
        self.is_leaving = False

    @property
    def slots(self) -> list[Slot]:
        """The slots that have not ended, by number."""
        return sorted((slot for slot in self._slots.values() if not slot.is_gone), key=lambda slot: slot.id)

    @property
    def staying(self) -> list[Slot]:
        """Those that have not been told to end."""
        return [slot for slot in self.slots if not slot.leaving]

    @property
    def next_slot(self) -> int:
        """Number of the next slot."""
        return self._source.next_slot

    @property
    def leaves_agents_out(self) -> bool:
        """Whether offers of some agent are not taken at the moment."""
        return self._source.leaves_agents_out

    def excluded_agents(self) -> dict[str, float]:
        """Id of each agent that is left out -> for how many seconds it still is."""
        return self._source.excluded_agents()

    def find(self, task_id: str) -> Slot | None:
        """The slot of a task, if it has not ended."""
        slot = self._slots.get(task_id)
        return None if slot is None or slot.is_gone else slot

    # Events.

    def subscribed(self, event: events.Subscribed) -> None:
        """The master has taken the framework in, again maybe."""
        self._connection.subscribed(self._clock(), event.master_age_s)
        self._source.subscribed()
        for slot in self.slots:
            # What it said meanwhile has not reached us.
            slot.heard_s = self._clock()

    def disconnected(self) -> None:
        """The connection to the master is gone."""
        self._source.forget()
        self._connection.disconnected()

    def refused(self, event: events.Refused) -> None:
        """The master has refused the framework.

        Raises:
            BadInputError: always.
            JobFailedError: if it was in before.
        """
        self._connection.refused(event)

    def offered(self, event: events.OffersArrived, *, wanted: bool) -> None:
        """Offers have come."""
        self._source.offered(event.offers, wanted=wanted)

    def rescinded(self, event: events.OfferRescinded) -> None:
        """An offer is void."""
        self._source.rescinded(event.offer_id)

    def status_update(self, event: events.StatusUpdate) -> Slot | None:
        """Takes the state of a task in.

        Returns:
            The slot, if its state has changed.
        """
        state = TaskState.of(event.state)
        if event.task_id not in self._slots:
            agent_id = event.status.get("agent_id", {}).get("value", "")
            if not state.is_terminal() and agent_id:
                logger.warning("task %s is not ours any more: ending it", event.task_id)
                try_now(self._mesos.kill, event.task_id, agent_id)
            return None
        slot = self.find(event.task_id)
        if slot is None:
            return None
        changed = slot.state is not state
        if state.is_terminal():
            del self._slots[slot.task_id]
        slot.state = state
        slot.executor_seen = slot.executor_seen or event.status.get("source") == "SOURCE_EXECUTOR"
        slot.message = event.status.get("message", "")
        slot.reason = event.status.get("reason", "")
        slot.heard_s = self._clock()
        if not changed:
            return None
        self._observer.slot_changed(slot)
        return slot

    # What is done by time.

    def keep_in_touch(self, now_s: float) -> None:
        """Declines what has to be declined again, and asks the master for the tasks' states where that is due."""
        self._source.give_back()
        asked = self.slots if self._connection.must_reconcile(now_s) else self._unseen(now_s)
        if asked:
            try_now(self._mesos.reconcile, {slot.task_id: slot.agent_id for slot in asked})

    def provide(self, wanted: int, now_s: float) -> None:
        """Launches slots.

        Args:
            wanted: how many more there is use for.
            now_s: the time on the search's clock.

        Raises:
            InfeasibleError: if no agent there is can ever hold one, and the search is not patient.
        """
        for slot in self._source.launch(wanted, self._slots, now_s):
            slot.heard_s = now_s
            self._observer.slot_changed(slot)

    def end_silent(self, now_s: float) -> None:
        """Ends slots that nothing has been heard of for long."""
        for slot in self.slots:
            is_silent = slot.state is TaskState.RUNNING and now_s - slot.heard_s >= SILENCE_S
            if is_silent and self._connection.connected:
                slot.heard_s = now_s
                self._observer.note(f"slot {slot.id} on {slot.node} has said nothing for {SILENCE_S:g} s: ending it")
                try_now(self._mesos.kill, slot.task_id, slot.agent_id)

    def end_idle(self) -> None:
        """Ends slots that hold nothing, so that Mesos has their GPUs back (paper 'Hops')."""
        for slot in self.slots:
            if slot.is_up and slot.current is None:
                slot.leave()

    def tell(self, now_s: float) -> None:
        """Tells each slot what it is to hold, where it does not know."""
        for slot in self.slots:
            wanted = slot.to_tell(now_s)
            if wanted is not None:
                try_now(
                    self._mesos.sendFrameworkMessage,
                    {"value": slot.task_id},
                    {"value": slot.agent_id},
                    wanted.encode(),
                )

    def _unseen(self, now_s: float) -> list[Slot]:
        """Slots that were launched and have not been heard of; each is named once in a while."""
        unseen = [slot for slot in self.slots if slot.state is TaskState.STAGING and now_s - slot.heard_s >= UNSEEN_S]
        for slot in unseen:
            slot.heard_s = now_s
        return unseen if self._connection.connected else []

    # Leaving.

    def shed(self, slots: Iterable[Slot]) -> None:
        """Makes slots end, as soon as their runs are suspended."""
        for slot in slots:
            self._observer.note(f"slot {slot.id} on {slot.node} makes place for another job")
            slot.leave()

    def leave_out(self, slot: Slot, reason: str) -> None:
        """Leaves a slot's agent for a while, if there is another; a trial that cannot be suspended stays there."""
        if not self._source.leave_out(slot, reason):
            return
        for other in self.slots:
            if other.agent_id == slot.agent_id and (other.current is None or other.preemptible):
                other.leave()

    def leave(self) -> None:
        """Wants all slots to end, as soon as their runs are suspended."""
        self.is_leaving = True
        self._leaving_since_s = self._killed_s = self._clock()
        self._source.decline_rest()
        for slot in self.slots:
            slot.leave()

    def kill_overdue(self, now_s: float) -> None:
        """Kills the slots that were to end and have not, again and again."""
        if now_s - self._killed_s < KILL_AGAIN_S:
            return
        self._killed_s = now_s
        for slot in self.slots:
            # A slot that has never come up cannot be told to end.
            if now_s - self._leaving_since_s >= self._patience_s or slot.state is not TaskState.RUNNING:
                try_now(self._mesos.kill, slot.task_id, slot.agent_id)
