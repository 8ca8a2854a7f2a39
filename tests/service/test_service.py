"""A service with a real database, a fake Mesos and its own clock: jobs start, run, end; the service restarts."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dike.exceptions import BadInputError
from executor.messages import LaunchOrder, LogChunk
from framework.mesos import events
from framework.mesos.connection import FrameworkRemovedError
from framework.mesos.tasks import TaskState
from framework.scheduler.offer_pool import SETTLE_S
from framework.scheduler.records import JobRecord, JobState, TaskRecord
from framework.scheduler.task_tracker import NOT_NEEDED
from framework.search.records import Parameter, SearchSpec
from framework.service import service as service_module
from framework.service import submission
from framework.service.requests import read_request, search_request
from framework.service.service import Service
from framework.service.store import ServiceStore
from framework.service.submission import Submissions
from solver.network import Network
from tests.mesos.fake_mesos import FakeMesos
from tests.service.api_stage import BUNDLE, training
from tests.service.fake_context import fake_context
from tests.training.job_stage import ended
from tests.waiting import wait_until

END = {"worker:0": "TASK_FINISHED", "ps:0": "TASK_KILLED"}


class ServiceStage:
    """Services one after the other on one database."""

    def __init__(self, folder: Path) -> None:
        self.store = ServiceStore(f"sqlite:///{folder}/service.db")
        self.mesos = FakeMesos()
        self.inbox: Any = events.EventScheduler().events
        self.services: list[Service] = []
        self.start()

    def start(self, checkpoint_root: str = "/checkpoints", **changes: Any) -> None:
        """Another service takes the place of the one before, which has ended without a word."""
        around = dataclasses.replace(fake_context(self.store, checkpoint_root), **changes)
        self.mesos = FakeMesos()
        self.service = Service(around, self.mesos)
        self.services.append(self.service)
        self.service.handle(events.Subscribed("F-1", "127.0.0.1:5050", 1e6))
        self.service.tick()

    def submit(self, **changes: Any) -> str:
        request = read_request(training(**changes))
        job_id = Submissions(self.store, self.inbox).submit(request, BUNDLE, "ann").id
        self.deliver()
        return job_id

    def submit_search(self) -> str:
        spec = SearchSpec(
            name="search",
            script="train.py",
            arguments=(),
            flags={"lr": "--lr"},
            space=(Parameter("lr", choices=(0.1, 0.2)),),
            sampler="grid",
            trial_count=2,
        )
        job_id = Submissions(self.store, self.inbox).submit(search_request(spec, spec.script, ()), BUNDLE, "ann").id
        self.deliver()
        return job_id

    def deliver(self) -> None:
        while not self.inbox.empty():
            self.service.handle(self.inbox.get())
        self.service.tick()

    def wait_until_written(self) -> None:
        """What the service has buffered is in the database."""
        self.service._write()

    def kill(self, job_id: str, user: str = "") -> None:
        Submissions(self.store, self.inbox).kill(self.job(job_id), user)
        self.deliver()

    def job(self, job_id: str) -> JobRecord:
        record = self.store.job(job_id)
        assert record is not None
        return record

    def live(self, job_id: str) -> list[TaskRecord]:
        return self.store.tasks(job_id=job_id, live_only=True)

    def offer_until(self, condition: Callable[[], object], cpus: float = 8.0) -> None:
        """Sends offers until the condition holds."""
        offered_s = -math.inf

        def offer(pause_s: float) -> None:
            nonlocal offered_s
            if time.monotonic() - offered_s > 2 * SETTLE_S:
                self.service.handle(events.OffersArrived((self.mesos.offer(0, cpus=cpus, mem=65536),)))
                offered_s = time.monotonic()
            time.sleep(pause_s)
            self.service.tick()

        wait_until(condition, "what needs offers", pause=offer)

    def run(self, job_id: str) -> list[TaskRecord]:
        """The job gets its tasks, and they run."""
        self.offer_until(lambda: self.live(job_id))
        # Parameter servers end when the workers have.
        tasks = sorted(self.live(job_id), key=lambda task: task.name, reverse=True)
        for task in tasks:
            self.update(task, "TASK_RUNNING")
        return tasks

    def finish(self, tasks: list[TaskRecord]) -> None:
        for task in tasks:
            self.update(task, END[task.name])

    def update(self, task: TaskRecord, state: str, **more: Any) -> dict[str, Any]:
        status = {
            "task_id": {"value": task.task_id},
            "agent_id": {"value": task.agent_id},
            "state": state,
            "source": "SOURCE_EXECUTOR",
            **more,
        }
        if TaskState.of(state).is_terminal():
            status.setdefault("data", ended(0 if state == "TASK_FINISHED" else 1).encode())
        self.service.handle(events.StatusUpdate(status))
        self.service.tick()
        return status


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[ServiceStage]:
    made = ServiceStage(tmp_path)
    with contextlib.closing(made.store):
        yield made
        for service in made.services:
            service.cancel()


@pytest.mark.slow
def test_a_name_that_is_free_again_brings_no_checkpoints_of_its_first_job(
    stage: ServiceStage, monkeypatch: pytest.MonkeyPatch
) -> None:
    tasks = []
    for submitted_s in (1.7e9, 1.8e9):
        with monkeypatch.context() as patch:
            patch.setattr(submission, "time", types.SimpleNamespace(time=lambda now_s=submitted_s: now_s))
            assert stage.submit(name="mnist") == "mnist"
        stage.finish(stage.run("mnist"))
        assert stage.job("mnist").state is JobState.FINISHED
        assert stage.store.delete_jobs(ended_before_s=1e12) == 1
        tasks.append(LaunchOrder.decode(stage.mesos.accepted[-1]["data"]).task)
    first, second = tasks
    assert (first.job_id, first.checkpoint_dir) == ("mnist-20231114-221320", "/checkpoints/mnist-20231114-221320")
    assert (second.job_id, second.checkpoint_dir) == ("mnist-20270115-080000", "/checkpoints/mnist-20270115-080000")
    assert stage.mesos.accepted[-1]["task_id"]["value"].startswith("mnist.")


@pytest.mark.slow
def test_a_job_is_queued_then_runs_then_is_queued_again_then_ends(stage: ServiceStage) -> None:
    job_id = stage.submit()
    assert stage.job(job_id).state is JobState.QUEUED
    tasks = stage.run(job_id)
    first = stage.job(job_id)
    assert first.state is JobState.RUNNING
    assert first.started_s is not None
    for task in tasks:
        stage.update(task, "TASK_LOST")
    assert stage.job(job_id).state is JobState.QUEUED
    again = stage.run(job_id)
    assert not {task.task_id for task in again} & {task.task_id for task in tasks}
    assert (stage.job(job_id).state, stage.job(job_id).started_s) == (JobState.RUNNING, first.started_s)
    stage.finish(again)
    last = stage.job(job_id)
    assert last.state is JobState.FINISHED
    assert last.result is not None
    assert (last.result["restarts"], stage.live(job_id)) == (1, [])


@pytest.mark.slow
def test_a_job_that_waits_is_killed_at_once_and_one_that_runs_when_its_tasks_have_ended(stage: ServiceStage) -> None:
    waits, runs = stage.submit(), stage.submit()
    stage.kill(waits)
    assert stage.job(waits).state is JobState.KILLED
    tasks = stage.run(runs)
    stage.kill(runs)
    assert stage.job(runs).state is JobState.ENDING
    assert sorted(stage.mesos.killed) == sorted(task.task_id for task in tasks)
    stage.start()
    assert stage.job(runs).state is JobState.ENDING
    # Each more than once if the start took some seconds.
    assert set(stage.mesos.killed) == {task.task_id for task in tasks}
    for task in tasks:
        stage.update(task, "TASK_KILLED")
    assert stage.job(runs).state is JobState.KILLED
    for one in (waits, runs):
        ended_s = stage.job(one).ended_s
        stage.kill(one)
        assert stage.job(one).ended_s == ended_s, "a job that has ended was ended again"


@pytest.mark.slow
def test_jobs_are_planned_with_what_the_service_knows_of_the_network(stage: ServiceStage) -> None:
    speeds = []
    for network in (None, Network(within_node_gbps=0.001)):
        stage.start(network=network)
        job_id = stage.submit(strategy="ps", max_workers=1)
        stage.finish(stage.run(job_id))
        result = stage.job(job_id).result
        assert result is not None
        speeds.append(result["plan"]["samples_per_s"])
    assert speeds[1] < speeds[0] / 2


def test_who_has_killed_a_job_is_told(stage: ServiceStage) -> None:
    runs = stage.submit()
    tasks = stage.run(runs)
    waits, search = stage.submit(), stage.submit_search()
    for job_id in (waits, search, runs):
        stage.kill(job_id, "eve")
        stage.kill(job_id, "bob")
    for task in tasks:
        stage.update(task, "TASK_KILLED", message="killed on request")
    for job_id in (waits, runs, search):
        assert (stage.job(job_id).state, stage.job(job_id).failure) == (JobState.KILLED, "killed by eve")
        notes = [event.text for event in stage.store.history.events(job_id) if event.kind == "note"]
        assert notes == ["kill requested by eve"]
    assert {task.message for task in stage.store.tasks(job_id=runs)} == {"killed on request"}


@pytest.mark.slow
def test_a_task_that_is_ended_with_its_job_was_not_asked_for_by_anybody(stage: ServiceStage) -> None:
    job_id = stage.submit()
    tasks = stage.run(job_id)
    for task in tasks:
        if task.name.startswith("worker"):
            stage.update(task, "TASK_FINISHED")
        else:
            stage.update(task, "TASK_KILLING")
            stage.update(task, "TASK_KILLED", message="killed on request")
    assert stage.job(job_id).state is JobState.FINISHED
    found = {task.name: task for task in stage.store.tasks(job_id=job_id)}
    assert found["ps:0"].message == NOT_NEEDED
    assert found["ps:0"].resources["ports"] == 1


@pytest.mark.slow
def test_an_end_is_written_down_before_it_is_acknowledged(stage: ServiceStage) -> None:
    """Of the updates of a job's end any may be the last that a service takes in."""
    job_id = stage.submit()
    for task in stage.run(job_id):
        status = stage.update(task, END[task.name])
        assert status in stage.mesos.acknowledged
        stage.start()
        stage.service.handle(events.StatusUpdate(status))
        stage.service.tick()
        assert status in stage.mesos.acknowledged, "one that comes again is acknowledged again"
    last = stage.job(job_id)
    assert last.state is JobState.FINISHED
    assert last.result is not None
    assert last.result["restarts"] == 0


