"""An elastic training job that is stored, and continued by another service, with fake slots."""

from __future__ import annotations

import pytest

from framework.scheduler.job import Need
from framework.scheduler.task_tracker import KILL_RETRY_S
from framework.training.spec import JobSpec
from tests.training.elastic.elastic_stage import INTERVAL_S, ElasticStage, elastic


def elastic_again(stage: ElasticStage, job_spec: JobSpec) -> None:
    stage.begin(job_spec, stage.written_state(), demand=lambda own: stage.demand)
    stage.subscribe()


def test_an_elastic_job_continues_once_its_slots_confirm_the_stored_state() -> None:
    job_spec = elastic()
    stage = ElasticStage(job_spec)
    stage.start_training()
    elastic_again(stage, job_spec)
    launched = len(stage.mesos.accepted)
    stage.look(stage.mesos.offer(1))
    assert len(stage.mesos.accepted) == launched, "not before the slots have spoken"
    for task in stage.job.tasks:
        stage.report(task.task_id)
    last = stage.train(100)
    stage.look(stage.mesos.offer(1))
    assert len(stage.mesos.accepted) > launched
    stage.get_ready()
    stage.change(last)
    assert len(stage.observer.resizes) == 1
    assert stage.mesos.killed == []
    assert set(stage.running.values()) == {1}
    assert stage.job.result.restarts == 0


@pytest.mark.parametrize("rounds", [1, 2, 3])
def test_an_elastic_job_in_the_middle_of_a_change_starts_again_at_one_size(rounds: int) -> None:
    job_spec = elastic()
    stage = ElasticStage(job_spec)
    stage.start_training()
    stage.look(stage.mesos.offer(1))
    state = stage.written_state()
    stage.get_ready()
    stage.save(50)
    for _ in range(rounds):
        stage.round()
    everything = set(stage.slots)
    stage.begin(job_spec, state)
    stage.subscribe()
    for task_id in stage.slots:
        stage.report(task_id)
    stage.wait(KILL_RETRY_S + 1)
    assert set(stage.mesos.killed) == everything
    stage.end_killed()
    assert (stage.job.need, stage.job.result.restarts) == (Need.REPLACE_LOST, 0)
    assert not stage.job.tasks


def test_tasks_that_were_getting_ready_are_ended_and_the_others_train_on() -> None:
    job_spec = elastic()
    stage = ElasticStage(job_spec)
    stage.start_training()
    before = {task.task_id for task in stage.job.tasks}
    stage.look(stage.mesos.offer(1))
    new = set(stage.launched) - before
    elastic_again(stage, job_spec)
    for task in stage.job.tasks:
        stage.report(task.task_id)
    stage.wait(KILL_RETRY_S + 1)
    assert new
    assert set(stage.mesos.killed) == new
    stage.end_killed()
    assert {task.task_id for task in stage.job.tasks} == before
    stage.train(200, seconds=INTERVAL_S)
    assert set(stage.mesos.killed) == new
