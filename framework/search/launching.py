"""From offers to slots."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from dike.exceptions import InfeasibleError
from dike.trial.spec import TrialSpec
from executor.slot_order import SlotOrder
from executor.trial_messages import TrialRun
from framework.containers import Container
from framework.launching import executor_info, take_devices, take_resources
from framework.offers import MIB, AgentOffer
from framework.resources import ResourcePool
from framework.search.kinds import kind_of
from framework.search.records import SearchSpec, TrialRecord
from framework.search.slots import Slot
from solver import NodeClass


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


def trial_arguments(spec: SearchSpec, trial: TrialRecord) -> tuple[str, ...]:
    """The script's arguments in a trial: those that all trials get, then its parameters behind their flags."""
    flags = [
        part
        for name, value in trial.parameters.items()
        if name in spec.flags
        for part in (spec.flags[name], str(value).lower() if isinstance(value, bool) else str(value))
    ]
    return (*spec.arguments, *flags)


def trial_run(spec: SearchSpec, trial: TrialRecord, run: int) -> TrialRun:
    """What an executor is sent of a run of a trial, which goes on from the trial's newest checkpoint."""
    order = TrialSpec(
        search=spec.name,
        number=trial.number,
        run=run,
        parameters=trial.parameters,
        folder=f"{spec.checkpoint_dir.rstrip('/')}/trial-{trial.number}",
        resume_from=trial.checkpoint,
        checkpoint_interval_s=spec.checkpoint_interval_s,
        metric=spec.metric,
        call=spec.call,
        earlier_results=spec.earlier_results,
    )
    return TrialRun(order, trial_arguments(spec, trial))


def slots_on(
    launch: SlotLaunch, agent: AgentOffer, gpus: int, first_id: int, limit: int, used_devices: Collection[int]
) -> tuple[list[Slot], dict[str, Any]]:
    """As many slots as an agent's offers hold.

    Args:
        launch: what to launch.
        agent: its offers.
        gpus: GPUs of a slot.
        first_id: number of the first slot.
        limit: at most this many.
        used_devices: GPU devices that other slots on that machine hold, for an agent that does not announce its own.

    Returns:
        The slots, and Mesos' LAUNCH operation for them.
    """
    pool = agent.pool
    cpus = cpus_of_slot(launch.spec, pool, gpus)
    used = set(used_devices)
    slots: list[Slot] = []
    infos = []
    while len(slots) < limit:
        number = first_id + len(slots)
        try:
            own, rest = take_resources(pool, cpus=cpus, mem_mib=launch.spec.slot_mem_mib, gpus=gpus)
            devices, pieces = take_devices(pool, gpus, used)
        except ValueError:
            break
        used.update(devices)
        slot = Slot(
            id=number,
            task_id=f"{launch.spec.name}.slot-{number}",
            agent_id=agent.agent_id,
            node=agent.node,
            address=agent.address,
            gpu_devices=devices,
            kind=kind_of(agent.attributes, gpus),
        )
        slots.append(slot)
        hands_out = launch.hand_out_gpus or pool.announces_gpu_devices
        infos.append(_task_info(launch, slot, cpus, own, rest + pieces, hand_out_gpus=hands_out))
    return slots, {"type": "LAUNCH", "launch": {"task_infos": infos}}


def cpus_of_slot(spec: SearchSpec, pool: ResourcePool, gpus: int) -> float:
    """A slot's CPUs: a GPU's even share of those on offer, if that is more than what was asked for."""
    offered = pool.scalar("gpus")
    if not gpus or offered < gpus:
        return spec.slot_cpus
    share = math.floor(100 * pool.scalar("cpus") * gpus / offered) / 100
    return max(spec.slot_cpus, share)


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
    own: list[dict[str, Any]],
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
        environment=spec.environment,
        cpus=cpus,
        # Where Mesos isolates GPUs a slot sees its own; one without any must not see others'.
        gpu_devices=slot.gpu_devices if hand_out_gpus or not slot.gpu_devices else None,
        suspend_timeout_s=spec.suspend_timeout_s,
    )
    return {
        "name": f"{spec.name} slot {slot.id}",
        "task_id": {"value": slot.task_id},
        "agent_id": {"value": slot.agent_id},
        "executor": executor_info(
            slot.task_id, f"dike slot {slot.id}", spec.name, launch.python, launch.container, own
        ),
        "resources": rest,
        "data": order.encode(),
        "labels": {"labels": [{"key": "dike.search", "value": spec.name}]},
    }