@pytest.mark.slow
def test_the_end_of_the_output_is_written_down_before_the_end_is_acknowledged(
    stage: ServiceStage, monkeypatch: pytest.MonkeyPatch
) -> None:
    job_id = stage.submit()
    [worker] = [task for task in stage.run(job_id) if task.name == "worker:0"]
    kept: list[str] = []

    def look(status: dict[str, Any]) -> None:
        kept.extend(chunk.text for chunk in stage.store.history.output(job_id))

    monkeypatch.setattr(stage.mesos, "acknowledgeStatusUpdate", look)
    last = LogChunk(worker.task_id, "stdout", 0, b"that was all")
    stage.update(worker, "TASK_FINISHED", data=ended(0, {"stdout": 12}).encode([last]))
    assert kept == ["that was all"]


def test_a_stored_request_that_is_not_understood_any_more_fails_its_job_alone(stage: ServiceStage) -> None:
    broken, sound = stage.submit_search(), stage.submit()
    stage.store.change_job(broken, request={**stage.job(broken).request, "spec": {}})
    stage.start()
    record = stage.job(broken)
    assert record.state is JobState.FAILED
    assert record.failure.startswith("The stored data of the job cannot be parsed any more: ")
    assert "\n" not in record.failure
    assert stage.job(sound).state is JobState.QUEUED


