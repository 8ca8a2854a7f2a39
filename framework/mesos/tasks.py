"""Tasks as Mesos knows them: their states, the resources they take, the executor they run under."""

from __future__ import annotations

import enum
import itertools
import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from framework.mesos.containers import Container
from framework.mesos.resources import GPU_DEVICES, Resource, ResourcePool

logger = logging.getLogger(__name__)


class TaskState(enum.StrEnum):
    """Mesos' task states, less the prefix, by what they mean for a job."""

    STAGING = "staging"
    STARTING = "starting"
    RUNNING = "running"
    KILLING = "killing"
    FINISHED = "finished"
    FAILED = "failed"
    KILLED = "killed"
    LOST = "lost"
    """Also Mesos' DROPPED, GONE, UNREACHABLE and UNKNOWN: the task cannot be counted on any more."""
    ERROR = "error"
    """Mesos refused to launch it."""

    @classmethod
    def of(cls, mesos_state: str) -> TaskState:
        """Reads Mesos' name, such as `TASK_RUNNING`."""
        name = mesos_state.removeprefix("TASK_").lower()
        if name in ("dropped", "gone", "gone_by_operator", "unreachable", "unknown"):
            return cls.LOST
        try:
            return cls(name)
        except ValueError:
            logger.warning("Mesos has a task state that is not known here: %s", mesos_state)
            return cls.LOST

    def is_terminal(self) -> bool:
        """Whether the task will never run again."""
        return self not in (TaskState.STAGING, TaskState.STARTING, TaskState.RUNNING, TaskState.KILLING)

    @property
    def verb(self) -> str:
        """What has happened to the task, after its name in a sentence."""
        match self:
            case TaskState.KILLED | TaskState.LOST:
                return f"was {self}"
            case TaskState.ERROR:
                return "was refused"
            case TaskState.FINISHED | TaskState.FAILED:
                return str(self)
        return f"is {self}"


def ended_with_executor(state: TaskState, reason: str) -> bool:
    """Whether a task ended with its executor, and so with all tasks of that.

    Args:
        state: the task's last.
        reason: Mesos' reason for it, such as `REASON_EXECUTOR_TERMINATED`; empty if none was given.
    """
    is_lost = state in (TaskState.FAILED, TaskState.LOST)
    return is_lost and reason.startswith(("REASON_EXECUTOR_", "REASON_CONTAINER_"))


def why_ended(state: TaskState, message: str, reason: str, *, executor_seen: bool, more_memory: str) -> str:
    """Why a task ended, as Mesos says it, and what to do about it.

    Args:
        state: the task's last.
        message: Mesos' sentence about it; empty if there is none.
        reason: Mesos' name of the reason; empty if none was given.
        executor_seen: whether its executor has reported anything, of any of its tasks.
        more_memory: the option that gives the task more memory, and what it does.
    """
    if reason == "REASON_CONTAINER_LIMITATION_MEMORY":
        # Statistics follow, many lines of them.
        first, _, _ = (message.strip() or "its container took more memory than it was given").partition("\n")
        return f"{first.strip()} ({more_memory})"
    why = message or reason or str(state)
    if reason == "REASON_EXECUTOR_TERMINATED" and not executor_seen:
        why += (
            "; the executor ended before it could report, so Dike is probably not installed for the Python there "
            "(--agent-python, --image)"
        )
    return why


# What the executor itself gets; the smallest amounts that Mesos accepts without a warning.
EXECUTOR_CPUS = 0.01
EXECUTOR_MEM_MIB = 32.0


def take_resources(
    pool: ResourcePool,
    *,
    cpus: float,
    mem_mib: float,
    disk_mib: float = 0,
    gpus: int = 0,
    executor_resources: Sequence[Resource] | None = None,
) -> tuple[list[Resource], list[Resource]]:
    """Takes a task's resources, ports aside: the executor's small part and the rest.

    Args:
        pool: what the agent offers.
        cpus: how many, the executor's part included.
        mem_mib: how much, the executor's part included.
        disk_mib: how much.
        gpus: how many.
        executor_resources: what of that the executor has already; None: it is a new one.

    Raises:
        ValueError: if the pool has too little.
    """
    if executor_resources is None:
        own = pool.take_scalar("cpus", min(EXECUTOR_CPUS, cpus / 2))
        own += pool.take_scalar("mem", min(EXECUTOR_MEM_MIB, mem_mib / 2))
    else:
        own = list(executor_resources)
    # A task needs something of its own.
    own_cpus, own_mem = (min(_total(own, name), all_ / 2) for name, all_ in (("cpus", cpus), ("mem", mem_mib)))
    rest = pool.take_scalar("cpus", cpus - own_cpus) + pool.take_scalar("mem", mem_mib - own_mem)
    for name, amount in (("disk", disk_mib), ("gpus", gpus)):
        if amount:
            rest += pool.take_scalar(name, amount)
    return own, rest


def _total(pieces: Iterable[Resource], name: str) -> float:
    return sum(float(piece["scalar"]["value"]) for piece in pieces if piece["name"] == name)


def take_devices(pool: ResourcePool, gpus: int, used: Collection[int]) -> tuple[tuple[int, ...], list[Resource]]:
    """Chooses a task's GPU devices: of those that its agent announces, or counted from 0 where it announces none.

    Args:
        pool: what the agent offers.
        gpus: how many devices.
        used: devices of that machine that are known to be executor_resources, for an agent that announces none.

    Returns:
        The device numbers, and the pieces of the pool for them.

    Raises:
        ValueError: if the agent announces devices and has too few left; nothing is taken then.
    """
    if not pool.announces_gpu_devices:
        return tuple(itertools.islice((one for one in itertools.count() if one not in used), gpus)), []
    left = pool.gpu_devices()
    if gpus > len(left):
        raise ValueError(f"{gpus} {GPU_DEVICES} wanted, {len(left)} left")
    devices = tuple(left[:gpus])
    return devices, pool.take_gpu_devices(devices)


def executor_info(
    executor_id: str,
    name: str,
    source: str,
    python: str,
    container: Container | None,
    resources: Sequence[Resource],
    module: str = "executor",
) -> dict[str, Any]:
    """Mesos' ExecutorInfo of our executor.

    Args:
        executor_id: unique in the framework.
        name: for people.
        source: the job or search it belongs to.
        python: interpreter on the agent.
        container: what it runs in; None for the agent's own file system.
        resources: what it gets beside its task.
        module: of ours that the interpreter runs.
    """
    info: dict[str, Any] = {
        "type": "CUSTOM",
        "executor_id": {"value": executor_id},
        "name": name,
        "source": source,
        "command": {"shell": False, "value": python, "arguments": [python, "-m", module]},
        "resources": list(resources),
    }
    if container is not None:
        info["container"] = container.to_mesos()
    return info


def executor_of(info: Mapping[str, Any]) -> str:
    """Id of the executor that a TaskInfo is launched into; a command's has the task's."""
    return str(info.get("executor", {}).get("executor_id", info["task_id"])["value"])
