"""How a running job changes its size; Mesos and slots are fakes, the planner and the models are real."""

from __future__ import annotations

from typing import Any

import pytest

from dike.profile import Api
from dike.task import TaskSpec
from executor.elastic_messages import ElasticStatus, ProcessEnd, WantedProcess
from executor.messages import LaunchOrder, Outcome
from framework.scheduler.demand import Demand, FrameworkUsage
from framework.training.elastic.resize import STOP_TIMEOUT_S, WARM_UP_TIMEOUT_S
from framework.training.elastic.slots import RESEND_INTERVAL_S
from framework.training.elastic.stragglers import MIN_SLOW_REPORTS
from framework.training.spec import JobTask
from tests.training.elastic.elastic_stage import INTERVAL_S, ElasticStage, elastic, heavy
from tests.training.job_stage import ended

TOTAL = {"cpus": 4.0, "mem": 32768.0, "gpus": 0.0}


def waiting() -> Demand:
    return Demand(TOTAL, [FrameworkUsage("x", "a search", {}, is_requesting=True)])


def changing(agents: int = 1, **changes: Any) -> tuple[ElasticStage, list[JobTask]]:
    """A job that was offered another agent and has launched further tasks there; they are not ready yet."""
    stage = ElasticStage(elastic(**changes))
    stage.start_training(agents)
    stage.look(stage.mesos.offer(agents))
    tasks = stage.new_tasks
    assert tasks
    return stage, tasks


def saving(**changes: Any) -> tuple[ElasticStage, list[JobTask]]:
    """A job whose chief was asked to save, and has not done so."""
    stage, new = changing(**changes)
    stage.deaf = {task.task_id for task in stage.job.tasks}
    stage.get_ready()
    stage.round()
    assert wanted(stage, stage.chief.task_id) is None
    return stage, new


def slow_down(stage: ElasticStage, reports: int = MIN_SLOW_REPORTS) -> None:
    """Reports a slow worker 1, `reports` times."""
    for _ in range(reports):
        stage.rates(stage.chief, {0: 10.0, 1: 1.0, 2: 10.0})


def wanted(stage: ElasticStage, task_id: str) -> TaskSpec | None:
    return [WantedProcess.decode(data) for executor, data in stage.mesos.messages if executor == task_id][-1].task


def test_a_job_grows_when_there_is_room() -> None:
    stage = ElasticStage(elastic())
    before = stage.start_training()
    workers = sum(name.startswith("worker") for name in before)
    stage.look(stage.mesos.offer(1))
    assert "times as fast" in stage.observer.reasons[0]
    further = stage.make_slots()
    assert further
    assert all(slot.order.standby and slot.order.elastic for slot in further)
    # It trains on while they get ready.
    assert stage.mesos.messages == []
    for slot in further:
        stage.update(stage.launched[slot.status.task_id], "TASK_RUNNING")
    stage.round()
    stage.change(step=100)
    after = {task.name for task in stage.job.tasks}
    assert len([name for name in after if name.startswith("worker")]) == workers + len(further)
    assert set(stage.running.values()) == {1}
    specs = [wanted(stage, task.task_id) for task in stage.job.tasks]
    assert all(each is not None and each.cluster == specs[0].cluster for each in specs)  # type: ignore[union-attr]
    (resize,) = stage.job.result.resizes
    assert (resize.from_workers, resize.to_workers, resize.step) == (workers, workers + len(further), 100)
    assert resize.cost_s > 0
    assert stage.job.result.plan is not None
    assert stage.job.result.plan.option.workers == resize.to_workers
    assert stage.job.result.restarts == 0
    assert stage.mesos.killed == []


def test_a_synchronous_job_keeps_its_batch() -> None:
    stage, _ = changing(profile=heavy(Api.GRAPH, synchronous=True), most=4)
    orders = [slot.order for slot in (*stage.slots.values(), *stage.make_slots())]
    assert {order.task.replicas for order in orders} == {4}


