"""An elastic job with a fake Mesos and fake slots, which follow their orders unless a test prevents it."""

from __future__ import annotations

import dataclasses
from typing import Any

from dike.profile import Api, ModelProfile
from executor.elastic_messages import ElasticStatus, ProcessEnd, WantedProcess, decode_wanted
from executor.messages import LaunchOrder, Outcome, Report
from framework.mesos import events
from framework.scheduler.demand import Demand
from framework.scheduler.offer_pool import SETTLE_S
from framework.training.elastic.autoscaler import MIN_SPEED_WINDOW_S, SPEED_WARM_UP_S
from framework.training.elastic.resizer import OFFER_TIMEOUT_S
from framework.training.spec import JobSpec, JobTask, Resize
from solver.choices import Strategy
from solver.settings import PlanSettings
from tests.training.job_stage import FakeObserver, JobStage, profile, spec

INTERVAL_S = 10.0
TERMINATED = 143
TOTAL_STEPS = 10_000


def heavy(api: Api = Api.KERAS, synchronous: bool = False) -> ModelProfile:
    """A model of which two workers train twice as much as one."""
    return dataclasses.replace(
        profile(api, synchronous),
        flops_forward_per_sample=1e9,
        flops_step_per_sample=3e9,
        longest_path_flops=1e9,
    )


def elastic(least: int = 1, most: int = 4, **changes: Any) -> JobSpec:
    values = {"profile": heavy(), "max_workers": None, "elastic": (least, most), "stragglers": "replace", **changes}
    return spec(resize_interval_s=INTERVAL_S, **values)


SHARED = dataclasses.replace(heavy(Api.KERAS), why_not_split="")
"""A model whose workers can share each batch."""


def elastic_gang(least: int = 1, most: int = 4, strategy: Strategy = "auto", **changes: Any) -> JobSpec:
    """A job without parameter servers: one task, or several workers."""
    return elastic(least, most, **{"profile": SHARED, "planning": PlanSettings(strategy=strategy), **changes})


class FakeElasticObserver(FakeObserver):
    def __init__(self) -> None:
        super().__init__()
        self.reasons: list[str] = []
        self.resizes: list[Resize] = []

    def resizing(self, workers: int, ps: int, reason: str) -> None:
        self.reasons.append(reason)

    def resized(self, resize: Resize) -> None:
        self.resizes.append(resize)


@dataclasses.dataclass
class FakeSlot:
    """What an executor would know."""

    order: LaunchOrder
    status: ElasticStatus
    ran: list[int] = dataclasses.field(default_factory=list)

    def obey(self, wanted: WantedProcess) -> None:
        status = self.status
        if wanted.number < status.number:
            return
        ends = tuple(end for end in status.ends if end.attempt not in wanted.acknowledged_ends)
        attempt = None if wanted.task is None else wanted.task.attempt
        if status.attempt is not None and status.attempt != attempt:
            ends = (*ends, ProcessEnd(status.attempt, Outcome(TERMINATED, {}, "", "/sandbox")))
        if attempt is not None and attempt != status.attempt:
            assert attempt not in self.ran, "an attempt was started twice"
            self.ran.append(attempt)
        self.status = dataclasses.replace(status, number=wanted.number, attempt=attempt, ends=ends)


