"""The bad days of masters, agents and executors, on the real Mesos: what a training job of a service makes of them."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from framework.embedded.agents import AgentSpec
from framework.embedded.cluster import EmbeddedCluster
from tests.embedded.embedded_support import be_patient
from tests.faults.fault_stage import FaultStage
from tests.waiting import is_alive

pytestmark = [pytest.mark.mesos, pytest.mark.timeout(300)]

AGENT = AgentSpec(resources="cpus:2;mem:4096;disk:4096")
ENDLESS = 1_000_000


@pytest.fixture
def patient_mesos(monkeypatch: pytest.MonkeyPatch) -> None:
    be_patient(monkeypatch)


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[FaultStage]:
    with EmbeddedCluster([AGENT] * 2) as cluster, FaultStage(cluster, tmp_path) as ready:
        yield ready


def pids(stage: FaultStage) -> dict[str, int]:
    return {name: process.pid for name, process in stage.roles().items()}


def agent_of(stage: FaultStage, job: str, task: str) -> int:
    """Number of the agent on which a task of the job runs."""
    return int(stage.live_tasks(job)[task].node.removeprefix("agent-"))


def started(stage: FaultStage) -> str:
    """A job that has trained a few steps, and all of whose processes are there: its chief waits for no other."""
    job = stage.submit_training(ENDLESS)
    stage.start_service()
    stage.wait_for_steps(15)
    stage.wait_until(lambda: pids(stage).keys() == stage.live_tasks(job).keys(), "the processes of all tasks")
    return job


def wait_for_second_attempt(stage: FaultStage) -> None:
    stage.wait_until(lambda: any(attempt > 0 for attempt, *_ in stage.diary()), "the second attempt")


def finished(stage: FaultStage, job: str, restarts: int, *others: FaultStage) -> None:
    """Checks that the job ends as without faults, and that the master knows no task that is not in the database."""
    stage.end_jobs()
    result = stage.wait_for_end(job).result
    assert result is not None
    assert result["restarts"] == restarts, stage.events(job)
    stage.check_trajectory()
    stage.check_no_unknown_task(*others)


@pytest.mark.usefixtures("patient_mesos")
def test_executors_outlive_their_agents_process(stage: FaultStage) -> None:
    job = started(stage)
    before = pids(stage)
    index = agent_of(stage, job, "worker:0")
    stage.cluster.kill_agent(index)
    stage.wait_for_steps(5)
    stage.cluster.restart_agent(index)
    stage.cluster.wait_for_agents()
    assert pids(stage) == before
    finished(stage, job, restarts=0)
    stage.wait_until_nothing_runs()


@pytest.mark.usefixtures("patient_mesos")
def test_a_task_that_ends_while_its_agent_is_away_has_ended_well(stage: FaultStage) -> None:
    job = started(stage)
    index = agent_of(stage, job, "worker:0")
    stage.cluster.kill_agent(index)
    stage.end_jobs()
    stage.wait_until(lambda: "worker:0" not in pids(stage), "the end of the chief")
    stage.cluster.restart_agent(index)
    finished(stage, job, restarts=0)
    stage.wait_until_nothing_runs()


def test_tasks_continue_while_the_master_is_away(stage: FaultStage) -> None:
    job = started(stage)
    before = pids(stage)
    stage.cluster.kill_master()
    stage.wait_for_steps(5)
    stage.cluster.restart_master()
    stage.cluster.wait_for_agents()
    assert pids(stage) == before
    finished(stage, job, restarts=0)
    stage.wait_until_nothing_runs()


def test_a_chief_whose_agent_is_gone_is_replaced_and_writes_no_more(stage: FaultStage) -> None:
    job = started(stage)
    index = agent_of(stage, job, "worker:0")
    ghost = stage.roles()["worker:0"]
    stage.cluster.kill_agent(index)
    # Its executor waits for the agent, and the chief knows nothing.
    assert is_alive(ghost)
    wait_for_second_attempt(stage)
    stage.wait_until(lambda: not is_alive(ghost), "the ghost's end")
    assert {task.node for task in stage.live_tasks(job).values()} == {f"agent-{1 - index}"}
    stage.wait_for_steps(5)
    finished(stage, job, restarts=1)
    logs = [path.read_text() for path in Path(stage.cluster.work_dir).rglob("stderr")]
    assert any("a later attempt, or another job, has taken over the checkpoint folder" in text for text in logs)


def test_an_agent_that_was_unreachable_comes_back_and_its_tasks_are_ended(stage: FaultStage) -> None:
    job = started(stage)
    index = agent_of(stage, job, "worker:0")
    there = [task for task in stage.live_tasks(job).values() if task.node == f"agent-{index}"]
    lost, executors = {task.task_id for task in there}, {task.executor_id for task in there}
    stage.cluster.kill_agent(index, signal.SIGSTOP)
    wait_for_second_attempt(stage)
    assert {task.state for task in stage.store.tasks(job_id=job) if task.task_id in lost} == {"unreachable"}
    stage.cluster.kill_agent(index, signal.SIGCONT)
    stage.wait_until(lambda: not lost & stage.known_to_master(), "the end of the tasks that came back")
    stage.wait_until(
        lambda: not any(one.environ().get("MESOS_EXECUTOR_ID") in executors for one in stage.executors()),
        "their processes",
    )
    finished(stage, job, restarts=1)
    stage.wait_until_nothing_runs()


def test_a_killed_executor_takes_its_process_along_and_the_job_starts_again(stage: FaultStage) -> None:
    job = started(stage)
    executor_id = stage.live_tasks(job)["ps:0"].executor_id
    (executor,) = [process for process in stage.executors() if process.environ()["MESOS_EXECUTOR_ID"] == executor_id]
    server = stage.roles()["ps:0"]
    executor.kill()
    stage.wait_until(lambda: not is_alive(server), "the ps' end")
    # The agent looks for ended executors now and then only.
    wait_for_second_attempt(stage)
    finished(stage, job, restarts=1)
    stage.wait_until_nothing_runs()


def test_offers_of_an_agent_that_vanishes_between_plan_and_launch(stage: FaultStage) -> None:
    job = stage.submit_training(ENDLESS)
    agent = stage.cluster.agents[0]
    stage.start_service(f"{agent.pid}:{agent.name}")
    stage.wait_for_steps(5)
    # Nothing has failed that would count: nothing had begun.
    finished(stage, job, restarts=0)
    # The agent itself is started again by the cluster, and may be used then.
    assert "dropped" in {task.state for task in stage.store.tasks(job_id=job) if task.node == "agent-0"}
    stage.wait_until_nothing_runs()


def test_an_offer_that_is_void_by_the_time_it_is_used(stage: FaultStage) -> None:
    job = stage.submit_training(ENDLESS)
    stage.start_service("decline")
    stage.wait_for_steps(5)
    finished(stage, job, restarts=0)
    assert "dropped" in {task.state for task in stage.store.tasks(job_id=job)}
    stage.wait_until_nothing_runs()


def test_two_frameworks_want_the_same_agents(stage: FaultStage, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    with FaultStage(stage.cluster, tmp_path / "other") as other:
        job = started(stage)
        second = other.submit_training(30)
        other.start_service()
        other.wait_until(lambda: other.job(second).waiting, "why the second job waits")
        assert other.diary() == []
        # The second job may have begun by the time that the end of the first is seen.
        finished(stage, job, 0, other)
        result = other.wait_for_end(second).result
        assert result is not None
        assert result["succeeded"]
        other.check_trajectory(30)


def test_slots_of_a_search_outlive_master_agents_and_service(
    stage: FaultStage, monkeypatch: pytest.MonkeyPatch
) -> None:
    search = stage.submit_search(("0.01", "0.02"), 10_000)
    stage.start_service()
    stage.wait_until(lambda: len(stage.trials()) == 2, "two trials")
    slots = {process.pid for process in stage.executors()}
    trials = {process.pid for process in stage.trials()}
    # The agents find the new master within three seconds, and it waits longer for them.
    stage.cluster.kill_master()
    be_patient(monkeypatch)
    stage.cluster.restart_master()
    stage.cluster.wait_for_agents()
    for index in range(2):
        stage.cluster.kill_agent(index)
        stage.cluster.restart_agent(index)
    stage.cluster.wait_for_agents()
    stage.kill_service()
    stage.start_service()
    steps = len(stage.trial_diary())
    stage.wait_until(lambda: len(stage.trial_diary()) > steps + 10, "more steps")
    assert {process.pid for process in stage.executors()} == slots
    assert {process.pid for process in stage.trials()} == trials
    stage.end_jobs()
    stage.wait_for_end(search)
    stage.check_trials()
    stage.check_no_unknown_task()
    stage.wait_until_nothing_runs()
