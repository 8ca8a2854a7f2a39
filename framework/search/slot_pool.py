"""The slots of a search: launched on offers, watched, notified, drained.

A slot is a Mesos task that holds one trial at a time (`framework.search.slots`). Slots without GPUs on one agent share
an executor, so that a trial paused in one of them can resume instantly in any other.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from dike.exceptions import InfeasibleError
from executor.mirror import RunFolder
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
from framework.search.limits import MAX_SLOTS_PER_GPU, parse_slots_per_gpu
from framework.search.observer import SearchObserver
from framework.search.records import SearchSpec
from framework.search.slots import Slot
from solver import NodeClass
from solver.hardware import known_hardware
from solver.units import format_bytes

logger = logging.getLogger(__name__)

MAX_SILENCE_S = 60.0
"""A slot that sends nothing for this long while the master is connected is ended."""
DRAIN_MARGIN_S = 10.0
"""Time that a slot may take to end beyond the suspension, before it is killed."""
MEASURING_S = 30.0
"""Time for which the first trials train before `--slots-per-gpu auto` decides, unless one finishes before."""
USABLE_GPU_SHARE = 0.8
"""Share of a GPU's memory that slots get by `--slots-per-gpu auto`: later trials may need more than the first ones."""
GPU_MODEL = "gpu_model"
"""Agent attribute with the model of its GPUs."""
SLOT_KIND = "slot_kind"
"""Agent attribute that distinguishes slots without GPUs, or with GPUs of no stated model."""


