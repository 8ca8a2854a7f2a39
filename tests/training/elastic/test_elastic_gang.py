"""Elastic jobs without parameter servers: from one task to a gang, and back."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from dike.exceptions import BadInputError
from dike.process import EXIT_CODE_PEER_LOST
from dike.profile import Api, ModelProfile
from executor.elastic_messages import ProcessEnd
from executor.messages import Outcome
from framework.mesos.offers import by_agent
from framework.policies.jobs.registry import POLICIES
from framework.scheduler.demand import Demand, FrameworkUsage
from framework.training.elastic.autoscaler import JobModels
from framework.training.elastic.layout import Size
from tests.training.elastic.elastic_stage import SHARED, ElasticStage, elastic_gang, heavy
from tests.training.job_stage import ended

TOTAL = {"cpus": 2.0, "mem": 32768.0, "gpus": 0.0}


def names(stage: ElasticStage) -> list[str]:
    return [task.name for task in stage.job.tasks]


def growing(agents: int = 1, **changes: Any) -> ElasticStage:
    """A job on one agent that was offered others, and has launched further workers there."""
    stage = ElasticStage(elastic_gang(**changes))
    # One CPU is too little for two workers.
    stage.offer(stage.mesos.offer(0, cpus=1))
    stage.wait(1.0)
    for task in stage.job.tasks:
        stage.update(task, "TASK_RUNNING")
    stage.make_slots()
    stage.total(10_000)
    stage.train(0)
    stage.look(*(stage.mesos.offer(agent, cpus=1) for agent in range(1, 1 + agents)))
    return stage


def lose_peer(stage: ElasticStage, name: str, attempt: int) -> None:
    """The process of a follower ends because the chief has ended; its slot keeps its task."""
    task = next(task for task in stage.job.tasks if task.name == name)
    slot = stage.slots[task.task_id]
    end = ProcessEnd(attempt, Outcome(EXIT_CODE_PEER_LOST, {}, "", "/sandbox"))
    slot.status = dataclasses.replace(slot.status, attempt=None, ends=(end,))
    stage.report(task.task_id)


def test_one_task_grows_to_a_gang() -> None:
    stage = growing(agents=2)
    assert names(stage) == ["worker:0"]
    assert not stage.slots[stage.chief.task_id].order.task.is_synchronous
    new = stage.get_ready()
    assert [task.name for task in new] == ["worker:1", "worker:2"]
    assert all(stage.slots[task.task_id].order.task.is_synchronous for task in new)
    stage.change(step=100)
    assert names(stage) == ["worker:0", "worker:1", "worker:2"]
    assert set(stage.running.values()) == {1}
    (resize,) = stage.job.result.resizes
    assert (resize.from_workers, resize.to_workers, resize.from_ps, resize.to_ps) == (1, 3, 0, 0)
    plan = stage.job.result.plan
    assert plan is not None
    assert (plan.strategy, plan.result) == ("allreduce", "same as python")
    assert (stage.job.result.restarts, stage.mesos.killed) == (0, [])


def test_a_gang_shrinks_to_one_task_for_others() -> None:
    stage = growing()
    stage.get_ready()
    stage.change(step=100)
    last = stage.train(100)
    stage.demand = Demand(TOTAL, [FrameworkUsage("x", "a search", {}, is_requesting=True)])
    stage.look()
    assert "a search waits" in stage.observer.reasons[-1]
    # The follower notices the chief's end before it is asked to stop.
    follower = next(task for task in stage.job.tasks if task.name == "worker:1")
    stage.deaf = {follower.task_id}
    stage.save(last)
    stage.round()
    lose_peer(stage, "worker:1", 1)
    stage.deaf = set()
    stage.change(step=last)
    assert names(stage) == ["worker:0"]
    assert stage.mesos.killed == [follower.task_id]
    assert [(each.from_workers, each.to_workers) for each in stage.job.result.resizes] == [(1, 2), (2, 1)]
    assert stage.job.result.plan is not None
    assert stage.job.result.plan.strategy == "one"
    assert stage.job.result.restarts == 0


def test_a_gang_grows_though_its_followers_end_unasked() -> None:
    stage = growing()
    stage.get_ready()
    stage.change(step=100)
    last = stage.train(100)
    stage.look(stage.mesos.offer(2, cpus=1))
    follower = next(task for task in stage.job.tasks if task.name == "worker:1")
    stage.deaf = {follower.task_id}
    stage.get_ready()
    lose_peer(stage, "worker:1", 1)
    stage.round()
    stage.deaf = set()
    stage.wait(1.0)
    stage.change(step=last)
    assert names(stage) == ["worker:0", "worker:1", "worker:2"]
    assert set(stage.running.values()) == {2}
    assert (stage.job.result.restarts, stage.mesos.killed) == (0, [])


@pytest.mark.parametrize("chief_ends", [True, False])
def test_a_follower_that_finishes_while_the_chief_saves(chief_ends: bool) -> None:
    stage = growing()
    stage.get_ready()
    stage.change(step=100)
    stage.train(100)
    stage.look(stage.mesos.offer(2, cpus=1))
    tasks = {task.name: task for task in stage.job.tasks}
    stage.deaf = {tasks["worker:0"].task_id}
    stage.get_ready()
    stage.update(tasks["worker:1"], "TASK_FINISHED", ended(0))
    assert not stage.job.done
    assert tasks["worker:0"].task_id not in stage.mesos.killed
    slot = stage.slots[tasks["worker:0"].task_id]
    end = ProcessEnd(1, Outcome(0 if chief_ends else 143, {}, "", "/sandbox"))
    slot.status = dataclasses.replace(slot.status, number=slot.status.number + 1, attempt=None, ends=(end,))
    stage.report(tasks["worker:0"].task_id)
    for _ in range(5):
        stage.wait(0.1)
    stage.end_killed()
    assert (stage.job.done, stage.job.result.succeeded) == (chief_ends, chief_ends)
    assert stage.job.result.restarts == 0
    if not chief_ends:
        assert "worker:1 ended while the job changed its size; starting again" in stage.observer.notes


def models(profile: ModelProfile = SHARED, most: int = 4) -> JobModels:
    spec = elastic_gang(1, most, profile=profile)
    stage = ElasticStage(spec)
    stage.start(1)
    plan = stage.job.result.plan
    assert plan is not None
    return JobModels(spec, plan, [agent.node_class() for agent in by_agent([stage.mesos.offer(0, cpus=4)])])


def test_the_speeds_of_a_gang_are_one_row() -> None:
    found = models()
    table = found.speeds()
    assert (table.shape, found.max_ps) == ((1, 4), 0)
    assert table[0, 1] > 1.5 * table[0, 0]
    assert table[0, 2] == found.samples_per_s(Size(3, 0))
    assert all(size.ps == 0 for size in found.sample_sizes(1))


def test_no_worker_of_a_gang_is_without_samples() -> None:
    assert models(dataclasses.replace(SHARED, batch_size=3), most=8).max_workers == 3
    alone = models(dataclasses.replace(SHARED, why_not_split="it is not known"), most=8)
    assert alone.max_workers == 1
    assert [size.workers for size in alone.sample_sizes(1)] == [1]


def test_a_step_of_a_gang_takes_one_batch_whatever_its_size() -> None:
    found = models()
    found.progressed(0.0, 100, None)
    assert found.samples_left(250) == 150 * SHARED.batch_size


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES.keys())
def test_policies_size_gangs(policy: Any) -> None:
    stage = growing()
    stage.get_ready()
    stage.change(step=100)
    view = stage.job.scale_view()
    assert view is not None
    assert (view.min_ps, view.max_ps, view.now, view.kept) == (0, 0, (2, 0), (1, 0))
    assert view.samples_per_s.shape == (1, view.max_workers)
    (counts,) = policy([view], (64_000, 65_536, 100_000, 0)).values()
    assert (1 <= counts[0] <= view.max_workers, counts[1]) == (True, 0)
    stage.job.scale_to(counts)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"profile": heavy(Api.KERAS)}, "cannot share the batches of train.py: its profile does not say"),
        ({"profile": heavy(Api.TF_KERAS)}, "tf_keras cannot share a batch among tasks; --strategy ps trains"),
        ({"strategy": "one"}, "--strategy one is a single task; leave out --strategy, or --elastic"),
    ],
)
def test_scripts_whose_workers_cannot_share_batches_are_refused(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(BadInputError, match=says):
        elastic_gang(**changes).check_tasks()


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"strategy": "allreduce"},
        {"least": 2},
        {"profile": heavy(Api.GRAPH)},
        {"profile": heavy(Api.KERAS), "strategy": "ps"},
        {"profile": heavy(Api.TF_KERAS), "strategy": "ps"},
        {"profile": heavy(Api.COORDINATOR)},
    ],
)
def test_elastic_jobs_that_are_accepted(changes: dict[str, Any]) -> None:
    spec = elastic_gang(**changes)
    spec.check_tasks()
    stage = ElasticStage(spec)
    stage.start(3)
    has_ps = any(task.planned.role == "ps" for task in stage.job.tasks)
    assert has_ps == (spec.profile is not SHARED)
