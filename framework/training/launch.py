"""Builds the Mesos tasks and launch operations of a plan."""

from __future__ import annotations

import math
import random
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from dike.checkpoints import fingerprint
from dike.process import SAVE_TIMEOUT_S, SAVE_TIMEOUT_VARIABLE
from dike.profile import Api
from dike.task import Role, TaskSpec
from executor.messages import LaunchOrder
from framework.mesos.offers import AgentOffer
from framework.mesos.resources import Resource, ResourcePool
from framework.mesos.tasks import executor_info, take_devices, take_resources
from framework.training.spec import JobSpec, JobTask
from solver import Plan, PlannedTask
from solver.strategies import ALLREDUCE

Executors = Mapping[str, Mapping[str, Any]]
"""Id -> Mesos' ExecutorInfo."""
KILL_MARGIN_S = 3.0
NO_EXECUTORS: Executors = MappingProxyType({})


class DoesNotFitError(Exception):
    """The offers do not hold what the plan needs; the message names the agent and the resource."""


def place(
    spec: JobSpec,
    plan: Plan,
    agents: Sequence[AgentOffer],
    serial: int,
    avoid_ports: Collection[int] = (),
    held: Sequence[JobTask] = (),
    executors: Executors = NO_EXECUTORS,
) -> list[JobTask]:
    """Assigns each task of the plan its agent, executor, port and GPU devices.

    Ports in `avoid_ports`, which failed before, are used only if there is no other. GPU devices of the running tasks
    `held` are not assigned again. `serial` numbers the launches of a job and is part of the task ids.

    Raises:
        DoesNotFitError: a node is not on offer or has too little.
    """
    # A plan may use any name of an agent; a node's own name takes precedence.
    by_node = {name: agent for agent in agents for name in agent.names} | {agent.node: agent for agent in agents}
    pools: dict[str, ResourcePool] = {}
    # By machine, not by agent: a private Mesos runs several agents on one machine.
    used_gpus: defaultdict[str, set[int]] = defaultdict(set)
    for task in held:
        used_gpus[task.host].update(task.gpu_devices)
    choose = random.Random(f"{spec.job_id} {serial}")  # noqa: S311 (spreads ports; nothing secret)
    tasks: list[JobTask] = []
    for planned in plan.tasks:
        agent = by_node.get(planned.node)
        if agent is None:
            raise DoesNotFitError(f"agent {planned.node} offers nothing")
        pool = pools.setdefault(agent.agent_id, agent.pool)
        task = JobTask(
            task_id=f"{spec.job_id}.{planned.role}-{planned.index}.{serial}",
            planned=planned,
            agent_id=agent.agent_id,
            node=agent.node,
            host=agent.address,
            port=0,
        )
        new_executor = f"{spec.job_id}.executor-{list(pools).index(agent.agent_id)}.{serial}"
        choose_executor(spec, task, agent, [*held, *tasks], executors, new_executor)
        try:
            _take(pool, task, executors)
            task.port, _ = pool.take_port(avoid_ports, choose)
            task.gpu_devices, _ = take_devices(pool, planned.gpus, used_gpus[agent.address])
        except ValueError as error:
            raise DoesNotFitError(f"agent {planned.node}: {error}") from error
        used_gpus[agent.address].update(task.gpu_devices)
        tasks.append(task)
    return tasks


def choose_executor(
    spec: JobSpec, task: JobTask, agent: AgentOffer, others: Iterable[JobTask], executors: Executors, new: str
) -> None:
    """Sets the executor of a task: that of another task of its job on its agent, or a new one with the id `new`.

    `others` include tasks of the same launch, and all tasks of a launch on an agent share `new`.
    """
    # A container sees the GPUs of all its tasks; unless Dike assigns them, tasks cannot distinguish them.
    if spec.isolate_tasks or (task.planned.gpus and not _assigns_gpus(spec, agent.pool)):
        return
    living = [one for one in others if one.agent_id == agent.agent_id and not one.state.is_terminal()]
    there = [one.executor_id for one in living if one.executor_id in executors and not one.stop_requested]
    task.executor_id = there[0] if there else new
    task.joined = bool(there)
    task.hosts_executor = not any(one.hosts_executor for one in living if one.executor_id == task.executor_id)


def try_take(pool: ResourcePool, planned: PlannedTask) -> bool:
    """Takes a task's resources, including a port, out of the pool; returns False and takes none if they do not fit."""
    needs = (("cpus", planned.cpus), ("mem", planned.mem_mb), ("disk", planned.disk_mb), ("gpus", planned.gpus))
    ports = pool.ports()
    if not ports or any(amount > pool.scalar(name) for name, amount in needs):
        return False
    _take_planned(pool, planned, ())
    pool.take_ports(ports[:1])
    return True


def cluster_spec(tasks: Sequence[JobTask]) -> dict[str, list[str]]:
    """TensorFlow's cluster: role -> addresses in the order of the index."""
    spec: dict[str, list[str]] = {}
    for role in Role:
        addresses = [task.address for task in sorted(tasks, key=lambda t: t.planned.index) if task.planned.role == role]
        if addresses:
            spec[str(role)] = addresses
    return spec


