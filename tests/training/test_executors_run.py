"""Executors that tasks share, on a real Mesos; the executor's program is one that does nothing."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from executor.messages import Report
from framework.embedded.agents import AgentSpec
from framework.embedded.cluster import EmbeddedCluster
from framework.mesos import events
from framework.mesos.tasks import TaskState
from framework.scheduler.job import JobEntry
from framework.training.controller import TrainingJob
from framework.training.spec import JobTask
from tests.embedded.embedded_support import be_patient
from tests.scheduler.subscribed_stage import SubscribedStage
from tests.training.job_stage import FakeObserver, spec

pytestmark = pytest.mark.mesos
EXECUTOR = Path(__file__).parents[2] / "benchmarks" / "load" / "quick_executor.py"


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[EmbeddedCluster]:
    be_patient(monkeypatch)
    with EmbeddedCluster([AgentSpec("cpus:2;mem:8192;disk:4096")]) as started:
        yield started


class ExecutorsStage:
    """A job on one agent; its tasks run until they are killed."""

    def __init__(self, cluster: EmbeddedCluster, python: Path) -> None:
        self._cluster = cluster
        self.framework = SubscribedStage(cluster, "*")
        self.observer = FakeObserver()

        def make(handle: JobEntry) -> TrainingJob:
            return TrainingJob(spec(python=str(python), max_restarts=9), self.observer, lambda: None)

        job = self.framework.scheduler.admit("job", "ada", 0, make).job
        assert isinstance(job, TrainingJob)
        self.job = job

    def running(self) -> dict[str, JobTask]:
        """The tasks, once all of them run, and the job has made a step."""
        tasks = self.framework.until(self._running, "all tasks run")
        chief = tasks["worker:0"]
        report = Report(chief.task_id, {"type": "progress", "step": 1}).encode()
        self.framework.scheduler.handle(events.MessageArrived(chief.agent_id, chief.executor_id, report))
        return dict(tasks)

    def _running(self) -> dict[str, JobTask] | None:
        are_there = self.job.tasks and all(task.state is TaskState.RUNNING for task in self.job.tasks)
        return {task.name: task for task in self.job.tasks} if are_there else None

    def executors(self) -> list[psutil.Process]:
        found = []
        for process in psutil.Process(self._cluster.supervisor_pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                if str(EXECUTOR) in process.cmdline():
                    found.append(process)
        return found

    def used(self) -> dict[str, float]:
        """What Mesos has given away on the agent."""
        (agent,) = (self.framework.master.ask("/slaves") or {})["slaves"]
        return {name: round(agent["used_resources"][name], 3) for name in ("cpus", "mem")}

    def planned(self) -> dict[str, float]:
        total: Counter[str] = Counter()
        for task in self.job.tasks:
            total.update(cpus=task.planned.cpus, mem=task.planned.mem_mb)
        return {name: round(amount, 3) for name, amount in total.items()}


def test_tasks_come_and_go_in_one_executor_until_that_ends(cluster: EmbeddedCluster, tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" -I -S "{EXECUTOR}" forever\n')
    python.chmod(0o755)
    stage = ExecutorsStage(cluster, python)
    with contextlib.closing(stage.framework) as framework:
        first = stage.running()
        (executor,) = stage.executors()
        assert len(first) == 3
        assert stage.used() == stage.planned()

        # One that comes back joins the others.
        framework.driver.kill(first["worker:1"].task_id, first["worker:1"].agent_id)
        framework.until(lambda: first["worker:1"].state is TaskState.KILLED, "a worker's end")
        second = stage.running()
        assert second["worker:1"].task_id != first["worker:1"].task_id
        assert second["ps:0"] is first["ps:0"]
        assert {task.executor_id for task in second.values()} == {first["ps:0"].executor_id}
        assert stage.executors() == [executor]
        assert stage.used() == stage.planned()
        assert stage.job.result.restarts == 1

        # The executor ends: the job starts again.
        executor.kill()
        framework.until(lambda: stage.job.result.restarts == 2, "the executor's end")
        third = stage.running()
        assert [task.reason for task in second.values()] == ["REASON_EXECUTOR_TERMINATED"] * 3
        assert not {task.executor_id for task in third.values()} & {first["ps:0"].executor_id}
        assert len(stage.executors()) == 1
        assert stage.used() == stage.planned()

        # It ends just when a worker is to join.
        framework.driver.kill(third["worker:1"].task_id, third["worker:1"].agent_id)
        framework.until(lambda: third["worker:1"].state is TaskState.KILLED, "a worker's end")
        (agent,) = (psutil.Process(agent.pid) for agent in cluster.agents)
        agent.send_signal(signal.SIGSTOP)
        stage.executors()[0].kill()
        late = framework.until(lambda: _late(stage.job), "a launch into an executor that has ended")
        agent.send_signal(signal.SIGCONT)
        framework.until(lambda: late.state.is_terminal(), "Mesos says so")
        assert late.missed_executor
        fourth = stage.running()
        # Worker and executor.
        assert stage.job.result.restarts == 4
        assert not {task.executor_id for task in fourth.values()} & {late.executor_id}

        # It ends with its last task.
        framework.scheduler.cancel()
        framework.until(lambda: framework.scheduler.done, "the job's end")
        framework.until(lambda: not stage.executors(), "the executor's end")
        framework.until(lambda: set(stage.used().values()) == {0.0}, "all is free")


def _late(job: TrainingJob) -> JobTask | None:
    return next((task for task in job.tasks if task.joined and task.state is TaskState.STAGING), None)