class ElasticStage(JobStage):
    """Adds slots to a `JobStage`."""

    def __init__(self, job_spec: JobSpec) -> None:
        super().__init__(job_spec)
        self.demand: Demand | None = None
        self.observer: FakeElasticObserver = FakeElasticObserver()
        self.slots: dict[str, FakeSlot] = {}
        self.deaf: set[str] = set()
        self._heard = 0
        self.begin(job_spec, demand=lambda own: self.demand)
        self.subscribe()

    @property
    def chief(self) -> JobTask:
        tasks = {task.name: task for task in self.job.tasks}
        return tasks.get("chief:0") or tasks["worker:0"]

    def start_training(self, agents: int = 1, step: int = 0) -> dict[str, JobTask]:
        """Starts the job on `agents` agents of 2 CPUs and trains until its speed is known."""
        self.start(agents)
        self.make_slots()
        self.total(TOTAL_STEPS)
        self.train(step)
        return {task.name: task for task in self.job.tasks}

    def train(self, step: int, seconds: float = SPEED_WARM_UP_S + MIN_SPEED_WINDOW_S + 1.0) -> int:
        """Makes a step in each tenth of a second from this one on, and saves the last one."""
        for number in range(round(seconds * 10)):
            self.now += 0.1
            self.step(self.chief, step + number + 1)
            self.scheduler.tick()
        last = step + round(seconds * 10)
        self.save(last)
        return last

    def save(self, step: int) -> None:
        self.say(self.chief, Report(self.chief.task_id, {"type": "checkpoint", "path": "p", "step": step}))

    def total(self, steps: int) -> None:
        self.say(self.chief, Report(self.chief.task_id, {"type": "total", "steps": steps}))

    def resume(self, step: int) -> None:
        self.say(self.chief, Report(self.chief.task_id, {"type": "resumed", "step": step}))

    def make_slots(self) -> list[FakeSlot]:
        """Plays the slots of what was launched and has none yet."""
        made = []
        for info in self.mesos.accepted:
            task_id = info["task_id"]["value"]
            if task_id not in self.slots:
                order = LaunchOrder.decode(info["data"])
                attempt = None if order.standby else order.task.attempt
                ran = [] if attempt is None else [attempt]
                self.slots[task_id] = FakeSlot(order, ElasticStatus(task_id, 0, True, attempt), ran)
                made.append(self.slots[task_id])
        return made

    def obey(self) -> None:
        """Lets all slots but the deaf ones follow the orders since the last call, and report their status."""
        messages, self._heard = self.mesos.messages[self._heard :], len(self.mesos.messages)
        for task_id, data in messages:
            wish = decode_wanted(data)
            # Nothing runs in them that has written anything.
            if task_id not in self.deaf and isinstance(wish, WantedProcess):
                self.slots[task_id].obey(wish)
                self.report(task_id)

    def report(self, task_id: str) -> None:
        executor_id = self.mesos.executor_of(task_id)
        self.scheduler.handle(events.MessageArrived("S0", executor_id, self.slots[task_id].status.encode()))

    def round(self, seconds: float = 0.1) -> None:
        """A moment passes and everybody does what is due."""
        self.wait(seconds)
        self.obey()
        self.scheduler.tick()

    def look(self, *offers: dict[str, Any]) -> None:
        """The interval passes; if the job then asks for offers it gets these, and decides."""
        waited_s = 0.0
        while self.mesos.calls[-1] != "revive" and waited_s < 2 * INTERVAL_S:
            self.wait(0.5)
            waited_s += 0.5
        if self.mesos.calls[-1] == "revive":
            self.offer(*offers)
            self.wait(SETTLE_S + 0.1)
            # Without offers, the job continues only after a timeout.
            self.wait(OFFER_TIMEOUT_S)

    def get_ready(self) -> list[JobTask]:
        """What was launched beside the job gets ready."""
        made = self.make_slots()
        tasks = [self.launched[slot.status.task_id] for slot in made]
        for task in tasks:
            self.update(task, "TASK_RUNNING")
        self.round()
        return tasks

    def change(self, step: int, rounds: int = 6) -> None:
        """Completes a change in progress; the next attempt resumes at the step."""
        self.save(step)
        for _ in range(rounds):
            self.round()
        self.resume(step)
        self.step(self.chief, step + 1)

    @property
    def running(self) -> dict[str, int | None]:
        """Running tasks without addresses: role and index -> attempt in the slot's status."""
        return {
            task.name: self.slots[task.task_id].status.attempt
            for task in self.job.tasks
            if not task.state.is_terminal()
        }