@pytest.mark.slow
def test_a_job_that_cannot_be_taken_up_fails_alone_and_its_tasks_are_ended(stage: ServiceStage) -> None:
    broken, sound = stage.submit(), stage.submit()
    tasks = [*stage.run(broken), *stage.run(sound)]
    stage.store.save([], {broken: {"version": 0}})
    stage.start()
    record = stage.job(broken)
    assert record.state is JobState.FAILED
    assert "written by another version of Dike" in record.failure
    assert "\n" not in record.failure
    assert stage.job(sound).state is JobState.RUNNING
    left = [task for task in tasks if task.job_id == broken]
    assert sorted(stage.mesos.killed) == sorted(task.task_id for task in left)
    for task in left:
        stage.update(task, "TASK_KILLED")
    assert {task.job_id for task in stage.store.tasks(live_only=True)} == {sound}


@pytest.mark.slow
def test_after_a_removal_all_tasks_are_gone_and_jobs_start_again(stage: ServiceStage) -> None:
    job_id = stage.submit(max_restarts=0)
    tasks = stage.run(job_id)
    with pytest.raises(FrameworkRemovedError):
        stage.service.handle(events.Refused("Framework has been removed"))
    assert (stage.store.framework_id(), stage.live(job_id)) == (None, [])
    stage.start()
    assert stage.store.framework_id() == "F-1"
    again = stage.run(job_id)
    assert not {task.task_id for task in again} & {task.task_id for task in tasks}
    assert stage.job(job_id).state is JobState.RUNNING


def test_a_search_too_continues_after_a_removal(stage: ServiceStage) -> None:
    job_id = stage.submit_search()
    with pytest.raises(FrameworkRemovedError):
        stage.service.handle(events.Refused("Framework has been removed"))
    stage.start()
    assert stage.job(job_id).state is JobState.QUEUED, stage.job(job_id).failure


