"""The slots of a search: launched on Mesos' offers, watched, told what to hold, drained.

A slot is a Mesos task that holds one trial at a time (`framework.search.slots`). Slots without GPUs on one agent share
an executor, so that a trial that is suspended in one of them can go on at once in any other.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dike.exceptions import InfeasibleError
from executor.slot_order import SlotOrder
from executor.trial_messages import FULL_SHARE, RunKey
from framework.mesos import events
from framework.mesos.connection import Connection
from framework.mesos.containers import Container
from framework.mesos.offers import MIB, NO_OFFER, NO_OFFER_TIMEOUT_S, AgentOffer, describe_free, describe_offers
from framework.mesos.resources import ResourcePool
from framework.mesos.tasks import TaskState, executor_info, executor_of, take_devices, take_resources
from framework.scheduler.agents import AllAgents
from framework.scheduler.amounts import describe
from framework.scheduler.exclusions import Exclusions
from framework.scheduler.feasibility import FitResult, Nodes, capacity
from framework.scheduler.job import RETRY_OFFERS_S, Decline, Launch, Message
from framework.scheduler.records import TaskNeed
from framework.search.observer import SearchObserver
from framework.search.records import SearchSpec
from framework.search.slots import Slot
from solver import NodeClass
from solver.hardware import known_hardware
from solver.units import format_bytes

logger = logging.getLogger(__name__)

SILENCE_S = 60.0
"""A slot that says nothing for so long, while the master is there, is ended."""
DRAIN_MARGIN_S = 10.0
"""How much longer than a suspension the end of a slot may take before it is killed."""
GPU_MODEL = "gpu_model"
"""The agent's attribute that says what its GPUs are."""
SLOT_KIND = "slot_kind"
"""The attribute that tells agents apart whose slots are shares of CPUs, or whose GPUs have no model."""


