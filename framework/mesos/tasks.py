"""Task states, task resources and executors, in Mesos' terms."""

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
    """Mesos' task states without their prefix; all states of lost tasks are one."""

    STAGING = "staging"
    STARTING = "starting"
    RUNNING = "running"
    KILLING = "killing"
    FINISHED = "finished"
    FAILED = "failed"
    KILLED = "killed"
    LOST = "lost"
    """Includes Mesos' DROPPED, GONE, UNREACHABLE and UNKNOWN."""
    ERROR = "error"
    """Mesos refused to launch it."""

    @classmethod
    def of(cls, mesos_state: str) -> TaskState:
        """Parses Mesos' name, such as `TASK_RUNNING`."""
        name = mesos_state.removeprefix("TASK_").lower()
        if name in ("dropped", "gone", "gone_by_operator", "unreachable", "unknown"):
            return cls.LOST
        try:
            return cls(name)
        except ValueError:
            logger.warning("unknown Mesos task state, counted as lost: %s", mesos_state)
            return cls.LOST

    def is_terminal(self) -> bool:
        return self not in (TaskState.STAGING, TaskState.STARTING, TaskState.RUNNING, TaskState.KILLING)

    @property
    def verb(self) -> str:
        """The state as a predicate, to follow the task's name in a sentence."""
        match self:
            case TaskState.KILLED | TaskState.LOST:
                return f"was {self}"
            case TaskState.ERROR:
                return "was refused"
            case TaskState.FINISHED | TaskState.FAILED:
                return str(self)
        return f"is {self}"


def ended_with_executor(state: TaskState, reason: str) -> bool:
    """Whether a task ended because its executor did, which ends all tasks of the executor.

    Args:
        state: the task's last state.
        reason: Mesos' reason for it, such as `REASON_EXECUTOR_TERMINATED`; empty if none was given.
    """
    is_lost = state in (TaskState.FAILED, TaskState.LOST)
    return is_lost and reason.startswith(("REASON_EXECUTOR_", "REASON_CONTAINER_"))


def why_ended(state: TaskState, message: str, reason: str, *, executor_seen: bool, more_memory: str) -> str:
    """Describes why a task ended, and what to do about it.

    Args:
        state: the task's last state.
        message: Mesos' sentence about it; empty if there is none.
        reason: Mesos' name of the reason; empty if none was given.
        executor_seen: whether its executor has reported anything about any of its tasks.
        more_memory: the option that gives the task more memory, and what it does.
    """
    if reason == "REASON_CONTAINER_LIMITATION_MEMORY":
        # Many lines of statistics follow.
        first, _, _ = (message.strip() or "its container exceeded its memory limit").partition("\n")
        return f"{first.strip()} ({more_memory})"
    why = message or reason or str(state)
    if reason == "REASON_EXECUTOR_TERMINATED" and not executor_seen:
        why += (
            "; the executor ended before it could report, so Dike is probably not installed for the Python there "
            "(--agent-python, --image)"
        )
    return why


# The executor's own share; the smallest amounts that Mesos accepts without a warning.
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
    """Takes a task's resources except ports; returns the executor's small share and the rest.

    Args:
        pool: the agent's offers.
        cpus: amount, the executor's share included.
        mem_mib: amount, the executor's share included.
        disk_mib: amount.
        gpus: number.
        executor_resources: the share that the executor has already; None if it is new.

    Raises:
        ValueError: if the pool has too little.
    """
    if executor_resources is None:
        own = pool.take_scalar("cpus", min(EXECUTOR_CPUS, cpus / 2))
        own += pool.take_scalar("mem", min(EXECUTOR_MEM_MIB, mem_mib / 2))
    else:
        own = list(executor_resources)
    # Mesos refuses a task without resources.
    own_cpus, own_mem = (min(_total(own, name), all_ / 2) for name, all_ in (("cpus", cpus), ("mem", mem_mib)))
    rest = pool.take_scalar("cpus", cpus - own_cpus) + pool.take_scalar("mem", mem_mib - own_mem)
    for name, amount in (("disk", disk_mib), ("gpus", gpus)):
        if amount:
            rest += pool.take_scalar(name, amount)
    return own, rest


def _total(pieces: Iterable[Resource], name: str) -> float:
    return sum(float(piece["scalar"]["value"]) for piece in pieces if piece["name"] == name)


def take_devices(pool: ResourcePool, gpus: int, used: Collection[int]) -> tuple[tuple[int, ...], list[Resource]]:
    """Chooses a task's GPU devices: of those that its agent advertises, or else the lowest unused numbers.

    Args:
        pool: the agent's offers.
        gpus: number of devices.
        used: devices of that machine in use, for an agent that advertises none.

    Returns:
        The device numbers, and the pieces of the pool for them.

    Raises:
        ValueError: if the agent advertises devices and has too few left; nothing is taken then.
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
    """Returns Mesos' ExecutorInfo of a Dike executor.

    Args:
        executor_id: unique in the framework.
        name: for people.
        source: the job or search that it belongs to.
        python: interpreter on the agent.
        container: its container; None for the agent's own file system.
        resources: its resources in addition to its task's.
        module: module that the interpreter runs.
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
    """Returns the id of a TaskInfo's executor; that of a command's executor is the task's id."""
    return str(info.get("executor", {}).get("executor_id", info["task_id"])["value"])