def test_a_v1_job_stops_its_chief_before_the_other_workers() -> None:
    stage, _ = saving(profile=heavy(Api.GRAPH))
    told = [task_id for task_id, _ in stage.mesos.messages if stage.launched[task_id].member]
    assert set(told) == {stage.chief.task_id}
    stage.deaf = set()
    stage.wait(RESEND_INTERVAL_S)
    stage.change(step=100)
    assert set(stage.running.values()) == {1}
    assert len(stage.job.result.resizes) == 1


def test_what_a_slot_did_not_hear_is_said_again() -> None:
    stage, _ = saving()
    stage.deaf = set()
    assert stage.running["chief:0"] == 0
    stage.wait(RESEND_INTERVAL_S)
    stage.change(step=100)
    assert stage.running["chief:0"] == 1


def test_nothing_changes_before_the_first_checkpoint() -> None:
    stage = ElasticStage(elastic())
    stage.start()
    for step in range(1, 200):
        stage.step(stage.chief, step)
        stage.wait(0.1)
    stage.wait(INTERVAL_S)
    assert "revive" not in stage.mesos.calls


def test_no_job_is_resized_without_a_gain() -> None:
    stage = ElasticStage(elastic())
    tasks = stage.start_training()
    workers = sum(name.startswith("worker") for name in tasks)
    other = ElasticStage(elastic(1, workers))
    other.start_training()
    other.wait(INTERVAL_S)
    assert "revive" not in other.mesos.calls


def test_a_job_shrinks_for_others_and_does_not_grow_back() -> None:
    stage = ElasticStage(elastic())
    before = stage.start_training(agents=2)
    stage.demand = waiting()
    stage.look()
    assert "a search waits" in stage.observer.reasons[0]
    stage.change(step=100)
    left = {task.name for task in stage.job.tasks}
    assert left < set(before)
    assert len(stage.mesos.killed) == len(before) - len(left)
    stage.end_killed()
    # The search has taken what it can and wants more; then it is gone.
    stage.demand = Demand(TOTAL, [FrameworkUsage("x", "a search", {"cpus": 2.0}, is_requesting=True)])
    stage.train(100)
    for _ in range(3):
        stage.look(stage.mesos.offer(1))
        stage.train(200)
    assert len(stage.observer.reasons) == 1
    stage.demand = Demand(TOTAL)
    stage.look(stage.mesos.offer(1))
    assert len(stage.observer.reasons) == 2


def test_tasks_that_do_not_get_ready_are_given_up() -> None:
    stage, new = changing()
    stage.wait(WARM_UP_TIMEOUT_S + 1)
    assert set(stage.mesos.killed) == {task.task_id for task in new}
    stage.end_killed()
    assert "not ready within" in stage.observer.notes[-1]
    assert set(stage.running.values()) == {0}
    assert stage.job.result.restarts == 0


def test_a_further_task_that_dies_costs_nothing_but_the_change() -> None:
    stage, new = changing()
    stage.update(new[0], "TASK_FAILED", ended(1), message="exited with status 1")
    assert "keeps its size" in stage.observer.notes[-1]
    stage.end_killed()
    assert set(stage.running.values()) == {0}
    stage.train(100)
    # That agent is not tried again immediately; another one is.
    stage.look(stage.mesos.offer(1))
    assert len(stage.observer.reasons) == 1
    stage.train(200)
    stage.look(stage.mesos.offer(1), stage.mesos.offer(2))
    assert len(stage.observer.reasons) == 2
    assert {task.node for task in stage.new_tasks} == {"agent-2"}


def test_a_worker_that_dies_while_others_get_ready_rejoins() -> None:
    stage, new = changing(agents=2, profile=heavy(Api.GRAPH))
    worker = next(task for task in stage.job.tasks if task.name == "worker:1")
    stage.update(worker, "TASK_FAILED", ended(-9))
    assert set(stage.mesos.killed) == {task.task_id for task in new}
    assert stage.job.result.restarts == 1


