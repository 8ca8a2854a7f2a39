"""From Mesos' offers to the slots of a search: asking for offers, launching on them, leaving agents out."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from typing import Any

from dike.exceptions import InfeasibleError
from framework.connection import Connection
from framework.driver import CallRefusedError, MasterUnavailableError, OffersGoneError
from framework.exclusion import Exclusions
from framework.gathering import NO_OFFER_S, describe_offers
from framework.job_plan import AllAgents
from framework.mesos_calls import MesosCalls, try_now
from framework.offer_desk import OfferDesk
from framework.offers import AgentOffer
from framework.search.kinds import GPU_MODEL, is_unknown_model
from framework.search.launching import SlotLaunch, check_ever_fits, slots_on
from framework.search.observer import SearchObserver
from framework.search.slots import Slot
from solver import NodeClass

logger = logging.getLogger(__name__)


class SlotSource:
    """Launches slots as they are wanted.

    Args:
        launch: what slots are launched with.
        mesos: where offers come from.
        connection: to the master.
        observer: who is told.
        all_agents: lists every agent with all its resources, used or not, or None where that is not known.
        first_slot: number of the first slot.
        clock: seconds, monotonic.
        patient: whether slots that no agent there is can ever hold are waited for, instead of being an error.
    """

    def __init__(
        self,
        launch: SlotLaunch,
        mesos: MesosCalls,
        connection: Connection,
        observer: SearchObserver,
        all_agents: AllAgents,
        first_slot: int,
        clock: Callable[[], float],
        *,
        patient: bool = False,
    ) -> None:
        self._launch = launch
        self._spec = launch.spec
        self._mesos = mesos
        self._connection = connection
        self._observer = observer
        self._all_agents = all_agents
        self._first_slot = self._next_slot = first_slot
        self._clock = clock
        self._patient = patient
        self._desk = OfferDesk(mesos, clock())
        self._exclusions = Exclusions(self._spec.blacklist_s)
        self._gpus = self._spec.slot_gpus
        self._offers_wanted = True
        self._unknown_models: set[str] = set()

    @property
    def next_slot(self) -> int:
        """Number of the next slot."""
        return self._next_slot

    @property
    def leaves_agents_out(self) -> bool:
        """Whether offers of some agent are not taken at the moment."""
        return self._exclusions.count(self._clock()) > 0

    def excluded_agents(self) -> dict[str, float]:
        """Id of each agent that is left out -> for how many seconds it still is."""
        return self._exclusions.left_s(self._clock())

    def subscribed(self) -> None:
        """The master makes offers from now on."""
        self._offers_wanted = True

    def forget(self) -> None:
        """The connection is gone, and all offers with it."""
        self._desk.forget()

    def offered(self, offers: Sequence[dict[str, Any]], *, wanted: bool) -> None:
        """Offers in Mesos' JSON form have come; they are declined at once if no slot is wanted."""
        if wanted:
            self._desk.gathering.add(offers, self._clock())
        else:
            self._desk.refuse(offers)

    def rescinded(self, offer_id: str) -> None:
        """An offer is void."""
        self._desk.gathering.rescind(offer_id)

    def give_back(self) -> None:
        """Declines again what the master has not taken back yet."""
        self._desk.give_back()

    def decline_rest(self) -> None:
        """Declines all offers in hand."""
        self._desk.decline_rest()

    def launch(self, wanted: int, slots: dict[str, Slot], now_s: float) -> list[Slot]:
        """Asks for offers, or for none, and launches what is wanted once they have settled.

        Args:
            wanted: how many more slots there is use for.
            slots: those that are there, by the ids of their tasks; new ones are put in before the master is asked for
                them, so that whoever writes down what there is has them by then.
            now_s: the time on the search's clock.

        Returns:
            The slots that have been launched.

        Raises:
            InfeasibleError: if no agent there is can ever hold a slot, and the search is not patient.
        """
        if (wanted > 0) != self._offers_wanted and self._connection.connected:
            call = self._mesos.reviveOffers if wanted > 0 else self._mesos.suppressOffers
            if try_now(call):
                self._offers_wanted = wanted > 0
        launched: list[Slot] = []
        if wanted <= 0:
            self._desk.decline_rest()
        elif self._desk.gathering.settled(now_s):
            launched = self._launch_on_offers(wanted, slots, now_s)
            if not launched and not slots:
                self._say_why(now_s)
            self._desk.decline_rest()
        elif self._desk.gathering.is_overdue(now_s) and not slots and self._connection.connected:
            try_now(self._mesos.reviveOffers)
            self._observer.waiting(
                self._why_never()
                or f"No offer has come for {NO_OFFER_S:g} s: other frameworks hold what the agents have, or none of it "
                "is for this role (--role)."
            )
        return launched

    def leave_out(self, slot: Slot, reason: str) -> bool:
        """Takes no offers of a slot's agent for a while, unless there is no other agent; whether it is so."""
        now_s = self._clock()
        nodes, _ = self._agents()
        left_out = self._exclusions.count(now_s) + (not self._exclusions.excludes(slot.agent_id, now_s))
        if nodes is not None and len(nodes) <= left_out:
            self._observer.note(f"{reason} on {slot.node}; there is no other agent to go to")
            return False
        self._exclusions.exclude(slot.agent_id, now_s)
        self._observer.note(f"{reason}: agent {slot.node} is left out for {self._spec.blacklist_s:g} s")
        return True

    def _launch_on_offers(self, wanted: int, slots: dict[str, Slot], now_s: float) -> list[Slot]:
        launched: list[Slot] = []
        for agent in self._desk.gathering.agents:
            if self._exclusions.excludes(agent.agent_id, now_s) or len(launched) >= wanted:
                continue
            used = {device for slot in slots.values() if slot.address == agent.address for device in slot.gpu_devices}
            new, operation = slots_on(
                self._launch, agent, self._gpus_of_a_slot(), self._next_slot, wanted - len(launched), used
            )
            if new and self._accept(agent, operation, new, slots):
                self._name_unknown_model(agent)
                launched += new
        return launched

    def _accept(
        self, agent: AgentOffer, operation: dict[str, Any], new: Collection[Slot], slots: dict[str, Slot]
    ) -> bool:
        slots.update({slot.task_id: slot for slot in new})
        self._next_slot += len(new)
        try:
            self._desk.accept(agent, operation)
        except OffersGoneError as error:
            logger.info("%s", error)
            for slot in new:
                del slots[slot.task_id]
            return False
        except (MasterUnavailableError, CallRefusedError) as error:
            # The master may have heard of them all the same; it is asked later (`Fleet.keep_in_touch`).
            logger.warning("launch of slots not delivered, or refused: %s", error)
        return True

    def _name_unknown_model(self, agent: AgentOffer) -> None:
        model = agent.attributes.get(GPU_MODEL, "")
        if not self._gpus_of_a_slot() or model in self._unknown_models or not is_unknown_model(agent.attributes):
            return
        self._unknown_models.add(model)
        self._observer.note(
            f"agent {agent.node} has GPUs '{model}', whose speed Dike does not know; they count as average for trials "
            "that have not been there"
        )

    def _gpus_of_a_slot(self) -> int:
        if self._gpus is None:
            nodes, _ = self._agents()
            offered = any(agent.pool.scalar("gpus") >= 1 for agent in self._desk.gathering.agents)
            self._gpus = 1 if offered or any(node.gpus for node in nodes or ()) else 0
        return self._gpus

    def _say_why(self, now_s: float) -> None:
        """Nothing could be launched, and there is no slot at all."""
        agents = self._desk.gathering.agents
        excluded = [agent.node for agent in agents if self._exclusions.excludes(agent.agent_id, now_s)]
        if excluded:
            self._observer.waiting(
                f"Offers come only from {', '.join(excluded)}, left out after failures (--blacklist-for)."
            )
            return
        self._observer.waiting(
            self._why_never()
            or f"No offer holds a slot of {self._spec.slot_cpus:g} cpus, {self._spec.slot_mem_mib:g} MiB and "
            f"{self._gpus_of_a_slot()} gpus. On offer: {describe_offers(agents)}."
        )

    @property
    def _has_run(self) -> bool:
        """The agents that held slots may only be away for a while."""
        return self._next_slot > self._first_slot

    def _agents(self) -> tuple[list[NodeClass] | None, str]:
        """Those that slots may use, and why there are none if the constraints are to blame."""
        try:
            return self._all_agents(), ""
        except InfeasibleError as error:
            if not self._patient and not self._has_run:
                raise
            return None, str(error)

    def _why_never(self) -> str:
        """Why no agent there is can ever hold a slot; empty if one can, or that is not known.

        Raises:
            InfeasibleError: if none can, and the search is not patient.
        """
        nodes, unmet = self._agents()
        if nodes == []:
            return "No agent is registered with the Mesos master."
        if unmet or self._has_run:
            return unmet
        try:
            check_ever_fits(self._spec, self._gpus_of_a_slot(), nodes)
        except InfeasibleError as error:
            if not self._patient:
                raise
            return str(error)
        return ""
