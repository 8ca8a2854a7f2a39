"""Arbitrary messages from tasks and from Mesos: the service continues, and so do the jobs of other users."""

from __future__ import annotations

import base64
import dataclasses
import json
import queue
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given
from hypothesis import strategies as st

from executor.messages import Outcome
from framework.mesos import events
from framework.scheduler import offer_pool
from framework.scheduler.journal import LeaseLostError
from framework.scheduler.records import JobState
from framework.service import service as service_module
from framework.service.requests import read_request
from framework.service.service import Service
from framework.service.store import ServiceStore
from framework.service.submission import Submissions
from tests.mesos.fake_mesos import FakeMesos
from tests.properties import examples
from tests.scheduler.test_lease import take_over
from tests.service.fake_context import fake_context
from tests.service.test_security import TRAIN, archive
from tests.training.elastic.elastic_stage import heavy
from tests.training.job_stage import profile
from tests.waiting import wait_until

PATIENT = examples(60, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])


REQUESTS: dict[str, dict[str, Any]] = {
    "sender": {"profile": profile().to_json(), "strategy": "ps", "max_workers": 1},
    "other": {"profile": profile().to_json(), "strategy": "ps", "max_workers": 1},
    "elastic": {"profile": heavy().to_json(), "strategy": "ps", "elastic": "1:2"},
}


@dataclasses.dataclass
class Running:
    """A service with a fake Mesos and a real database; jobs by name, with the tasks that were launched for them."""

    service: Service
    store: ServiceStore
    mesos: FakeMesos
    submissions: Submissions
    jobs: dict[str, str]

    def tasks(self, job: str) -> list[str]:
        handle = self.service.scheduler.job(self.jobs[job]) if job in self.jobs else None
        return sorted(handle.tasks) if handle is not None else []

    def update(self, task_id: str, state: str, **more: Any) -> None:
        status = {"task_id": {"value": task_id}, "agent_id": {"value": "S0"}, "state": state, **more}
        scheduler = events.EventScheduler()
        scheduler.statusUpdate(None, {"source": "SOURCE_EXECUTOR", **status})
        self.service.handle(scheduler.events.get())
        self.service.tick()

    def launch(self, name: str) -> None:
        """Lets a job's tasks run, if they do not; one that has ended is submitted again."""

        def submit_and_offer(pause_s: float) -> None:
            if name not in self.jobs or self.service.scheduler.job(self.jobs[name]) is None:
                values = {"kind": "training", "script": "train.py", **REQUESTS[name]}
                self.jobs[name] = self.submissions.submit(read_request(values), archive(TRAIN), "ann").id
                self.service.handle(events.JobSubmitted(self.jobs[name]))
            if not self.service.scheduler.pool.offers:
                self.service.handle(events.OffersArrived((self.mesos.offer(len(self.jobs)),)))
            self.service.tick()
            time.sleep(pause_s)

        for task_id in wait_until(lambda: self.tasks(name), f"a launch of {name}", pause=submit_and_offer):
            self.update(task_id, "TASK_RUNNING")

    def say(self, task_id: str, data: str) -> None:
        self.service.handle(events.MessageArrived("S0", self.mesos.executor_of(task_id), data))
        self.service.tick()

    def assert_alive(self, *jobs: str) -> None:
        """All of it has been written down, and can be read."""
        for name in jobs:
            assert self.tasks(name), f"nothing of {name} runs any more"
            record = self.store.job(self.jobs[name])
            assert record is not None
            assert record.state is JobState.RUNNING
            self.store.history.events(record.id)
            self.store.history.output(record.id)
            self.store.history.progress(record.id)


@pytest.fixture
def running(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Running]:
    monkeypatch.setattr(service_module, "WRITE_INTERVAL_S", 0.0)
    monkeypatch.setattr(offer_pool, "SETTLE_S", 0.0)
    mesos = FakeMesos()
    with closing(ServiceStore(f"sqlite:///{tmp_path}/service.db")) as store:
        service = Service(fake_context(store, "/checkpoints"), mesos)
        submissions = Submissions(store, queue.SimpleQueue())
        stage = Running(service, store, mesos, submissions, {})
        service.handle(events.Subscribed("F", "127.0.0.1:5050"))
        for name in REQUESTS:
            stage.launch(name)
        yield stage


