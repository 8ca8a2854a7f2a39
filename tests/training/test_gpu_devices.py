"""Device numbers of GPUs that agents announce: reserved from offers like ports, so Mesos knows their holders."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from executor.messages import LaunchOrder
from executor.slot_order import SlotOrder
from framework.mesos.offers import AgentOffer, by_agent
from framework.mesos.resources import GPU_DEVICES, ResourcePool
from framework.search.slot_pool import SlotLaunch, slots_on
from framework.training.launch import DoesNotFitError, launch_operation, place
from framework.training.spec import JobTask
from solver import Plan, PlannedTask
from tests.mesos.fake_mesos import FakeMesos, scalar
from tests.search.search_stage import search_spec
from tests.training.job_stage import JobStage, ended, spec


def devices(first: int, last: int, **more: Any) -> dict[str, Any]:
    ranges = {"range": [{"begin": first, "end": last}]}
    return {"name": GPU_DEVICES, "type": "RANGES", "ranges": ranges, "role": "*", **more}


def agent_with(*pieces: dict[str, Any], gpus: int) -> AgentOffer:
    offer = FakeMesos().offer(0, cpus=8, gpus=gpus)
    return by_agent([{**offer, "resources": [*offer["resources"], *pieces]}])[0]


def held(info: dict[str, Any]) -> list[int]:
    """The device numbers of a task, as reported to Mesos."""
    return ResourcePool(info["resources"]).gpu_devices()


def plan_of(workers: int) -> Plan:
    stage = JobStage(spec())
    stage.start()
    assert stage.job.result.plan is not None
    tasks = tuple(PlannedTask("worker", index, "agent-0", 1.0, 512, 0, 1) for index in range(workers))
    return dataclasses.replace(stage.job.result.plan, tasks=tasks)


def launched(agent: AgentOffer, plan: Plan, tasks: Sequence[JobTask]) -> list[dict[str, Any]]:
    infos: list[dict[str, Any]] = launch_operation(spec(), plan, tasks, {}, agent, 0)["launch"]["task_infos"]
    return infos


@pytest.mark.parametrize("hand_out_gpus", [True, False])
def test_a_job_takes_the_devices_that_are_offered(hand_out_gpus: bool) -> None:
    job = spec(hand_out_gpus=hand_out_gpus)
    agent = agent_with(devices(2, 4), gpus=3)
    plan = plan_of(2)
    infos = launch_operation(job, plan, place(job, plan, [agent], 0), {}, agent, 0)["launch"]["task_infos"]
    assert [LaunchOrder.decode(info["data"]).gpu_devices for info in infos] == [(2,), (3,)]
    assert [held(info) for info in infos] == [[2], [3]]


def test_a_search_takes_the_devices_that_are_offered(tmp_path: Path) -> None:
    launch = SlotLaunch(search_spec(tmp_path), "http://127.0.0.1:1/bundle/token", "train.py", (), "python3")
    # What its own slots hold is not on offer, whatever is thought of those.
    slots, operation = slots_on(launch, agent_with(devices(2, 4), gpus=3), 1, 0, 2, {2}, (), {})
    infos = operation["launch"]["task_infos"]
    assert [slot.gpu_devices for slot in slots] == [(2,), (3,)]
    assert [SlotOrder.decode(info["data"]).gpu_devices for info in infos] == [(2,), (3,)]
    assert [held(info) for info in infos] == [[2], [3]]


def test_a_growing_job_is_given_devices_that_are_offered() -> None:
    plan = plan_of(1)
    (first,) = place(spec(), plan, [agent_with(devices(2, 3), gpus=2)], 0)
    (second,) = place(spec(), plan, [agent_with(devices(3, 3), gpus=1)], 1, held=[first])
    assert (first.gpu_devices, second.gpu_devices) == ((2,), (3,))


def test_reserved_devices_go_with_reserved_gpus() -> None:
    agent = agent_with(scalar("gpus", 1) | {"role": "ml"}, devices(0, 0), devices(1, 1, role="ml"), gpus=1)
    plan = plan_of(1)
    (info,) = launched(agent, plan, place(spec(), plan, [agent], 0))
    roles = {piece["name"]: piece["role"] for piece in info["resources"] if piece["name"] in ("gpus", GPU_DEVICES)}
    assert roles == {"gpus": "ml", GPU_DEVICES: "ml"}
    assert held(info) == [1]


def test_too_few_devices_are_named() -> None:
    with pytest.raises(DoesNotFitError, match="agent agent-0: 1 gpu_devices wanted, 0 left"):
        place(spec(), plan_of(2), [agent_with(devices(0, 0), gpus=2)], 0)


def test_a_lost_worker_comes_back_to_its_device_or_not_at_all() -> None:
    stage = JobStage(spec(max_workers=2))
    stage.offer(*(_offer(stage, number, 4, 7) for number in range(2)))
    stage.wait(1.0)
    tasks = {task.name: task for task in stage.job.tasks}
    for task in tasks.values():
        stage.update(task, "TASK_RUNNING")
    stage.step(tasks["worker:0"], 10)
    worker = tasks["worker:1"]
    assert worker.gpu_devices == (4,)
    stage.update(worker, "TASK_FAILED", ended(-9))
    before = len(stage.mesos.accepted)
    number = int(worker.node[-1])
    stage.offer(_offer(stage, number, 5, 7))
    stage.wait(1.0)
    assert len(stage.mesos.accepted) == before
    stage.offer(_offer(stage, number, 4, 4))
    stage.wait(1.0)
    (info,) = stage.mesos.accepted[before:]
    assert held(info) == [4]


def _offer(stage: JobStage, agent: int, first: int, last: int) -> dict[str, Any]:
    offer = stage.mesos.offer(agent, cpus=2, gpus=1)
    return {**offer, "resources": [*offer["resources"], devices(first, last)]}