@pytest.mark.slow
def test_a_job_keeps_its_checkpoints_where_they_are(stage: ServiceStage) -> None:
    job_id = stage.submit()
    tasks = stage.run(job_id)
    stage.start(checkpoint_root="/elsewhere")
    other = stage.submit()
    stage.run(other)
    stage.finish(tasks)
    for one, root in ((job_id, "/checkpoints"), (other, "/elsewhere")):
        state = stage.job(one).state_data
        assert state is not None
        assert state["checkpoint_dir"] == f"{root}/{one}"
    result = stage.job(job_id).result
    assert result is not None
    assert result["checkpoint_dir"] == f"/checkpoints/{job_id}"


@pytest.mark.slow
def test_a_service_that_leaves_ends_nothing(stage: ServiceStage) -> None:
    job_id = stage.submit()
    stage.run(job_id)
    stage.service.cancel()
    assert stage.service.done
    assert stage.mesos.killed == []
    assert stage.job(job_id).state is JobState.RUNNING


def test_a_held_job_starts_when_it_is_released(stage: ServiceStage) -> None:
    job_id = stage.submit(name="held", hold=True)
    assert stage.job(job_id).state is JobState.QUEUED
    stage.start()
    stage.wait_until_written()
    assert stage.job(job_id).waiting == "The job is held; dike release held lets it start."
    assert stage.service.scheduler.jobs == []
    Submissions(stage.store, stage.inbox).release(stage.job(job_id))
    stage.deliver()
    stage.run(job_id)
    assert stage.job(job_id).state is JobState.RUNNING
    with pytest.raises(BadInputError, match="'held' is not held: it is running"):
        Submissions(stage.store, stage.inbox).release(stage.job(job_id))


def test_a_held_job_is_killed(stage: ServiceStage) -> None:
    job_id = stage.submit(hold=True)
    stage.kill(job_id, "ann")
    assert (stage.job(job_id).state, stage.job(job_id).failure) == (JobState.KILLED, "killed by ann")


@pytest.mark.slow
@pytest.mark.parametrize("restarts", [False, True])
@pytest.mark.parametrize(
    ("after", "ends_well", "starts"),
    [
        ("first", True, True),
        ("first:ok", False, False),
        ("first:any", False, True),
        ("first:failed", True, False),
        ("first:failed", False, True),
    ],
)
def test_a_job_starts_after_another(
    stage: ServiceStage, after: str, ends_well: bool, starts: bool, restarts: bool
) -> None:
    first = stage.submit(name="first")
    second = stage.submit(name="second", after=[after])
    third = stage.submit(name="third", after=["second"])
    tasks = stage.run(first)
    stage.wait_until_written()
    assert stage.job(second).waiting.startswith("The job waits for first to ")
    assert stage.live(second) == []
    if restarts:
        stage.start()
    if ends_well:
        stage.finish(tasks)
    else:
        stage.kill(first, "ann")
        for task in tasks:
            stage.update(task, "TASK_KILLED")
        stage.service.tick()
    assert stage.job(first).state is (JobState.FINISHED if ends_well else JobState.KILLED)
    if starts:
        stage.run(second)
        assert stage.job(second).state is JobState.RUNNING
        assert stage.job(third).state is JobState.QUEUED
    else:
        # And with it what waits for it.
        assert stage.job(second).state is JobState.KILLED
        assert stage.job(second).failure.startswith(f"--after {after if ':' in after else after + ':ok'}: first ")
        assert stage.job(third).failure == "--after second:ok: second was killed"


def test_a_job_cannot_wait_for_one_that_is_unknown(stage: ServiceStage) -> None:
    with pytest.raises(BadInputError, match="--after nope:ok: there is no job 'nope'"):
        stage.submit(after=["nope"])


@pytest.mark.slow
def test_a_job_ends_at_its_time_limit(stage: ServiceStage, monkeypatch: pytest.MonkeyPatch) -> None:
    job_id = stage.submit(time_limit_s=100.0)
    # Waiting does not count.
    tasks = stage.run(job_id)
    stage.service.tick()
    assert stage.job(job_id).state is JobState.RUNNING
    now_s = time.time()
    monkeypatch.setattr(
        service_module, "time", types.SimpleNamespace(time=lambda: now_s + 101, monotonic=time.monotonic)
    )
    stage.service.tick()
    assert stage.job(job_id).state is JobState.ENDING
    for task in tasks:
        stage.update(task, "TASK_KILLED")
    stage.service.tick()
    job = stage.job(job_id)
    assert (job.state, job.failure) == (JobState.KILLED, "reached its time limit of 100 s (--time-limit)")


def test_overlapping_tasks_count_once() -> None:
    spans = [(0.0, 10.0), (5.0, 12.0), (20.0, None), (1.0, 2.0)]
    tasks: list[Any] = [types.SimpleNamespace(launched_s=begin, ended_s=end) for begin, end in spans]
    assert service_module._ran_s(tasks, 25.0) == 17.0