ODD_TEXT = st.one_of(st.text(), st.sampled_from(["\0", "\ud800", "a\0b\udfff", "x" * 5000, "-1", "1e999"]))
NUMBERS = st.one_of(st.integers(), st.floats(), st.sampled_from([2**63, -(2**64), 10**300, 1e300, -1, 0]))
PLAIN = st.one_of(st.none(), st.booleans(), NUMBERS, ODD_TEXT)
JSON = st.recursive(
    PLAIN, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(ODD_TEXT, inner, max_size=3), max_leaves=8
)
TASK = "the task that sends it"


def record(**fields: Any) -> st.SearchStrategy[dict[str, Any]]:
    """An object with these fields, right or wrong, or some of them."""
    return st.fixed_dictionaries({}, optional={name: values | JSON for name, values in fields.items()}) | (
        st.fixed_dictionaries(fields)
    )


SMALL = st.integers(0, 3)
REPORTS = st.one_of(
    record(type=st.just("progress"), step=NUMBERS, loss=NUMBERS, samples_per_s=NUMBERS),
    record(type=st.just("placement"), variables=st.dictionaries(ODD_TEXT, ODD_TEXT, max_size=2)),
    record(type=st.just("checkpoint"), path=ODD_TEXT, step=NUMBERS),
    record(type=st.just("resumed"), step=NUMBERS),
    record(type=st.just("total"), steps=NUMBERS),
    record(type=st.just("rates"), workers=st.dictionaries(ODD_TEXT | st.just("0"), NUMBERS, max_size=2)),
)
CHUNKS = record(
    type=st.just("log"),
    task_id=st.just(TASK),
    stream=st.sampled_from(["stdout", "stderr", "other"]),
    offset=NUMBERS,
    skipped=NUMBERS,
    data=st.binary(max_size=20).map(lambda data: base64.b64encode(data).decode()),
)
LAST_OUTPUTS = st.lists(CHUNKS.map(lambda chunk: {name: chunk[name] for name in chunk if name != "type"}), max_size=2)
OUTCOMES = record(exit_code=st.none() | SMALL, log_bytes=st.just({"stdout": 3}), tail=ODD_TEXT, sandbox=ODD_TEXT)
ENDS = st.builds(lambda outcome, last: {**outcome, "last_output": last}, OUTCOMES, LAST_OUTPUTS | JSON)
MESSAGES = st.one_of(
    JSON,
    record(type=st.just("report"), task_id=st.just(TASK), content=REPORTS),
    st.fixed_dictionaries({"type": st.just("report"), "task_id": st.just(TASK), "content": REPORTS}),
    CHUNKS,
    record(
        type=st.just("elastic"),
        task_id=st.just(TASK),
        number=SMALL,
        ready=st.booleans(),
        attempt=st.none() | SMALL,
        ends=st.lists(record(attempt=SMALL, outcome=OUTCOMES), max_size=2),
    ),
)


def encoded(message: Any, task_id: str) -> str:
    """As an executor sends it."""
    text = json.dumps(message).replace(json.dumps(TASK), json.dumps(task_id))
    return base64.b64encode(text.encode()).decode()


@PATIENT
@given(MESSAGES, st.sampled_from(["sender", "elastic"]))
@example({"type": "report", "task_id": TASK, "content": {"type": "progress", "step": 10**30}}, "sender")
@example(
    {"type": "report", "task_id": TASK, "content": {"type": "checkpoint", "path": "\0\ud800", "step": 1}}, "sender"
)
@example({"type": "log", "task_id": TASK, "stream": "stdout", "offset": 0, "data": "AAAA"}, "sender")
@example(
    {"type": "log", "task_id": TASK, "stream": "stderr", "offset": 2**63 - 2, "skipped": 2**63 - 2, "data": "AA=="},
    "sender",
)
def test_what_a_task_says_ends_nothing(running: Running, message: Any, job: str) -> None:
    for task_id in running.tasks(job):
        running.say(task_id, encoded(message, task_id))
    running.assert_alive("sender", "elastic", "other")