@pytest.mark.parametrize("stage_name", ["saving", "clearing", "starting"])
def test_whatever_dies_in_a_change_restarts_the_job_in_one_size(stage_name: str) -> None:
    stage, new = saving()
    old = stage.job.tasks
    if stage_name != "saving":
        ps = next(task for task in old if task.name == "ps:0")
        stage.deaf = {ps.task_id} if stage_name == "clearing" else set()
        stage.wait(RESEND_INTERVAL_S)
        stage.save(100)
        for _ in range(6):
            stage.round()
    victim = next(task for task in old if task.name == "ps:0")
    stage.update(victim, "TASK_FAILED", ended(-9), message="ended by signal 9 (SIGKILL)")
    alive = {task.task_id for task in (*old, *new)} - {victim.task_id}
    assert alive <= set(stage.mesos.killed)
    stage.end_killed()
    assert stage.job.result.restarts == 1
    first = len(stage.mesos.accepted)
    stage.start()
    attempts = {LaunchOrder.decode(info["data"]).task.attempt for info in stage.mesos.accepted[first:]}
    assert attempts == {2 if stage_name == "starting" else 1}
    assert not any(order.standby for order in map(_order, stage.mesos.accepted[first:]))


@pytest.mark.parametrize("clearing", [False, True])
def test_a_further_task_that_dies_when_the_job_is_being_stopped_restarts_it(*, clearing: bool) -> None:
    stage, new = saving()
    old = stage.job.tasks
    if clearing:
        stage.deaf = {next(task.task_id for task in old if task.name == "ps:0")}
        stage.wait(RESEND_INTERVAL_S)
        stage.save(100)
        for _ in range(6):
            stage.round()
    stage.update(new[0], "TASK_FAILED", ended(-9), message="ended by signal 9 (SIGKILL)")
    stage.round()
    assert {task.task_id for task in (*old, *new[1:])} <= set(stage.mesos.killed)
    stage.end_killed()
    first = len(stage.mesos.accepted)
    stage.start()
    assert {_order(info).task.attempt for info in stage.mesos.accepted[first:]} == {1}


def test_a_worker_that_dies_when_the_new_size_has_been_started_rejoins() -> None:
    stage, new = saving()
    stage.deaf = set()
    stage.wait(RESEND_INTERVAL_S)
    stage.save(100)
    for _ in range(6):
        stage.round()
    stage.update(new[0], "TASK_FAILED", ended(-9))
    launched = len(stage.mesos.accepted)
    stage.offer(stage.mesos.offer(1))
    stage.wait(1.0)
    (info,) = stage.mesos.accepted[launched:]
    order = _order(info)
    assert (order.task.name, order.task.attempt, order.standby) == (new[0].name, 1, False)
    stage.resume(100)
    stage.step(stage.chief, 101)
    assert len(stage.job.result.resizes) == 1


def test_a_slot_that_does_not_stop_ends_the_attempt() -> None:
    stage, _ = saving()
    for _ in range(round(STOP_TIMEOUT_S) + 2):
        stage.wait(1.0)
    assert set(stage.mesos.killed) == set(stage.launched)
    stage.end_killed()
    assert not stage.job.done


def test_a_script_that_ends_just_then_has_ended_well() -> None:
    stage, new = saving()
    slot = stage.slots[stage.chief.task_id]
    slot.status = ElasticStatus(slot.status.task_id, 1, True, None, (ProcessEnd(0, Outcome(0, {}, "", "/sandbox")),))
    stage.report(slot.status.task_id)
    stage.wait(0.1)
    assert {task.task_id for task in new} <= set(stage.mesos.killed)
    stage.end_killed()
    assert stage.job.done
    assert stage.job.result.succeeded


def test_a_chief_that_finishes_before_it_hears_of_the_change_has_ended_well() -> None:
    stage, _ = saving()
    stage.update(stage.chief, "TASK_FINISHED", ended(0))
    stage.end_killed()
    assert stage.job.done
    assert stage.job.result.succeeded


def test_a_script_that_cannot_resume_is_left_alone() -> None:
    stage, _ = saving()
    stage.deaf = set()
    stage.wait(RESEND_INTERVAL_S)
    stage.save(100)
    for _ in range(6):
        stage.round()
    stage.step(stage.chief, 1)
    assert len(stage.job.result.resizes) == 1
    told = [note for note in stage.observer.notes if "cannot resume" in note]
    assert len(told) == 1
    stage.train(1)
    for _ in range(3):
        stage.look(stage.mesos.offer(2))
    assert len(stage.observer.reasons) == 1
    assert [note for note in stage.observer.notes if "cannot resume" in note] == told