GROWING = {"TF_FORCE_GPU_ALLOW_GROWTH": "true", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
"""For processes whose GPU memory goes to the host and back: TensorFlow and JAX take what they need, not all of it."""


@dataclass(frozen=True)
class SlotLaunch:
    """What every slot of a search is launched with.

    Attributes:
        spec: the search.
        bundle_url: where executors fetch the script's folder.
        script: path of the script inside the bundle.
        preload: modules for the zygotes.
        python: interpreter that runs the executor on the agents.
        container: what slots run in; None for the agent's own file system.
        hand_out_gpus: whether we count GPU devices out, for agents that neither isolate nor announce them.
    """

    spec: SearchSpec
    bundle_url: str
    script: str
    preload: tuple[str, ...]
    python: str
    container: Container | None = None
    hand_out_gpus: bool = False


class SlotPool:
    """All slots of one search.

    Args:
        launch: what slots are launched with.
        outbox: gets what slots are to be told.
        observer: who is told.
        all_agents: lists every agent with all its resources, used or not, or None where that is not known.
        first_slot: number of the first slot.
        clock: seconds, monotonic.
        may_end: whether ending a slot loses nothing of the runs that it is to hold.
        slots: those that a service before this one has launched.
        patient: whether slots that no agent there is can ever hold are waited for, instead of being an error.

    Attributes:
        is_draining: whether every slot is to give its trial back and end.
        next_slot: number of the next slot.
    """

    def __init__(
        self,
        launch: SlotLaunch,
        outbox: list[Message],
        observer: SearchObserver,
        all_agents: AllAgents,
        first_slot: int,
        clock: Callable[[], float],
        may_end: Callable[[Slot], bool],
        slots: Iterable[Slot] = (),
        *,
        patient: bool = False,
    ) -> None:
        self._launch = launch
        self._spec = launch.spec
        self._outbox = outbox
        self._observer = observer
        self._all_agents = all_agents
        self._clock = clock
        self._may_end = may_end
        self._patient = patient
        self._slots = {slot.task_id: slot for slot in slots}
        for slot in self._slots.values():
            mates = (mate for mate in self._slots.values() if mate is not slot and mate.executor_id == slot.executor_id)
            slot.mates_seen = any(mate.executor_seen for mate in mates)
        self._new: list[Slot] = []
        self._executors: dict[str, Mapping[str, Any]] = {}
        """Id -> Mesos' ExecutorInfo, as long as slots are in it; whatever else is launched into it carries the same."""
        self._blamed: dict[str, str] = {}
        """Executor that has ended -> the task of the slot whose run took most memory."""
        self._connection = Connection(observer.notify)
        self._exclusions = Exclusions(self._spec.agent_cooldown_s)
        self._slot_gpus = self._spec.slot_gpus
        self._unknown_models: set[str] = set()
        self._first_slot = first_slot
        self._reported_s = clock()
        self._draining_since_s = 0.0
        self.next_slot = first_slot
        self.is_draining = False

    @property
    def slots(self) -> list[Slot]:
        """The slots that have not ended, by number."""
        return sorted((slot for slot in self._slots.values() if not slot.is_gone), key=lambda slot: slot.id)

    @property
    def active(self) -> list[Slot]:
        """Those that have not been told to end."""
        return [slot for slot in self.slots if not slot.leaving]

    def find(self, task_id: str) -> Slot | None:
        """The slot of a task, if it has not ended."""
        slot = self._slots.get(task_id)
        return None if slot is None or slot.is_gone else slot

    def wanted_tasks(self) -> frozenset[str]:
        """Ids of the tasks of the slots that may go on; whatever else still runs is ended."""
        return frozenset(slot.task_id for slot in self.slots if slot.is_wanted)

    # Events.

    def subscribed(self) -> None:
        """The master has taken the framework in, again maybe."""
        self._connection.subscribed()
        for slot in self.slots:
            # What it said meanwhile has not reached us.
            slot.heard_s = self._clock()

    def disconnected(self) -> None:
        """The connection to the master is gone."""
        self._connection.disconnected()

    def status_update(self, event: events.StatusUpdate) -> Slot | None:
        """Takes the state of a task in.

        Returns:
            The slot, if its state has changed.
        """
        state = TaskState.of(event.state)
        slot = self.find(event.task_id)
        if slot is None:
            return None
        changed = slot.state is not state
        if state.is_terminal():
            del self._slots[slot.task_id]
        slot.state = state
        slot.message = event.status.get("message", "")
        slot.reason = event.status.get("reason", "")
        slot.heard_s = self._clock()
        others = (other for other in self._slots.values() if other is not slot)
        mates = [other for other in others if other.executor_id == slot.executor_id]
        if event.status.get("source") == "SOURCE_EXECUTOR":
            slot.executor_seen, slot.is_lost = True, False
            for mate in mates:
                mate.mates_seen = True
        # Where the master knows that an executor has ended, and a new one has no room, it refuses the slot.
        is_over = slot.executor_has_ended or state is TaskState.ERROR
        if is_over or (slot.is_gone and not mates):
            self._executors.pop(slot.executor_id, None)
        if slot.executor_has_ended and not slot.missed_executor:
            if not slot.is_lost:
                self._blamed[slot.executor_id] = max((slot, *mates), key=lambda one: one.held_bytes).task_id
            for mate in mates:
                # One that was never reported may still start a new executor of that id.
                mate.is_lost = mate.executor_seen
        if not changed:
            return None
        self._observer.slot_changed(slot)
        return slot

    def is_to_blame(self, slot: Slot) -> bool:
        """Whether the end of a slot that is gone may be the doing of its own run, as far as one can tell."""
        return not slot.executor_has_ended or slot.task_id == self._blamed.get(slot.executor_id)

    # Launching.

    def consider(self, agents: Sequence[AgentOffer], wanted: int, now_s: float) -> Launch | Decline:
        """Launches slots on offers.

        Args:
            agents: the offers.
            wanted: how many more slots there is use for.
            now_s: the time on the search's clock.

        Raises:
            InfeasibleError: if no agent there is can ever hold one, and the search is not patient.
        """
        self._reported_s = now_s
        self._new = []
        operations: dict[str, dict[str, Any]] = {}
        gpus = self._gpus_of_a_slot(agents)
        for agent in agents:
            if self._exclusions.excludes(agent.agent_id, now_s) or len(self._new) >= wanted:
                continue
            slots = self.slots
            used = {device for slot in slots if slot.address == agent.address for device in slot.gpu_devices}
            there = [slot for slot in slots if slot.agent_id == agent.agent_id]
            limit = wanted - len(self._new)
            new, operation = slots_on(self._launch, agent, gpus, self.next_slot, limit, used, there, self._executors)
            if new:
                self._report_unknown_model(agent, gpus)
                self._slots.update({slot.task_id: slot for slot in new})
                infos = operation["launch"]["task_infos"]
                self._executors.update({executor_of(info): info["executor"] for info in infos})
                self.next_slot += len(new)
                operations[agent.agent_id] = operation
                self._new += new
        for slot in self._new:
            slot.heard_s = now_s
        if operations:
            return Launch(operations)
        if not self._slots and wanted > 0:
            self._report_unfit(agents, now_s)
        return Decline(min([RETRY_OFFERS_S, *self._exclusions.left_s(now_s).values()]))

    def launched(self) -> None:
        """The master has been asked for them; should it not have heard, it will say so."""
        for slot in self._new:
            self._observer.slot_changed(slot)
        self._new = []

    def report_shortage(self, wanted: int, now_s: float) -> None:
        """Tells the user why no offer comes, if slots are wanted and none is there.

        Raises:
            InfeasibleError: as `consider`.
        """
        if wanted <= 0 or self._slots:
            return
        if now_s - self._reported_s < NO_OFFER_TIMEOUT_S or not self._connection.connected:
            return
        self._reported_s = now_s
        self._observer.waiting(self._why_never(()) or f"{NO_OFFER} {self._needs}")

    @property
    def _needs(self) -> str:
        """What a slot needs, and what is free."""
        spec = self._spec
        mem = format_bytes(spec.slot_mem_mib * MIB)
        gpus = f", {self._slot_gpus} GPU" if self._slot_gpus else ""
        nodes, _ = self._agents()
        needs = f"{spec.slot_cpus:g} CPU{'' if spec.slot_cpus == 1 else 's'} and {mem}{gpus}"
        return f"A slot needs {needs}.{describe_free(nodes or ())}"

    def _report_unknown_model(self, agent: AgentOffer, gpus: int) -> None:
        model = agent.attributes.get(GPU_MODEL, "")
        if not gpus or model in self._unknown_models or not is_unknown_model(agent.attributes):
            return
        self._unknown_models.add(model)
        self._observer.notify(
            f"agent {agent.node} has GPUs '{model}', whose speed Dike does not know; they count as average for trials "
            "that have not been there"
        )

    def _gpus_of_a_slot(self, agents: Sequence[AgentOffer]) -> int:
        if self._slot_gpus is None:
            nodes, _ = self._agents()
            offered = any(agent.pool.scalar("gpus") >= 1 for agent in agents)
            self._slot_gpus = 1 if offered or any(node.gpus for node in nodes or ()) else 0
        return self._slot_gpus

    def _report_unfit(self, agents: Sequence[AgentOffer], now_s: float) -> None:
        """Nothing could be launched, and there is no slot at all."""
        excluded = [agent.node for agent in agents if self._exclusions.excludes(agent.agent_id, now_s)]
        if excluded:
            self._observer.waiting(
                f"Offers come only from {', '.join(excluded)}, left out after failures (--agent-cooldown)."
            )
            return
        self._observer.waiting(
            self._why_never(agents)
            or f"No offer holds a slot of {self._spec.slot_cpus:g} cpus, {self._spec.slot_mem_mib:g} MiB and "
            f"{self._gpus_of_a_slot(agents)} gpus. On offer: {describe_offers(agents)}."
        )

    @property
    def _has_run(self) -> bool:
        """The agents that held slots may only be away for a while."""
        return self.next_slot > self._first_slot

    def _agents(self) -> tuple[list[NodeClass] | None, str]:
        """Those that slots may use, and why there are none if the constraints are to blame."""
        try:
            return self._all_agents(), ""
        except InfeasibleError as error:
            if not self._patient and not self._has_run:
                raise
            return None, str(error)

    def _why_never(self, agents: Sequence[AgentOffer]) -> str:
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
            check_ever_fits(self._spec, self._gpus_of_a_slot(agents), nodes)
        except InfeasibleError as error:
            if not self._patient:
                raise
            return str(error)
        return ""

    # What is done by time.

    def end_unresponsive(self, now_s: float) -> None:
        """Ends slots that nothing has been heard of for long."""
        for slot in self.slots:
            is_silent = slot.state is TaskState.RUNNING and now_s - slot.heard_s >= SILENCE_S
            if is_silent and slot.is_wanted and self._connection.connected:
                self._observer.notify(f"slot {slot.id} on {slot.node} has said nothing for {SILENCE_S:g} s: ending it")
                slot.is_wanted = False

    def end_idle(self) -> None:
        """Ends slots that hold nothing, so that Mesos has their GPUs back (paper 'Hops')."""
        for slot in self.slots:
            if slot.is_up and slot.current is None:
                slot.leave()

    def send_wanted(self, now_s: float) -> None:
        """Tells each slot what it is to hold, where it does not know."""
        for slot in self.slots:
            wanted = slot.message_due(now_s)
            if wanted is not None:
                self._outbox.append(Message(slot.task_id, wanted.encode()))

    # Agents that are left out after failures.

    @property
    def excludes_agents(self) -> bool:
        """Whether offers of some agent are not taken at the moment."""
        return self._exclusions.count(self._clock()) > 0

    def excluded_agents(self) -> dict[str, float]:
        """Id of each agent that is left out -> for how many seconds it still is."""
        return self._exclusions.left_s(self._clock())

    def is_only_agent(self, slot: Slot) -> bool:
        """Whether there is no agent but a slot's, those that are left out aside."""
        now_s = self._clock()
        nodes, _ = self._agents()
        left_out = self._exclusions.count(now_s) + (not self._exclusions.excludes(slot.agent_id, now_s))
        return nodes is not None and len(nodes) <= left_out

    def replace(self, slot: Slot) -> bool:
        """Ends a slot, unless something would be lost with it; those to come share no executor with it.

        Returns:
            Whether it ends.
        """
        if not self.endable([slot]):
            return False
        self._executors.pop(slot.executor_id, None)
        slot.leave()
        return True

    def exclude_agent(self, slot: Slot, reason: str) -> None:
        """Takes no offers of a slot's agent for a while, and ends its slots there, if there is another agent.

        A trial that cannot be saved stays there.
        """
        if self.is_only_agent(slot):
            self._observer.notify(f"{reason} on {slot.node}; there is no other agent to go to")
            return
        self._exclusions.exclude(slot.agent_id, self._clock())
        self._observer.notify(f"{reason}: agent {slot.node} is left out for {self._spec.agent_cooldown_s:g} s")
        for other in self.endable(other for other in self.slots if other.agent_id == slot.agent_id):
            other.leave()

    # Draining.

    def endable(self, slots: Iterable[Slot]) -> list[Slot]:
        """Those of some slots that can end together, nothing being lost that no checkpoint holds."""
        staying = {slot.id: slot for slot in self.slots if slot.is_up and slot.is_wanted}
        ending = []
        for slot in filter(self._may_end, slots):
            rest = [other for other in staying.values() if other is not slot]
            if all(can_keep(key, rest, slot) for key in slot.unsaved):
                staying.pop(slot.id, None)
                ending.append(slot)
        return ending

    def vacate(self, slots: Iterable[Slot]) -> None:
        """Makes slots end, as soon as their runs are suspended."""
        for slot in slots:
            self._observer.notify(f"slot {slot.id} on {slot.node} makes room for another job")
            slot.leave()

    def drain(self) -> None:
        """Wants all slots to end, as soon as their runs are suspended."""
        self.is_draining = True
        self._draining_since_s = self._clock()
        for slot in self.slots:
            slot.leave()

    def end_overdue(self, now_s: float) -> None:
        """Wants the slots no more that were to end and have not."""
        patience_s = self._spec.suspend_timeout_s + DRAIN_MARGIN_S
        for slot in self.slots:
            # A slot that has never come up cannot be told to end.
            if now_s - self._draining_since_s >= patience_s or slot.state is not TaskState.RUNNING:
                slot.is_wanted = False


def can_keep(key: RunKey, staying: Sequence[Slot], ending: Slot) -> bool:
    """Whether slots keep a suspended run that no checkpoint holds, if another ends.

    Args:
        key: the run.
        staying: those that stay.
        ending: the other one.
    """
    here = [slot for slot in staying if key in slot.paused]
    if not here:
        return False
    # Each may get a run as large as the largest.
    largest = max(slot.held_bytes for slot in (ending, *here))
    return ending.unsaved_bytes + len(here) * largest <= FULL_SHARE * sum(slot.memory_bytes for slot in here)


# From an offer to the slots on it.


def slots_on(
    launch: SlotLaunch,
    agent: AgentOffer,
    gpus: int,
    first_id: int,
    limit: int,
    used_devices: Collection[int],
    there: Sequence[Slot],
    executors: Mapping[str, Mapping[str, Any]],
) -> tuple[list[Slot], dict[str, Any]]:
    """As many slots as an agent's offers hold.

    Args:
        launch: what to launch.
        agent: its offers.
        gpus: GPUs of a slot.
        first_id: number of the first slot.
        limit: at most this many.
        used_devices: GPU devices that other slots on that machine hold, for an agent that does not announce its own.
        there: the search's slots on that agent, by number.
        executors: id -> Mesos' ExecutorInfo of those that more slots can be launched into.

    Returns:
        The slots, and Mesos' LAUNCH operation for them.
    """
    pool = agent.pool
    spec = launch.spec
    stays = spec.suspend != "checkpoint"
    cpus = _at_least(spec.slot_cpus, "cpus", pool, gpus)
    # What trials hold on a GPU goes to the host's memory while they are suspended.
    mem_mib = _at_least(spec.slot_mem_mib, "mem", pool, gpus) if stays else spec.slot_mem_mib
    used = set(used_devices)
    executors = dict(executors)
    slots: list[Slot] = []
    infos = []
    while len(slots) < limit:
        number = first_id + len(slots)
        task_id = f"{spec.name}.slot-{number}"
        # What nothing stands still in has nothing to share.
        others = [*there, *slots] if stays and not gpus else []
        staying = (one for one in others if one.is_wanted and not one.leaving)
        executor_id = next((one.executor_id for one in staying if one.executor_id in executors), task_id)
        mates = [one for one in others if one.executor_id == executor_id]
        hosts = not any(mate.hosts_executor for mate in mates)
        held = executors[executor_id]["resources"] if executor_id in executors else None
        try:
            own, rest = take_resources(
                pool, cpus=cpus, mem_mib=mem_mib, gpus=gpus, executor_resources=held if hosts else ()
            )
            devices, pieces = take_devices(pool, gpus, used)
        except ValueError:
            break
        used.update(devices)
        if executor_id not in executors:
            executors[executor_id] = executor_info(
                executor_id, f"dike {spec.name}", spec.name, launch.python, launch.container, own
            )
        slot = Slot(
            id=number,
            task_id=task_id,
            agent_id=agent.agent_id,
            node=agent.node,
            address=agent.address,
            gpu_devices=devices,
            kind=kind_of(agent.attributes, gpus),
            memory_bytes=int(mem_mib * MIB) if stays else 0,
            executor_id=executor_id,
            hosts_executor=hosts,
            mates_seen=any(mate.executor_seen or mate.mates_seen for mate in mates),
        )
        slots.append(slot)
        hands_out = launch.hand_out_gpus or pool.announces_gpu_devices
        infos.append(
            _task_info(launch, slot, cpus, mem_mib, executors[executor_id], rest + pieces, hand_out_gpus=hands_out)
        )
    return slots, {"type": "LAUNCH", "launch": {"task_infos": infos}}


def _at_least(asked: float, name: str, pool: ResourcePool, gpus: int) -> float:
    """A slot's CPUs or memory: its GPUs' even share of what is on offer, if that is more than what was asked for."""
    offered = pool.scalar("gpus")
    if not gpus or offered < gpus:
        return asked
    share = math.floor(100 * pool.scalar(name) * gpus / offered) / 100
    return max(asked, share)


def check_ever_fits(spec: SearchSpec, gpus: int, nodes: Sequence[NodeClass] | None) -> None:
    """Refuses a slot that no agent could hold even if it were empty.

    Raises:
        InfeasibleError: if none could; the message says what the agents have.
    """
    if not nodes:
        return
    if any(
        node.cpus >= spec.slot_cpus and node.mem_bytes >= spec.slot_mem_mib * MIB and node.gpus >= gpus
        for node in nodes
    ):
        return
    agents = "; ".join(
        f"{node.name} {node.cpus:g} cpus, {node.mem_bytes / MIB:g} MiB, {node.gpus} gpus" for node in nodes
    )
    raise InfeasibleError(
        f"No agent can ever hold a slot of {spec.slot_cpus:g} cpus, {spec.slot_mem_mib:g} MiB and {gpus} gpus (the "
        f"agents are {agents}); make it smaller with --slot-cpus, --slot-mem or --slot-gpus."
    )


def _task_info(
    launch: SlotLaunch,
    slot: Slot,
    cpus: float,
    mem_mib: float,
    executor: Mapping[str, Any],
    rest: list[dict[str, Any]],
    *,
    hand_out_gpus: bool,
) -> dict[str, Any]:
    spec = launch.spec
    order = SlotOrder(
        search=spec.name,
        bundle_url=launch.bundle_url,
        script=launch.script,
        preload=launch.preload,
        environment={**(GROWING if slot.gpu_devices and slot.memory_bytes else {}), **spec.environment},
        cpus=cpus,
        most_mem_mib=mem_mib,
        # Where Mesos isolates GPUs a slot sees its own; one without any must not see others'.
        gpu_devices=slot.gpu_devices if hand_out_gpus or not slot.gpu_devices else None,
        suspend_timeout_s=spec.suspend_timeout_s,
        always_pause=spec.suspend == "memory" and bool(slot.gpu_devices),
        stall_timeout_s=spec.stall_timeout_s,
    )
    return {
        "name": f"{spec.name} slot {slot.id}",
        "task_id": {"value": slot.task_id},
        "agent_id": {"value": slot.agent_id},
        "executor": executor,
        "resources": rest,
        "data": order.encode(),
        "labels": {"labels": [{"key": "dike.search", "value": spec.name}]},
    }


def kind_of(attributes: Mapping[str, str], gpus: int) -> str:
    """What a slot on an agent computes on; empty where the agent does not say.

    Models of GPUs are read as the solver reads them, so that `Tesla V100-SXM2-16GB` and `v100` are one.

    Args:
        attributes: the agent's, as text.
        gpus: GPUs of the slot; without any their model says nothing of it.
    """
    model = attributes.get(GPU_MODEL, "").strip() if gpus else ""
    if model:
        hardware = known_hardware()
        return (hardware.gpu(model).model if hardware.knows(model) else model).lower()
    return attributes.get(SLOT_KIND, "").strip().lower()


def is_unknown_model(attributes: Mapping[str, str]) -> bool:
    """Whether an agent's GPUs are of a model whose speed is in no table of ours."""
    model = attributes.get(GPU_MODEL, "").strip()
    return bool(model) and not known_hardware().knows(model)


class SearchSizing:
    """Of a search, which needs one slot to begin with.

    Args:
        spec: the search.
    """

    is_gang = False

    def __init__(self, spec: SearchSpec) -> None:
        self._spec = spec

    def needs(self, nodes: Nodes) -> tuple[TaskNeed, ...]:
        """One slot."""
        gpus = self._spec.slot_gpus
        if gpus is None:
            gpus = 1 if any(node.gpus for node in nodes) else 0
        return (TaskNeed("slot", 1, self._spec.slot_cpus, self._spec.slot_mem_mib, gpus=float(gpus)),)

    def fit(self, nodes: Nodes) -> FitResult:
        """The first agent that holds a slot."""
        (slot,) = self.needs(nodes)
        short = {node.name: slot.missing(capacity(node)) for node in nodes}
        for name, missing in short.items():
            if not missing:
                return FitResult(frozenset([name]))
        if not short:
            return FitResult(problem="There is no agent.")
        best = min(short, key=lambda name: max(short[name][one] / slot.amounts[one] for one in short[name]))
        lacks = describe(short[best])
        return FitResult(
            problem=f"A slot needs {describe(slot.amounts)}, and {best}, the best agent, is {lacks} short."
        )