@PATIENT
@given(st.one_of(st.text(), st.binary().map(lambda data: base64.b64encode(data).decode())))
@example(base64.b64encode(b"[" * 100_000).decode())
@example(base64.b64encode(b"1" * 10_000).decode())
def test_what_is_no_message_is_ignored(running: Running, data: str) -> None:
    for task_id in running.tasks("sender"):
        running.say(task_id, data)
    running.assert_alive("sender", "elastic", "other")


@PATIENT
@given(MESSAGES)
def test_a_task_cannot_report_for_others(running: Running, message: Any) -> None:
    before = [
        running.store.history.progress(running.jobs["other"]),
        running.store.history.output(running.jobs["other"]),
    ]
    for task_id in running.tasks("sender"):
        for spoken_for in running.tasks("other"):
            running.say(task_id, encoded(message, spoken_for))
    running.assert_alive("sender", "other")
    assert [
        running.store.history.progress(running.jobs["other"]),
        running.store.history.output(running.jobs["other"]),
    ] == before


STATES = ["STAGING", "STARTING", "RUNNING", "KILLING", "FINISHED", "FAILED", "KILLED", "LOST", "DROPPED", "GONE"]
STATES += ["GONE_BY_OPERATOR", "UNREACHABLE", "UNKNOWN", "ERROR", "OF_A_LATER_VERSION"]
STATUSES = st.fixed_dictionaries(
    {"state": st.sampled_from(STATES).map("TASK_{}".format)},
    optional={
        "message": ODD_TEXT,
        "reason": ODD_TEXT,
        "data": st.text() | (OUTCOMES | ENDS | JSON).map(lambda outcome: encoded(outcome, "")),
        "source": st.sampled_from(["SOURCE_AGENT", "SOURCE_MASTER", "SOURCE_EXECUTOR"]),
    },
)


@PATIENT
@given(STATUSES, st.integers(0, 2))
def test_a_state_of_an_unknown_task_ends_nothing(running: Running, status: dict[str, Any], which: int) -> None:
    status = dict(status)
    running.update(f"nobody-{which}", status.pop("state"), **status)
    running.assert_alive("sender", "elastic", "other")
    if which == 0 and running.mesos.killed:
        assert set(running.mesos.killed) <= {f"nobody-{number}" for number in range(3)}


@PATIENT
@given(STATUSES, st.integers(0, 3))
def test_whatever_becomes_of_a_task_concerns_its_own_job_only(
    running: Running, status: dict[str, Any], which: int
) -> None:
    running.launch("sender")
    tasks = running.tasks("sender")
    task_id = tasks[which % len(tasks)]
    job_id = running.jobs["sender"]
    status = dict(status)
    running.update(task_id, status.pop("state"), **status)
    running.assert_alive("elastic", "other")
    assert task_id in {task.task_id for task in running.store.tasks(job_id=job_id)}
    job = running.store.job(job_id)
    assert job is not None
    assert "internal error" not in job.failure


def test_an_outcome_with_odd_text_is_written_down(running: Running) -> None:
    task_id = running.tasks("sender")[0]
    outcome = Outcome(1, {}, "\0\ud83d", "/sandbox")
    running.update(task_id, "TASK_FAILED", message="half \ud83d and \0", data=outcome.encode())
    (found,) = [task for task in running.store.tasks() if task.task_id == task_id]
    assert found.message == "half \ufffd and \ufffd"


def test_a_service_that_was_taken_over_launches_and_ends_nothing(running: Running) -> None:
    values = {"kind": "training", "script": "train.py", **REQUESTS["other"]}
    late = running.submissions.submit(read_request(values), archive(TRAIN), "bob")
    running.service.handle(events.JobSubmitted(late.id))
    launched = len(running.mesos.accepted)
    with running.store.database.lock(lambda reason: None):
        take_over(running.store)
        running.service.handle(events.OffersArrived((running.mesos.offer(9),)))

        def has_launched() -> bool:
            running.service.tick()
            return len(running.mesos.accepted) > launched

        with pytest.raises(LeaseLostError):
            wait_until(has_launched, "a launch")
    assert len(running.mesos.accepted) == launched
    assert not running.mesos.killed
    states = {job.id: job.state for job in running.store.jobs()}
    assert states.pop(late.id) is JobState.QUEUED
    assert set(states.values()) == {JobState.RUNNING}
