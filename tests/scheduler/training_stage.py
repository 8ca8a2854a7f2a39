"""Real training jobs at a scheduler, on a fake cluster with fake slots."""

from __future__ import annotations

from collections.abc import Mapping

from executor.elastic_messages import ElasticStatus, WantedProcess
from executor.messages import LaunchOrder, Report
from framework.mesos import events
from framework.scheduler.job import JobEntry
from framework.scheduler.job_sizes import JobSizes
from framework.service.serve import agents_for
from framework.training.controller import TrainingJob
from framework.training.planning import TrainingSizing
from framework.training.spec import JobSpec, JobTask
from tests.scheduler.scheduler_stage import STEP_S, SchedulerStage
from tests.training.elastic.elastic_stage import FakeElasticObserver, FakeSlot
from tests.training.job_stage import ended


class TrainingStage:
    """Jobs train while time passes, each worker as much as any other, with a checkpoint after each step.

    Args:
        agents: agent -> CPUs.
        allocation: the policy by which elastic jobs share; None: each decides for itself.
        interval_s: from one round to the next.
        weight: user -> weight; 1 for others.
        sample_runs: at how many other sizes jobs are measured first.
    """

    def __init__(
        self,
        agents: Mapping[str, float],
        allocation: str | None = None,
        interval_s: float = 60.0,
        weight: Mapping[str, float] | None = None,
        sample_runs: int = 0,
    ) -> None:
        weights = dict(weight or {})
        job_sizes = None
        if allocation is not None:
            job_sizes = JobSizes(allocation, interval_s, lambda user: weights.get(user, 1.0), sample_runs)
        self.stage = SchedulerStage(agents, weight=weights, job_sizes=job_sizes)
        self.observer = FakeElasticObserver()
        self.observers: dict[str, FakeElasticObserver] = {}
        self.training: dict[str, TrainingJob] = {}
        self.slots: dict[str, FakeSlot] = {}
        self.steps: dict[str, float] = {}
        self._totals: dict[str, int] = {}
        self._attempts: dict[str, int] = {}
        self._heard = self._ended = 0

    def admit(self, job_spec: JobSpec, number: int, *, user: str = "", steps: int | None = None) -> TrainingJob:
        """Submits a job.

        Args:
            job_spec: the job.
            number: order of arrival.
            user: the owner; empty: a user with this job only.
            steps: how long it trains; None: only as a test says.
        """
        job_id = job_spec.job_id
        observer = self.observers[job_id] = self.observer if steps is None else FakeElasticObserver()

        def make(handle: JobEntry) -> TrainingJob:
            handle.sizing = TrainingSizing(job_spec)
            all_agents = agents_for(self.stage.directory, ())
            return TrainingJob(job_spec, observer, all_agents, lambda: self.stage.master.now, patient=True)

        job = self.stage.scheduler.admit(job_id, user or job_id, number, make).job
        assert isinstance(job, TrainingJob)
        self.training[job_id] = job
        if steps is not None:
            self.steps[job_id], self._totals[job_id] = 0.0, steps
        return job

    def run(self, seconds: float) -> None:
        """Advances the time: slots follow their orders, killed tasks end, jobs train."""
        stage = self.stage
        for _ in range(round(seconds / STEP_S)):
            stage.step()
            for info in stage.master.accepted:
                task_id, order = info["task_id"]["value"], LaunchOrder.decode(info["data"])
                if order.elastic and task_id not in self.slots:
                    attempt = None if order.standby else order.task.attempt
                    status = ElasticStatus(task_id, 0, True, attempt)
                    self.slots[task_id] = FakeSlot(order, status, [] if attempt is None else [attempt])
                    self._tell(task_id)
            messages, self._heard = stage.master.messages[self._heard :], len(stage.master.messages)
            for task_id, data in messages:
                self.slots[task_id].obey(WantedProcess.decode(data))
                self._tell(task_id)
            killed, self._ended = stage.master.killed[self._ended :], len(stage.master.killed)
            for task_id in killed:
                stage.update(task_id, "TASK_KILLED")
            for job_id in self.steps:
                self._train(job_id, self.training[job_id])

    def report(self, job: TrainingJob, **content: object) -> None:
        """The job's chief says something."""
        chief = _chief(job)
        assert chief is not None
        report = Report(chief.task_id, content).encode()
        self.stage.scheduler.handle(events.MessageArrived(chief.agent_id, chief.executor_id, report))

    def workers(self, job_id: str) -> int:
        """How many workers of a job train or are getting ready to."""
        return sum(task.planned.role == "worker" for task in self.training[job_id].tasks)

    @property
    def sizes(self) -> list[int]:
        """Workers of each job, in the order of arrival."""
        return [self.workers(job_id) for job_id in self.training]

    def _tell(self, task_id: str) -> None:
        executor_id = self.stage.master.executor_of(task_id)
        self.stage.scheduler.handle(events.MessageArrived("S0", executor_id, self.slots[task_id].status.encode()))

    def _train(self, job_id: str, job: TrainingJob) -> None:
        chief = _chief(job)
        if chief is None or chief.task_id not in self.slots or chief.task_id not in self.stage.master.running:
            return
        attempt = self.slots[chief.task_id].status.attempt
        if attempt is None:
            return
        if self._attempts.get(job_id) != attempt:
            self._attempts[job_id] = attempt
            self.report(job, type="total", steps=self._totals[job_id])
            self.report(job, type="resumed", step=int(self.steps[job_id]))
        self.steps[job_id] += self.workers(job_id) * STEP_S
        step = int(self.steps[job_id])
        self.report(job, type="progress", step=step, loss=1.0)
        self.report(job, type="checkpoint", path="p", step=step)
        if step >= self._totals[job_id]:
            for task in job.tasks:
                has_script = task is chief or task.planned.is_plain
                if task.task_id in self.stage.master.running and has_script:
                    self.stage.update(
                        task.task_id, "TASK_FINISHED", task.agent_id, data=ended(0).encode(), source="SOURCE_EXECUTOR"
                    )


def _chief(job: TrainingJob) -> JobTask | None:
    tasks = {task.name: task for task in job.tasks}
    return tasks.get("chief:0") or tasks.get("worker:0")
