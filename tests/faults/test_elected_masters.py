"""Two real masters, elected by a real ZooKeeper: the leader is killed, and jobs continue under the other."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from dike.exceptions import DikeError
from framework.embedded.agents import AgentSpec
from framework.embedded.cluster import EmbeddedCluster
from framework.project import bundle
from framework.project.entry_point import find_entry_point
from framework.scheduler.mesos_access import MesosAccess
from framework.training.observer import JobObserver
from framework.training.run import RunRequest, run_training
from tests.embedded.embedded_support import leading_master
from tests.faults.fault_stage import ROOT, SCRIPTS, FaultStage
from tests.service.zookeeper_server import zookeeper_server
from tests.training.job_stage import profile
from tests.waiting import wait_until

pytestmark = [pytest.mark.mesos, pytest.mark.timeout(300)]

AGENT = AgentSpec(resources="cpus:2;mem:4096;disk:4096")
ENDLESS = 1_000_000


@pytest.fixture(scope="module")
def cluster() -> Iterator[EmbeddedCluster]:
    with zookeeper_server() as zookeeper, EmbeddedCluster([AGENT], zookeeper=f"zk://{zookeeper.hosts}/mesos") as ready:
        yield ready


@pytest.fixture
def stage(cluster: EmbeddedCluster, tmp_path: Path) -> Iterator[FaultStage]:
    cluster.restart_master()  # The one that an earlier test has killed.
    with FaultStage(cluster, tmp_path) as ready:
        yield ready


def leader(cluster: EmbeddedCluster) -> int | None:
    """Process of the master that leads; None while none does."""
    try:
        return cluster.master_pid
    except DikeError:
        return None


def active_frameworks(cluster: EmbeddedCluster) -> list[str]:
    return [one["id"] for one in cluster.state()["frameworks"] if one["active"]]


def pids(stage: FaultStage) -> dict[str, int]:
    return {name: process.pid for name, process in stage.roles().items()}


def kill_the_leader(stage: FaultStage) -> None:
    """Kills the leading master; tasks, processes and framework are the same under the next one."""
    cluster = stage.cluster
    stage.wait_until(lambda: len(pids(stage)) == len(stage.known_to_master()) > 1, "the processes of all tasks")
    first, frameworks = leader(cluster), active_frameworks(cluster)
    tasks, processes = stage.known_to_master(), pids(stage)
    assert len(frameworks) == 1
    cluster.kill_master()
    stage.wait_until(lambda: leader(cluster) not in (None, first), "the election of the other master")
    stage.wait_until(lambda: active_frameworks(cluster) == frameworks, "the subscription at the other master")
    cluster.wait_for_agents()
    stage.wait_until(lambda: stage.known_to_master() == tasks, "the tasks at the other master")
    stage.wait_for_steps(5)
    assert pids(stage) == processes


def test_the_next_master_is_waited_for(stage: FaultStage) -> None:
    cluster = stage.cluster
    before = leading_master(cluster)
    cluster.kill_master()
    # ZooKeeper names the dead master until its session expires.
    after = leading_master(cluster)
    assert (after.uri, after.host) == (before.uri, before.host)
    assert after.port != before.port
    cluster.wait_for_agents()
    assert [agent.name for agent in after.agents() or ()] == ["agent-0"]


def test_a_services_job_continues_under_the_next_master(stage: FaultStage) -> None:
    job = stage.submit_training(ENDLESS)
    stage.start_service()
    stage.wait_for_steps(5)
    kill_the_leader(stage)
    stage.end_jobs()
    result = stage.wait_for_end(job).result
    assert result is not None
    assert result["restarts"] == 0, stage.events(job)
    stage.check_trajectory()
    stage.check_no_unknown_task()


class FakeObserver(JobObserver):
    """Keeps the notes for the user."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def notify(self, text: str) -> None:
        self.texts.append(text)


def test_dike_run_continues_under_the_next_master(stage: FaultStage) -> None:
    entry = find_entry_point(SCRIPTS / "counting_job.py")
    request = RunRequest(
        entry=entry,
        archive=bundle.pack(entry.script, entry.folder),
        arguments=(str(ENDLESS), "0.05", str(stage.folder / "diary.txt")),
        profile=profile(),
        mesos=MesosAccess(master=stage.cluster.master),
        checkpoint_dir=str(stage.folder / "checkpoints"),
        max_workers=2,
        environment={"PYTHONPATH": f"{SCRIPTS}{os.pathsep}{ROOT}"},
    )

    def disturb() -> None:
        try:
            stage.wait_for_steps(5)
            kill_the_leader(stage)
        finally:
            stage.end_jobs()

    notes = FakeObserver()
    with ThreadPoolExecutor(1) as pool:
        disturbed = pool.submit(disturb)
        result = run_training(request, notes)
        disturbed.result()
    assert result.succeeded, result.failure
    assert result.restarts == 0
    assert "connected to the Mesos master again" in notes.texts
    stage.check_trajectory()
    wait_until(lambda: not active_frameworks(stage.cluster), "the framework's end")
