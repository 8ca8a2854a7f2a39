"""A training job with a played Mesos and a clock that is moved by hand; the planner is real."""

from __future__ import annotations

from typing import Any

from dike.profile import Api, ModelProfile
from executor.messages import LogChunk, Outcome, Report
from framework import events
from framework.gathering import SETTLE_S
from framework.job import JobSpec, JobTask
from framework.observer import JobObserver
from framework.training import TrainingJob
from solver import NodeClass
from tests.framework.played_mesos import PlayedMesos
from tests.profiles import made_up_profile

GIB = 2**30


def profile(api: Api = Api.GRAPH, synchronous: bool = False) -> ModelProfile:
    return made_up_profile({"w": (100, 100)}, api=api, flops=6e5, batch_size=64, synchronous=synchronous)


def spec(**changes: Any) -> JobSpec:
    values: dict[str, Any] = {
        "job_id": "job",
        "script": "train.py",
        "arguments": (),
        "profile": profile(),
        "checkpoint_dir": "/checkpoints",
        "bundle_url": "http://127.0.0.1:1/bundle/token",
        "python": "python3",
        "max_workers": 2,
        "max_restarts": 2,
    }
    return JobSpec(**{**values, **changes})


class Watcher(JobObserver):
    def __init__(self) -> None:
        self.waits: list[str] = []
        self.restarts: list[str] = []
        self.notes: list[str] = []
        self.output = b""

    def waiting(self, reason: str) -> None:
        self.waits.append(reason)

    def restarting(self, reason: str, restart: int, limit: int) -> None:
        self.restarts.append(reason)

    def note(self, text: str) -> None:
        self.notes.append(text)

    def log(self, task: JobTask, chunk: LogChunk) -> None:
        self.output += chunk.data


class Stage:
    """A job with a played Mesos and a clock that is moved by hand."""

    def __init__(self, job_spec: JobSpec, all_agents: list[NodeClass] | None = None) -> None:
        self.now = 1000.0
        self.mesos = PlayedMesos()
        self.watcher = Watcher()
        self.job = TrainingJob(job_spec, self.mesos, self.watcher, lambda: all_agents, lambda: self.now)
        self.job.handle(events.Subscribed("F", "127.0.0.1:5050"))

    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.job.tick()

    def offer(self, *offers: dict[str, Any]) -> None:
        self.job.handle(events.OffersArrived(offers))

    def start(self, agents: int = 1) -> dict[str, JobTask]:
        self.offer(*(self.mesos.offer(agent) for agent in range(agents)))
        self.wait(SETTLE_S + 0.1)
        for task in self.job.tasks:
            self.update(task, "TASK_RUNNING")
        return {task.name: task for task in self.job.tasks}

    def job_task(self, task_id: str) -> JobTask:
        return self.job.all_tasks[task_id]

    def update(self, task: JobTask, state: str, outcome: Outcome | None = None, **more: Any) -> None:
        status = {
            "task_id": {"value": task.task_id},
            "agent_id": {"value": task.agent_id},
            "state": state,
            "source": "SOURCE_EXECUTOR",
            **more,
        }
        if outcome is not None:
            status["data"] = outcome.encode()
        self.job.handle(events.StatusUpdate(status))

    def say(self, task: JobTask, message: LogChunk | Report) -> None:
        self.job.handle(events.MessageArrived(task.agent_id, task.task_id, message.encode()))

    def step(self, task: JobTask, step: int, loss: float = 1.0) -> None:
        self.say(task, Report(task.task_id, {"type": "progress", "step": step, "loss": loss}))

    def rates(self, task: JobTask, workers: dict[int, float]) -> None:
        content = {"type": "rates", "workers": {str(index): rate for index, rate in workers.items()}}
        self.say(task, Report(task.task_id, content))

    def end_killed(self) -> None:
        """Every task that was asked to end does so."""
        for task in self.job.all_tasks.values():
            if task.task_id in self.mesos.killed and not task.state.is_terminal():
                self.update(task, "TASK_KILLED")
        self.wait(0.1)


def ended(exit_code: int, log_bytes: dict[str, int] | None = None) -> Outcome:
    return Outcome(exit_code, log_bytes or {}, "the tail", "/sandbox")