def launch_operation(
    spec: JobSpec,
    plan: Plan,
    tasks: Sequence[JobTask],
    cluster: Mapping[str, Sequence[str]],
    agent: AgentOffer,
    attempt: int,
    *,
    executors: Executors = NO_EXECUTORS,
    standby: bool = False,
) -> dict[str, Any]:
    """Mesos' LAUNCH operation for tasks of a job on one agent.

    Args:
        spec: the job.
        plan: gives the placement of variables.
        tasks: the tasks to launch.
        cluster: addresses of the whole job.
        agent: the offers to use.
        attempt: number of earlier starts of the job.
        executors: existing shared executors.
        standby: whether the tasks only warm up (`executor.messages.LaunchOrder`).

    Raises:
        DoesNotFitError: the agent's offers do not hold what they need.
    """
    pool = agent.pool
    executors = dict(executors)
    try:
        infos = []
        for task in tasks:
            process = task_spec(spec, plan, task.planned, cluster, attempt)
            order = _order(spec, task, process, standby=standby, hand_out_gpus=_assigns_gpus(spec, pool))
            own, rest = _take(pool, task, executors)
            if task.executor_id not in executors:
                executors[task.executor_id] = _new_executor(spec, task, own)
            infos.append(_task_info(spec, task, order, executors[task.executor_id], rest, pool))
    except ValueError as error:
        raise DoesNotFitError(f"agent {agent.node}: {error}") from error
    return {"type": "LAUNCH", "launch": {"task_infos": infos}}


def task_spec(
    spec: JobSpec, plan: Plan, planned: PlannedTask, cluster: Mapping[str, Sequence[str]], attempt: int
) -> TaskSpec:
    is_loop = spec.profile.api is Api.LOOP
    return TaskSpec(
        job_id=spec.checkpoint_owner or spec.job_id,
        role=Role(planned.role),
        index=planned.index,
        cluster={role: list(addresses) for role, addresses in cluster.items()},
        api=spec.profile.api,
        variables=dict(plan.variables),
        checkpoint_dir=spec.checkpoint_dir,
        checkpoint_interval_s=spec.checkpoint_interval_s,
        attempt=attempt,
        fingerprint=fingerprint(spec.profile),
        batch_size=spec.profile.batch_size,
        cached_batch_size=spec.profile.batch_size if spec.profile_is_kept else None,
        replicas=spec.replicas,
        gpus=planned.gpus,
        distributes_itself=bool(spec.profile.own_distribution) or (plan.strategy == ALLREDUCE and is_loop),
    )


def _assigns_gpus(spec: JobSpec, pool: ResourcePool) -> bool:
    """Whether Dike assigns GPU devices to tasks because Mesos does not isolate them."""
    return spec.hand_out_gpus or pool.announces_gpu_devices


def _take(pool: ResourcePool, task: JobTask, executors: Executors) -> tuple[list[Resource], list[Resource]]:
    """Takes a task's resources out of the pool: its executor's own, and the rest."""
    if not task.hosts_executor:
        return _take_planned(pool, task.planned, ())
    known = executors.get(task.executor_id)
    return _take_planned(pool, task.planned, None if known is None else known["resources"])


def _take_planned(
    pool: ResourcePool, planned: PlannedTask, held: Sequence[Resource] | None
) -> tuple[list[Resource], list[Resource]]:
    return take_resources(
        pool,
        cpus=planned.cpus,
        mem_mib=planned.mem_mb,
        disk_mib=planned.disk_mb,
        gpus=planned.gpus,
        executor_resources=held,
    )


def _new_executor(spec: JobSpec, task: JobTask, own: Sequence[Resource]) -> dict[str, Any]:
    name = task.name if task.executor_id == task.task_id else spec.job_id
    return executor_info(task.executor_id, f"dike {name}", spec.job_id, spec.python, spec.container, own)


def _task_info(
    spec: JobSpec,
    task: JobTask,
    order: LaunchOrder,
    executor: Mapping[str, Any],
    rest: list[Resource],
    pool: ResourcePool,
) -> dict[str, Any]:
    planned = task.planned
    rest += pool.take_ports([task.port])
    if pool.announces_gpu_devices:
        rest += pool.take_gpu_devices(task.gpu_devices)
    return {
        "name": f"{spec.job_id} {task.name}",
        "task_id": {"value": task.task_id},
        "agent_id": {"value": task.agent_id},
        "executor": executor,
        "resources": rest,
        "data": order.encode(),
        "labels": {
            "labels": [{"key": "dike.job", "value": spec.job_id}, {"key": "dike.role", "value": str(planned.role)}]
        },
    }


def _order(spec: JobSpec, task: JobTask, process: TaskSpec, *, standby: bool, hand_out_gpus: bool) -> LaunchOrder:
    planned = task.planned
    return LaunchOrder(
        task=process,
        bundle_url=spec.bundle_url,
        script=spec.script,
        arguments=spec.arguments,
        environment=spec.environment,
        cpus=planned.cpus,
        # A role's estimated memory does not include the script's data, so only the user's limit is enforced.
        most_mem_mib=planned.mem_mb if spec.planning.task_mem_mb else 0.0,
        gpu_devices=task.gpu_devices if hand_out_gpus or not planned.gpus else None,
        stream_logs=spec.streams(planned),
        elastic=spec.elastic is not None,
        standby=standby,
        preload=spec.preload,
        kill_grace_s=kill_grace_s(spec.environment),
        folder=spec.folder,
    )


def kill_grace_s(environment: Mapping[str, str]) -> float:
    """Seconds between SIGTERM and SIGKILL: the time for a chief to end its step and save, plus a margin."""
    try:
        save_s = float(environment.get(SAVE_TIMEOUT_VARIABLE, SAVE_TIMEOUT_S))
    except ValueError:
        save_s = math.nan  # the process itself reports the error
    return (save_s if 0 <= save_s < math.inf else SAVE_TIMEOUT_S) + KILL_MARGIN_S
