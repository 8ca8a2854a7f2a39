"""A training job with a fake Mesos and a clock that is moved by hand; the planner is real."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any

from dike.profile import Api, ModelProfile
from executor.messages import LogChunk, Outcome, Report
from framework.mesos import events
from framework.mesos.tasks import TaskState
from framework.scheduler.job import JobEntry
from framework.scheduler.journal import Journal
from framework.scheduler.offer_pool import SETTLE_S, OfferPool
from framework.scheduler.records import TaskRecord
from framework.scheduler.scheduler import Scheduler
from framework.training.controller import TrainingJob
from framework.training.observer import JobObserver
from framework.training.spec import JobSpec, JobTask
from solver import NodeClass
from solver.settings import PlanSettings
from tests.mesos.fake_mesos import FakeMesos
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
        # With parameter servers, whatever one plain task would be worth.
        "planning": PlanSettings(strategy="ps"),
        "max_workers": 2,
        "max_restarts": 2,
    }
    return JobSpec(**{**values, **changes})


class FakeObserver(JobObserver):
    def __init__(self) -> None:
        self.waits: list[str] = []
        self.restarts: list[str] = []
        self.notes: list[str] = []
        self.output = b""

    def waiting(self, reason: str) -> None:
        self.waits.append(reason)

    def restarting(self, reason: str, restart: int, limit: int) -> None:
        self.restarts.append(reason)

    def notify(self, text: str) -> None:
        self.notes.append(text)

    def log(self, task: JobTask, chunk: LogChunk) -> None:
        self.output += chunk.data


class JobStage:
    """A job at a scheduler of its own, with a fake Mesos and a clock that is moved by hand.

    Args:
        job_spec: the job.
        all_agents: what Mesos' list of agents says.
        own_agents: number of the agents, if no other framework uses them.
    """

    def __init__(
        self, job_spec: JobSpec, all_agents: list[NodeClass] | None = None, own_agents: int | None = None
    ) -> None:
        self.now = 1000.0
        self._own_agents = own_agents
        self.job_spec = job_spec
        self.mesos = FakeMesos()
        self.observer = FakeObserver()
        self.scheduler: Scheduler
        self.job: TrainingJob
        self.begin(job_spec, all_agents=lambda: all_agents)
        self.subscribe()

    def begin(
        self,
        job_spec: JobSpec,
        state: Mapping[str, Any] | None = None,
        launched: Collection[str] | None = None,
        **more: Any,
    ) -> None:
        """Starts the job in a new scheduler, or continues it there.

        Args:
            job_spec: the job.
            state: how the scheduler before this one has left it.
            launched: those of its tasks that may still run; None: all that the state has.
            more: further arguments of `TrainingJob`.
        """
        tasks = [
            TaskRecord(
                task["task_id"],
                "job",
                task["agent_id"],
                task["node"],
                task["host"],
                "",
                task["state"],
                executor_id=task["executor_id"],
            )
            for task in (state or {"tasks": ()})["tasks"]
            if not TaskState(task.get("state", "lost")).is_terminal()
            and (launched is None or task["task_id"] in launched)
        ]

        def make(handle: JobEntry) -> TrainingJob:
            self.job = TrainingJob(
                job_spec,
                self.observer,
                clock=lambda: self.now,
                state=state,
                launched=None if state is None else handle.tasks.keys(),
                **{"all_agents": lambda: None, **more},
            )
            return self.job

        scheduler = Scheduler(
            self.mesos,
            journal=Journal(),
            log=lambda text: None,
            ended=lambda handle: None,
            failed=_fails,
            clock=lambda: self.now,
            pool=OfferPool(self._own_agents),
        )
        scheduler.admit("job", "user", 1, make, tasks=tasks)
        self.scheduler = scheduler

    def written_state(self) -> Any:
        """The job's state as the database gives it back."""
        return json.loads(json.dumps(self.job.to_state(), allow_nan=False))

    def take_over(self, job_spec: JobSpec, launched: Collection[str] | None = None) -> None:
        """The service ends without a word, and another one takes its place."""
        self.begin(job_spec, self.written_state(), launched)
        self.subscribe()

    def handle(self, event: events.Event) -> None:
        """An event comes, and the scheduler goes round."""
        self.scheduler.handle(event)
        self.scheduler.tick()

    def subscribe(self, master_age_s: float | None = None) -> None:
        self.scheduler.handle(events.Subscribed("F", "127.0.0.1:5050", master_age_s))

    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.scheduler.tick()

    def offer(self, *offers: dict[str, Any]) -> None:
        self.scheduler.handle(events.OffersArrived(offers))

    def start(self, agents: int = 1) -> dict[str, JobTask]:
        self.offer(*(self.mesos.offer(agent) for agent in range(agents)))
        self.wait(SETTLE_S + 0.1)
        for task in self.job.tasks:
            self.update(task, "TASK_RUNNING")
        return {task.name: task for task in self.job.tasks}

    @property
    def launched(self) -> dict[str, JobTask]:
        """All tasks of the attempt by id, those that are getting ready included."""
        return self.job._run.tasks

    @property
    def new_tasks(self) -> list[JobTask]:
        """Those that are getting ready: the training does not use them yet."""
        return [task for task in self.launched.values() if not task.member]

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
        self.handle(events.StatusUpdate(status))

    def say(self, task: JobTask, message: LogChunk | Report) -> None:
        self.scheduler.handle(events.MessageArrived(task.agent_id, task.executor_id, message.encode()))

    def step(self, task: JobTask, step: int, loss: float = 1.0) -> None:
        self.say(task, Report(task.task_id, {"type": "progress", "step": step, "loss": loss}))

    def rates(self, task: JobTask, workers: dict[int, float]) -> None:
        content = {"type": "rates", "workers": {str(index): rate for index, rate in workers.items()}}
        self.say(task, Report(task.task_id, content))

    def end_killed(self) -> None:
        """Every task that was asked to end does so."""
        for task in list(self.launched.values()):
            if task.task_id in self.mesos.killed and not task.state.is_terminal():
                self.update(task, "TASK_KILLED")
        self.wait(0.1)


def _fails(handle: JobEntry, error: Exception) -> None:
    raise error


def ended(exit_code: int, log_bytes: dict[str, int] | None = None) -> Outcome:
    return Outcome(exit_code, log_bytes or {}, "the tail", "/sandbox")