GPU_GROWTH_ENVIRONMENT = {"TF_FORCE_GPU_ALLOW_GROWTH": "true", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
"""TensorFlow and JAX allocate GPU memory as needed, so that it can be shared, and offloaded to the host."""


@dataclass(frozen=True)
class SlotLaunch:
    """What all slots of a search are launched with.

    Attributes:
        bundle_url: where executors fetch the script's folder.
        script: path of the script inside the bundle.
        preload: modules for the zygotes.
        python: interpreter of the executor on the agents.
        container: container of the slots; None for the agent's file system.
        hand_out_gpus: whether the framework assigns GPU devices, for agents that neither isolate nor announce them.
        folder: how executors that do not see the trials' folders reach them; None if all see them.
    """

    spec: SearchSpec
    bundle_url: str
    script: str
    preload: tuple[str, ...]
    python: str
    container: Container | None = None
    hand_out_gpus: bool = False
    folder: RunFolder | None = None


class SlotPool:
    """All slots of one search.

    Args:
        all_agents: lists every agent with all its resources, used or not, or None if unknown.
        may_end: returns whether ending a slot loses nothing of its current and next runs.
        slots: slots launched by an earlier service.
        executors: `shared_executors` of that service.
        patient: whether to wait for new agents if none can ever hold a slot, instead of raising an error.

    Attributes:
        is_draining: whether every slot is to suspend its trial and end.
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
        executors: Mapping[str, Mapping[str, Any]] = MappingProxyType({}),
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
        self._executors = dict(executors)
        """Id -> Mesos' ExecutorInfo, as long as slots use it; further slots launched into it must carry the same."""
        self._largest_task: dict[str, str] = {}
        """Ended executor -> task of the slot whose run used most memory."""
        self._connection = Connection(observer.notify)
        self._exclusions = Exclusions(self._spec.agent_cooldown_s)
        self._slot_gpus = self._spec.slot_gpus
        given = parse_slots_per_gpu(self._spec.slots_per_gpu)
        self._slots_per_gpu = given or max((slot.slots_per_gpu for slot in self._slots.values()), default=1)
        self._largest_gpu_bytes = 0
        self._measured_since_s: float | None = None
        self._has_trial_finished = False
        self._is_sharing_decided = given == 1
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
    def slot_gpus(self) -> int | None:
        """GPUs of a slot; None if they depend on the first offers."""
        return self._slot_gpus

    @property
    def active(self) -> list[Slot]:
        """The slots that have not been asked to end."""
        return [slot for slot in self.slots if not slot.leaving]

    def find(self, task_id: str) -> Slot | None:
        slot = self._slots.get(task_id)
        return None if slot is None or slot.is_gone else slot

    def wanted_tasks(self) -> frozenset[str]:
        """Returns the tasks of slots that may run; any other task is killed."""
        return frozenset(slot.task_id for slot in self.slots if slot.is_wanted)

    @property
    def slots_per_gpu(self) -> int:
        """Slots that share a GPU; 1 before `--slots-per-gpu auto` has measured trials."""
        return self._slots_per_gpu

    @property
    def shared_executors(self) -> dict[str, Mapping[str, Any]]:
        """Id -> Mesos' ExecutorInfo of executors that hold a GPU for several slots, which a later service needs."""
        shared = {slot.executor_id for slot in self.slots if slot.slots_per_gpu > 1}
        return {executor_id: info for executor_id, info in self._executors.items() if executor_id in shared}

    # Events.

    def subscribed(self) -> None:
        self._connection.subscribed()
        for slot in self.slots:
            # Messages sent in between are lost.
            slot.last_message_s = self._clock()

    def disconnected(self) -> None:
        self._connection.disconnected()

    def apply_task_status(self, event: events.StatusUpdate) -> Slot | None:
        """Applies a status update; returns the slot if its state has changed."""
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
        slot.last_message_s = self._clock()
        others = (other for other in self._slots.values() if other is not slot)
        mates = [other for other in others if other.executor_id == slot.executor_id]
        if event.status.get("source") == "SOURCE_EXECUTOR":
            slot.executor_seen, slot.executor_lost = True, False
            for mate in mates:
                mate.mates_seen = True
        # The master rejects the slot if the executor has ended and a new one does not fit.
        is_over = slot.executor_has_ended or state is TaskState.ERROR
        if is_over or (slot.is_gone and not mates):
            self._executors.pop(slot.executor_id, None)
        if slot.executor_has_ended and not slot.missed_executor:
            if not slot.executor_lost:
                self._largest_task[slot.executor_id] = max((slot, *mates), key=lambda one: one.run_bytes).task_id
            for mate in mates:
                # A task that was never reported may still start a new executor of that id.
                mate.executor_lost = mate.executor_seen
        if not changed:
            return None
        self._observer.slot_changed(slot)
        return slot

    def may_have_caused_end(self, slot: Slot) -> bool:
        """Returns whether an ended slot's own run may have caused its end, as far as is known."""
        return not slot.executor_has_ended or slot.task_id == self._largest_task.get(slot.executor_id)

    # Launching.

    def consider(self, agents: Sequence[AgentOffer], wanted: int, now_s: float) -> Launch | Decline:
        """Launches at most `wanted` slots on offers.

        Raises:
            InfeasibleError: if no agent can ever hold one, and the search is not patient.
        """
        self._reported_s = now_s
        self._new = []
        operations: dict[str, dict[str, Any]] = {}
        gpus = self._gpus_of_a_slot(agents)
        usable = [agent for agent in agents if not self._exclusions.excludes(agent.agent_id, now_s)]
        shares = self._spread(usable, gpus, wanted)
        # Those with free GPUs first: their trials train faster than those that share one.
        for agent in sorted(usable, key=lambda agent: -shares[agent.agent_id]):
            limit = wanted - len(self._new)
            if limit <= 0:
                break
            slots = self.slots
            used = {device for slot in slots if slot.address == agent.address for device in slot.gpu_devices}
            there = [slot for slot in slots if slot.agent_id == agent.agent_id]
            new, operation = slots_on(
                self._launch,
                agent,
                gpus,
                self.next_slot,
                min(limit, shares[agent.agent_id] or limit),
                used,
                there,
                self._executors,
                self._slots_per_gpu,
            )
            if new:
                self._report_unknown_model(agent, gpus)
                self._slots.update({slot.task_id: slot for slot in new})
                infos = operation["launch"]["task_infos"]
                self._executors.update({executor_of(info): info["executor"] for info in infos})
                self.next_slot += len(new)
                operations[agent.agent_id] = operation
                self._new += new
        for slot in self._new:
            slot.last_message_s = now_s
        if operations:
            return Launch(operations)
        if not self._slots and wanted > 0:
            self._report_unfit(agents, now_s)
        return Decline(min([RETRY_OFFERS_S, *self._exclusions.left_s(now_s).values()]))

    def _spread(self, agents: Sequence[AgentOffer], gpus: int, wanted: int) -> dict[str, int]:
        """Returns agent id -> how many of the slots go to its free GPUs, so that none stays free; 0: it has none."""
        free = {
            agent.agent_id: agent.pool.scalar("gpus") if self._slots_per_gpu > 1 and gpus else 0.0 for agent in agents
        }
        return {agent_id: math.ceil(wanted * own / (sum(free.values()) or 1.0)) for agent_id, own in free.items()}

    def launched(self) -> None:
        """Reports launched slots. If the master did not receive the launch, it reports their tasks as lost."""
        for slot in self._new:
            self._observer.slot_changed(slot)
        self._new = []

    def report_shortage(self, wanted: int, now_s: float) -> None:
        """Reports why no offer arrives, if slots are wanted and none exists.

        Raises:
            InfeasibleError: see `consider`.
        """
        if wanted <= 0 or self._slots:
            return
        if now_s - self._reported_s < NO_OFFER_TIMEOUT_S or not self._connection.connected:
            return
        self._reported_s = now_s
        self._observer.waiting(self._unfit_reason(()) or f"{NO_OFFER} {self._needs}")

    @property
    def _needs(self) -> str:
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
            f"agent {agent.node} has GPUs '{model}', whose speed Dike does not know; until measured, it counts "
            "as average"
        )

    def _gpus_of_a_slot(self, agents: Sequence[AgentOffer]) -> int:
        if self._slot_gpus is None:
            nodes, _ = self._agents()
            offered = any(agent.pool.scalar("gpus") >= 1 for agent in agents)
            self._slot_gpus = 1 if offered or any(node.gpus for node in nodes or ()) else 0
        return self._slot_gpus

    def _report_unfit(self, agents: Sequence[AgentOffer], now_s: float) -> None:
        excluded = [agent.node for agent in agents if self._exclusions.excludes(agent.agent_id, now_s)]
        if excluded:
            self._observer.waiting(
                f"Offers come only from {', '.join(excluded)}, in cooldown after failures (--agent-cooldown)."
            )
            return
        self._observer.waiting(
            self._unfit_reason(agents)
            or f"No offer holds a slot of {self._spec.slot_cpus:g} cpus, {self._spec.slot_mem_mib:g} MiB and "
            f"{self._gpus_of_a_slot(agents)} gpus. On offer: {describe_offers(agents)}."
        )

    @property
    def _has_run(self) -> bool:
        """Whether there were slots, so that their agents may only be temporarily away."""
        return self.next_slot > self._first_slot

    def _agents(self) -> tuple[list[NodeClass] | None, str]:
        """Returns the agents that slots may use, and why there are none if the constraints exclude all."""
        try:
            return self._all_agents(), ""
        except InfeasibleError as error:
            if not self._patient and not self._has_run:
                raise
            return None, str(error)

    def why_no_gpu_above(self, memory_bytes: int) -> str:
        """Returns why no agent has a GPU with more memory than that; empty if one has."""
        nodes, _ = self._agents()
        if any(node.gpus and gpu_memory_bytes(node.gpu_model or "") > memory_bytes for node in nodes or ()):
            return ""
        return "no agent has a GPU model with more memory"

    def _unfit_reason(self, agents: Sequence[AgentOffer]) -> str:
        """Returns why no agent can ever hold a slot; empty if one can, or if unknown.

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

    # Number of slots that share a GPU.

    def measured(self, gpu_bytes: int | None, *, has_finished: bool) -> None:
        """Records the GPU memory of a run that trains or has trained, for `--slots-per-gpu auto`."""
        self._largest_gpu_bytes = max(self._largest_gpu_bytes, gpu_bytes or 0)
        self._measured_since_s = self._clock() if self._measured_since_s is None else self._measured_since_s
        self._has_trial_finished |= has_finished and bool(gpu_bytes)

    def share_gpus(self, now_s: float) -> None:
        """Decides how many slots share a GPU, and ends slots launched before, once that loses nothing."""
        if not self._is_sharing_decided and self._slot_gpus is not None:
            self._is_sharing_decided = not self._slot_gpus or self._slots_per_gpu > 1 or self._has_measured(now_s)
            if not self._slot_gpus:
                self._slots_per_gpu = 1
                self._observer.notify("the slots have no GPU, so --slots-per-gpu has no effect")
            elif self._is_sharing_decided and self._slots_per_gpu == 1:
                self._choose_slots_per_gpu()
        if self._slots_per_gpu > 1:
            others = (slot for slot in self.active if slot.gpu_devices and slot.slots_per_gpu != self._slots_per_gpu)
            for slot in self.endable(slot for slot in others if slot.is_up):
                slot.request_end()

    def _has_measured(self, now_s: float) -> bool:
        """Returns whether the first trials have trained for long enough to know their GPU memory."""
        if self._measured_since_s is None or not any(slot.gpu_devices for slot in self.slots):
            return False
        return self._has_trial_finished or now_s - self._measured_since_s >= MEASURING_S

    def _choose_slots_per_gpu(self) -> None:
        total = min((gpu_memory_bytes(slot.kind) for slot in self.slots if slot.gpu_devices), default=0)
        if not total or not self._largest_gpu_bytes:
            what = "the GPU memory of trials" if total else f"the memory of this model of GPU ({GPU_MODEL})"
            self._observer.notify(f"--slots-per-gpu auto leaves one slot per GPU, because {what} is unknown")
            return
        count = int(USABLE_GPU_SHARE * total / self._largest_gpu_bytes)
        self._slots_per_gpu = min(MAX_SLOTS_PER_GPU, max(1, count))
        how = f"{self._slots_per_gpu} slots share each GPU from now on"
        if self._slots_per_gpu == 1:
            how = "each slot has a GPU of its own"
        used = format_bytes(self._largest_gpu_bytes)
        self._observer.notify(f"{how}: the first trials use up to {used} of its {format_bytes(total)}")

    # Periodic tasks.

    def end_unresponsive(self, now_s: float) -> None:
        for slot in self.slots:
            is_silent = slot.state is TaskState.RUNNING and now_s - slot.last_message_s >= MAX_SILENCE_S
            if is_silent and slot.is_wanted and self._connection.connected:
                self._observer.notify(
                    f"slot {slot.id} on {slot.node} has sent nothing for {MAX_SILENCE_S:g} s; Dike ends it"
                )
                slot.is_wanted = False

    def end_idle(self) -> None:
        """Ends empty slots, so that Mesos gets their GPUs back (paper 'Hops')."""
        for slot in self.slots:
            if slot.is_up and slot.current is None:
                slot.request_end()

    def send_wanted(self, now_s: float) -> None:
        """Sends the desired state to slots that have not acknowledged it."""
        for slot in self.slots:
            wanted = slot.take_due_message(now_s)
            if wanted is not None:
                self._outbox.append(Message(slot.task_id, wanted.encode()))

    # Cooldown of agents after failures.

    @property
    def excludes_agents(self) -> bool:
        return self._exclusions.count(self._clock()) > 0

    def excluded_agents(self) -> dict[str, float]:
        """Returns the id of each agent in its cooldown -> remaining seconds."""
        return self._exclusions.left_s(self._clock())

    def is_only_agent(self, slot: Slot) -> bool:
        """Returns whether no other agent than the slot's is available."""
        now_s = self._clock()
        nodes, _ = self._agents()
        left_out = self._exclusions.count(now_s) + (not self._exclusions.excludes(slot.agent_id, now_s))
        return nodes is not None and len(nodes) <= left_out

    def replace(self, slot: Slot) -> bool:
        """Ends a slot unless that loses something; returns whether it ends.

        Later slots do not share its executor, unless that holds the GPU of others, which only slots in it can use.
        """
        if not self.endable([slot]):
            return False
        if slot.slots_per_gpu == 1:
            self._executors.pop(slot.executor_id, None)
        slot.request_end()
        return True

    def exclude_agent(self, slot: Slot, reason: str) -> None:
        """Starts the cooldown of a slot's agent and ends its slots there, if there is another agent.

        Trials that cannot be suspended stay there.
        """
        if self.is_only_agent(slot):
            self._observer.notify(f"{reason} on {slot.node}; there is no other agent")
            return
        self._exclusions.exclude(slot.agent_id, self._clock())
        self._observer.notify(
            f"{reason}; Dike launches nothing on agent {slot.node} for {self._spec.agent_cooldown_s:g} s"
        )
        for other in self.endable(other for other in self.slots if other.agent_id == slot.agent_id):
            other.request_end()

    # Draining.

    def endable(self, slots: Iterable[Slot]) -> list[Slot]:
        """Returns those slots that can end together without losing a run that has no checkpoint."""
        staying = {slot.id: slot for slot in self.slots if slot.is_up and slot.is_wanted}
        ending = []
        for slot in filter(self._may_end, slots):
            rest = [other for other in staying.values() if other is not slot]
            if all(can_keep(key, rest, slot) for key in slot.unsaved):
                staying.pop(slot.id, None)
                ending.append(slot)
        return ending

    def vacate(self, slots: Iterable[Slot]) -> None:
        """Ends slots for another job, once their runs are suspended."""
        for slot in slots:
            self._observer.notify(f"slot {slot.id} on {slot.node} makes room for another job")
            slot.request_end()

    def drain(self) -> None:
        """Ends all slots, once their runs are suspended."""
        self.is_draining = True
        self._draining_since_s = self._clock()
        for slot in self.slots:
            slot.request_end()

    def end_overdue(self, now_s: float) -> None:
        """Kills slots that were to end and have not."""
        patience_s = self._spec.suspend_timeout_s + DRAIN_MARGIN_S
        for slot in self.slots:
            # A slot that is not running cannot receive messages.
            if now_s - self._draining_since_s >= patience_s or slot.state is not TaskState.RUNNING:
                slot.is_wanted = False


