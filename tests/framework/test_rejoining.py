"""Lost workers that come back alone, in a job whose Mesos is played."""

from __future__ import annotations

import pytest

from executor.messages import LaunchOrder
from framework.rejoining import REJOIN_S
from tests.framework.job_stage import Stage, ended, profile, spec


def test_a_worker_rejoins_alone_under_its_old_address() -> None:
    stage = Stage(spec())
    tasks = stage.start(agents=2)
    worker = tasks["worker:1"]
    stage.step(tasks["worker:0"], 10)
    stage.update(worker, "TASK_FAILED", ended(-9), message="ended by signal 9 (SIGKILL)")
    assert stage.mesos.killed == []
    launched = len(stage.mesos.accepted)
    stage.offer(stage.mesos.offer(int(worker.node[-1]), cpus=worker.planned.cpus))
    stage.wait(0.1)
    (info,) = stage.mesos.accepted[launched:]
    order = LaunchOrder.decode(info["data"])
    assert order.task.name == "worker:1"
    assert worker.address in order.task.cluster["worker"]
    assert info["task_id"]["value"] != worker.task_id
    assert stage.job.result.restarts == 1


def test_workers_lost_together_are_one_failure() -> None:
    stage = Stage(spec(max_workers=4, max_restarts=1))
    tasks = stage.start(agents=4)
    stage.step(tasks["worker:0"], 10)
    for name in ("worker:1", "worker:2", "worker:3"):
        stage.update(tasks[name], "TASK_FAILED", ended(-9))
    assert stage.job.result.restarts == 1
    assert stage.mesos.killed == []


def test_the_workers_of_a_removed_agent_do_not_wait_for_it() -> None:
    stage = Stage(spec(max_workers=4, max_restarts=1))
    tasks = stage.start(agents=4)
    stage.step(tasks["worker:0"], 10)
    for name in ("worker:1", "worker:2"):
        stage.update(tasks[name], "TASK_LOST", reason="REASON_AGENT_REMOVED")
    assert stage.job.result.restarts == 1
    assert tasks["ps:0"].task_id in stage.mesos.killed
    stage.end_killed()
    assert not stage.job.done


def test_a_worker_whose_place_is_not_offered_again_restarts_the_job() -> None:
    stage = Stage(spec())
    tasks = stage.start(agents=2)
    stage.step(tasks["worker:0"], 10)
    stage.update(tasks["worker:1"], "TASK_FAILED", ended(-9))
    stage.wait(REJOIN_S + 1)
    assert tasks["ps:0"].task_id in stage.mesos.killed


@pytest.mark.parametrize("which", ["chief worker", "synchronous"])
def test_other_workers_cannot_rejoin(which: str) -> None:
    stage = Stage(spec(profile=profile(synchronous=which == "synchronous")))
    tasks = stage.start(agents=2)
    stage.step(tasks["worker:0"], 10)
    stage.update(tasks["worker:0" if which == "chief worker" else "worker:1"], "TASK_FAILED", ended(-9))
    assert tasks["ps:0"].task_id in stage.mesos.killed