def test_a_straggler_is_replaced_on_another_agent() -> None:
    stage = ElasticStage(elastic(2, 2))
    stage.start_training(agents=2)
    slow = next(task for task in stage.job.tasks if task.name == "worker:1")
    same = int(slow.node[-1])
    slow_down(stage)
    assert any("worker:1 makes 1 steps/s" in note for note in stage.observer.notes)
    stage.look(stage.mesos.offer(same), stage.mesos.offer(5))
    stage.get_ready()
    stage.change(step=100)
    replaced = next(task for task in stage.job.tasks if task.name == "worker:1")
    assert replaced.node == "agent-5"
    assert set(stage.mesos.killed) == {slow.task_id}
    (resize,) = stage.job.result.resizes
    assert resize.from_workers == resize.to_workers == 2


def test_a_straggler_stays_where_no_other_agent_has_room() -> None:
    stage = ElasticStage(elastic(2, 2))
    stage.start_training(agents=2)
    slow = next(task for task in stage.job.tasks if task.name == "worker:1")
    slow_down(stage)
    stage.look(stage.mesos.offer(int(slow.node[-1])))
    assert "until another agent has room" in stage.observer.notes[-1]
    assert stage.observer.reasons == []
    # The note is not repeated, and the worker is left alone for an interval.
    told = list(stage.observer.notes)
    slow_down(stage)
    stage.look(stage.mesos.offer(5))
    assert stage.observer.reasons == []
    slow_down(stage)
    stage.look(stage.mesos.offer(int(slow.node[-1])))
    assert stage.observer.notes == told
    # The next time for two.
    stage.wait(INTERVAL_S)
    slow_down(stage)
    stage.look(stage.mesos.offer(5))
    assert stage.observer.reasons == []
    slow_down(stage)
    stage.look(stage.mesos.offer(5))
    assert stage.observer.reasons == [f"worker:1 on {slow.node} is too slow"]


def test_a_straggler_does_not_keep_the_job_from_shrinking_for_others() -> None:
    stage = ElasticStage(elastic())
    stage.start_training(agents=2)
    slow_down(stage)
    stage.demand = waiting()
    stage.look()
    assert "a search waits" in stage.observer.reasons[0]


def test_a_straggler_that_stays_does_not_keep_the_job_from_growing() -> None:
    stage = ElasticStage(elastic(2, 3))
    stage.start_training(agents=2)
    slow = next(task for task in stage.job.tasks if task.name == "worker:1")
    slow_down(stage)
    stage.look(stage.mesos.offer(int(slow.node[-1])))
    assert "until another agent has room" in stage.observer.notes[-1]
    assert len(stage.observer.reasons) == 1
    assert [task.name for task in stage.new_tasks] == ["worker:2"]


def test_a_launch_that_breaks_down_uses_other_names_the_next_time() -> None:
    stage = ElasticStage(elastic())
    stage.start_training()
    stage.mesos.refusal = "no such offer"
    stage.look(stage.mesos.offer(1))
    assert "keeps its size" in stage.observer.notes[-1]
    stage.mesos.refusal = ""
    stage.train(100)
    stage.look(stage.mesos.offer(1))
    ids = [info["task_id"]["value"] for info in stage.mesos.accepted]
    assert len(set(ids)) == len(ids)
    assert [task_id.rpartition(".")[2] for task_id in ids[-1:]] == ["2"]


def test_offers_that_are_not_used_are_given_back() -> None:
    stage = ElasticStage(elastic())
    stage.start_training()
    small = stage.mesos.offer(1, cpus=0.1)
    stage.look(small)
    assert small["id"]["value"] in stage.mesos.declined
    assert stage.mesos.calls[-1] == "suppress"
    assert stage.observer.reasons == []


def _order(info: dict[str, Any]) -> LaunchOrder:
    return LaunchOrder.decode(info["data"])