def can_keep(key: RunKey, staying: Sequence[Slot], ending: Slot) -> bool:
    """Returns whether the remaining slots keep a paused run that has no checkpoint when another slot ends."""
    here = [slot for slot in staying if key in slot.paused]
    if not here:
        return False
    # Assumes that each gets a run as large as the largest.
    largest = max(slot.run_bytes for slot in (ending, *here))
    return ending.unsaved_bytes + len(here) * largest <= FULL_SHARE * sum(slot.memory_bytes for slot in here)


def slots_on(
    launch: SlotLaunch,
    agent: AgentOffer,
    gpus: int,
    first_id: int,
    limit: int,
    used_devices: Collection[int],
    there: Sequence[Slot],
    executors: Mapping[str, Mapping[str, Any]],
    slots_per_gpu: int = 1,
) -> tuple[list[Slot], dict[str, Any]]:
    """Builds at most `limit` slots of `gpus` GPUs each that fit into an agent's offers, numbered from `first_id`.

    Args:
        launch: what slots are launched with.
        agent: its offers.
        gpus: GPUs of a slot.
        first_id: number of the first slot.
        limit: maximum number of slots.
        used_devices: GPU devices of other slots on that machine, for an agent that does not announce its own.
        there: the search's slots on that agent, by number.
        executors: id -> Mesos' ExecutorInfo of executors that can take more slots.
        slots_per_gpu: slots that share a GPU.

    Returns:
        The slots, and Mesos' LAUNCH operation for them.
    """
    pool = agent.pool
    spec = launch.spec
    stays = spec.suspend != "checkpoint"
    shares_gpu = gpus == 1 and slots_per_gpu > 1
    cpus = _at_least(spec.slot_cpus, "cpus", pool, gpus, slots_per_gpu)
    # A paused trial's GPU memory is offloaded to host memory.
    mem_mib = _at_least(spec.slot_mem_mib, "mem", pool, gpus, slots_per_gpu) if stays else spec.slot_mem_mib
    used = set(used_devices)
    executors = dict(executors)
    slots: list[Slot] = []
    infos = []
    while len(slots) < limit:
        number = first_id + len(slots)
        task_id = f"{spec.name}.slot-{number}"
        # Without paused processes slots have no reason to share an executor, unless they share its GPU.
        others = [*there, *slots] if shares_gpu or (stays and not gpus) else []
        if shares_gpu:
            # Not with one that has a GPU to itself, as it was launched before.
            others = [one for one in others if one.slots_per_gpu == slots_per_gpu]
        has_free_gpu = pool.scalar("gpus") >= 1
        room = slots_per_gpu if shares_gpu else math.inf
        executor_id = "" if shares_gpu and has_free_gpu else _executor_with_room(others, executors, room)
        if shares_gpu and not (executor_id or has_free_gpu):
            break
        mates = [one for one in others if one.executor_id == executor_id]
        hosts = not any(mate.hosts_executor for mate in mates)
        held = executors[executor_id]["resources"] if executor_id else None
        if shares_gpu and mates:
            cpus, mem_mib = mates[0].cpus, mates[0].mem_mib
        try:
            own, rest = take_resources(
                pool,
                cpus=cpus,
                mem_mib=mem_mib,
                gpus=0 if shares_gpu else gpus,
                executor_resources=held if hosts else (),
            )
            devices = mates[0].gpu_devices if mates else ()
            if not mates:
                devices, pieces = take_devices(pool, gpus, used)
                if shares_gpu:
                    # Mesos hands out whole GPUs: the executor holds it as long as one of its slots runs.
                    own += pool.take_scalar("gpus", 1) + pieces
                else:
                    rest += pieces
        except ValueError:
            break
        executor_id = executor_id or task_id
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
            cpus=cpus,
            mem_mib=mem_mib,
            slots_per_gpu=slots_per_gpu if shares_gpu else 1,
            hosts_executor=hosts,
            mates_seen=any(mate.executor_seen or mate.mates_seen for mate in mates),
        )
        slots.append(slot)
        hands_out = launch.hand_out_gpus or pool.announces_gpu_devices
        infos.append(_task_info(launch, slot, executors[executor_id], rest, hand_out_gpus=hands_out))
    return slots, {"type": "LAUNCH", "launch": {"task_infos": infos}}


def _executor_with_room(slots: Sequence[Slot], executors: Mapping[str, Mapping[str, Any]], room: float) -> str:
    """Returns the executor with the fewest of these slots, the oldest of several; empty if each has `room` of them.

    A slot that is to end counts: its trial may still use GPU memory.
    """
    counts = Counter(slot.executor_id for slot in slots)
    staying = (slot.executor_id for slot in slots if slot.is_wanted and not slot.leaving)
    usable = [each for each in staying if each in executors and counts[each] < room]
    return min(usable, key=lambda each: counts[each] if room < math.inf else 0, default="")


def _at_least(asked: float, name: str, pool: ResourcePool, gpus: int, slots_per_gpu: int) -> float:
    """Returns a slot's CPUs or memory: what was requested, but at least its GPUs' even share of the offer."""
    offered = pool.scalar("gpus")
    if not gpus or offered < gpus:
        return asked
    share = math.floor(100 * pool.scalar(name) * gpus / offered / slots_per_gpu) / 100
    return max(asked, share)


def check_ever_fits(spec: SearchSpec, gpus: int, nodes: Sequence[NodeClass] | None) -> None:
    """Checks that some agent could hold a slot if it were empty.

    Raises:
        InfeasibleError: if none could; the message lists the agents' resources.
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
    executor: Mapping[str, Any],
    rest: list[dict[str, Any]],
    *,
    hand_out_gpus: bool,
) -> dict[str, Any]:
    spec = launch.spec
    # `auto` measures what the first trials use.
    grows = bool(slot.gpu_devices) and (slot.memory_bytes > 0 or parse_slots_per_gpu(spec.slots_per_gpu) != 1)
    order = SlotOrder(
        search=spec.name,
        bundle_url=launch.bundle_url,
        script=launch.script,
        preload=launch.preload,
        environment={**(GPU_GROWTH_ENVIRONMENT if grows else {}), **spec.environment},
        cpus=slot.cpus,
        most_mem_mib=slot.mem_mib,
        # If Mesos isolates GPUs, a slot sees its own. A slot without GPUs must not see any.
        gpu_devices=slot.gpu_devices if hand_out_gpus or not slot.gpu_devices else None,
        slots_per_gpu=slot.slots_per_gpu,
        suspend_timeout_s=spec.suspend_timeout_s,
        always_pause=spec.suspend == "memory" and bool(slot.gpu_devices),
        stall_timeout_s=spec.stall_timeout_s,
        folder=launch.folder,
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
    """Returns the kind of a slot on an agent with these attributes; empty if the agent does not state it.

    Models of GPUs are normalized as in the solver, so that `Tesla V100-SXM2-16GB` and `v100` are equal. Without GPUs in
    the slot their model is ignored.
    """
    model = attributes.get(GPU_MODEL, "").strip() if gpus else ""
    if model:
        hardware = known_hardware()
        return (hardware.gpu(model).model if hardware.knows(model) else model).lower()
    return attributes.get(SLOT_KIND, "").strip().lower()


def gpu_memory_bytes(model: str) -> int:
    """Memory of a GPU of this model, or of this kind of slot; 0 if it is unknown."""
    hardware = known_hardware()
    return hardware.gpu(model).memory_bytes if hardware.knows(model) else 0


def is_unknown_model(attributes: Mapping[str, str]) -> bool:
    model = attributes.get(GPU_MODEL, "").strip()
    return bool(model) and not known_hardware().knows(model)


class SearchSizing:
    """Resources needed to start a search: one slot."""

    is_gang = False

    def __init__(self, spec: SearchSpec) -> None:
        self._spec = spec

    def needs(self, nodes: Nodes) -> tuple[TaskNeed, ...]:
        gpus = self._spec.slot_gpus
        if gpus is None:
            gpus = 1 if any(node.gpus for node in nodes) else 0
        return (TaskNeed("slot", 1, self._spec.slot_cpus, self._spec.slot_mem_mib, gpus=float(gpus)),)

    def fit(self, nodes: Nodes) -> FitResult:
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
