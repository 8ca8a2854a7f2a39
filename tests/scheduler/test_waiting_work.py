"""What waits in a framework is published for `dike cluster slurm`, and its answer is explained."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import pytest

from executor.mirror import StoreClient, StoreError
from framework.cluster.demand import PILOTS, WAITING, PilotNotice
from framework.scheduler.feasibility import FitResult, Nodes
from framework.scheduler.job import Need
from framework.scheduler.mesos_access import MesosAccess
from framework.scheduler.records import JobKind, JobRecord, TaskNeed
from framework.scheduler.snapshot import JobFacts, Snapshot
from framework.scheduler.waiting_work import RENEWAL_S, WaitingPublisher, publishing
from framework.service.explain import explain
from solver import NodeClass


class FakeStore:
    def __init__(self) -> None:
        self.stored: dict[str, Any] = {}
        self.calls: list[str] = []
        self.pilots: dict[str, Any] = {}

    def put_notice(self, kind: str, name: str, values: Any) -> None:
        assert kind == WAITING
        self.calls.append("put")
        self.stored = values

    def remove_notice(self, kind: str, name: str) -> None:
        self.calls.append("remove")
        self.stored = {}

    def notices(self, kind: str) -> dict[str, Any]:
        assert kind == PILOTS
        return self.pilots


class FakeSizing:
    """Two workers and a parameter server, or slots; unknown without agents, like the sizing of a training job."""

    is_gang = True

    def __init__(self, *needs: TaskNeed) -> None:
        self._needs = needs

    def needs(self, nodes: Nodes) -> tuple[TaskNeed, ...]:
        return self._needs if nodes else ()

    def fit(self, nodes: Nodes) -> FitResult:
        return FitResult(problem="There is no agent.")


TRAINING = FakeSizing(
    TaskNeed("worker", 2, 4.0, 1024.0, gpus=1.0, ports=1), TaskNeed("parameter server", 1, 1.0, 512.0)
)
SLOTS = FakeSizing(TaskNeed("slot", 1, 1.0, 256.0))


class Stage:
    def __init__(self) -> None:
        self.store, self.jobs = FakeStore(), list[JobFacts]()
        self.agents: list[NodeClass] | None = [NodeClass(name="agent-0", cpus=4, mem_bytes=8 << 30)]
        self.publisher = WaitingPublisher(
            cast(StoreClient, self.store), lambda: self.snapshot, lambda: self.agents, sizing=SLOTS
        )
        self.now = 0.0

    @property
    def snapshot(self) -> Snapshot:
        return Snapshot(0.0, connected=True, agents=(), jobs={job.job_id: job for job in self.jobs})

    def publish(self) -> Any:
        self.now += 1.0
        self.publisher.publish(self.now)
        return self.store.stored


@pytest.fixture
def stage() -> Stage:
    return Stage()


def test_jobs_that_run_or_end_do_not_wait(stage: Stage) -> None:
    stage.jobs = [
        JobFacts("grows", "ann", Need.GROW, tasks=1),
        JobFacts("runs", "ann", Need.NOTHING, tasks=1),
        JobFacts("ends", "ann", Need.START, is_ending=True),
    ]
    assert stage.publish() == {}
    assert stage.store.calls == []


def test_what_waits_is_published_by_task(stage: Stage) -> None:
    stage.jobs = [
        JobFacts("training", "ann", Need.START, sizing=TRAINING),
        JobFacts("search", "ann", Need.START, sizing=SLOTS, tasks=2, missing_tasks=5),
        JobFacts("alone", "", Need.REPLACE_LOST),
    ]
    workers = {"name": "worker", "count": 2, "amounts": {"cpus": 4.0, "mem": 1024.0, "gpus": 1.0}}
    server = {"name": "parameter server", "count": 1, "amounts": {"cpus": 1.0, "mem": 512.0}}
    slots = {"name": "slot", "count": 5, "amounts": {"cpus": 1.0, "mem": 256.0}}
    assert stage.publish() == {
        "jobs": (
            {"job_id": "alone", "tasks": ({**slots, "count": 1},)},
            {"job_id": "search", "tasks": (slots,)},
            {"job_id": "training", "tasks": (workers, server)},
        )
    }


def test_without_an_agent_the_needs_are_unknown(stage: Stage) -> None:
    stage.jobs = [JobFacts("training", "ann", Need.START, sizing=TRAINING)]
    for agents in (None, []):
        stage.agents = agents
        assert stage.publish() == {"jobs": ({"job_id": "training", "tasks": ()},)}


def test_an_unchanged_notice_is_renewed_and_the_last_removed(stage: Stage) -> None:
    stage.jobs = [JobFacts("search", "ann", Need.START, missing_tasks=2)]
    for _ in range(round(RENEWAL_S) + 2):
        stage.publish()
    assert stage.store.calls == ["put", "put"]
    stage.jobs = [replace(stage.jobs[0], missing_tasks=1)]
    stage.publish()
    stage.jobs = []
    stage.publish()
    stage.publish()
    assert stage.store.calls == ["put", "put", "put", "remove"]


def test_a_store_that_is_away_is_tried_again(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    stage.jobs = [JobFacts("search", "ann", Need.START, missing_tasks=2)]
    with monkeypatch.context() as patch:

        def refuse(*_: Any) -> None:
            raise StoreError("away")

        patch.setattr(stage.store, "put_notice", refuse)
        with pytest.raises(StoreError):
            stage.publish()
    assert stage.publish()["jobs"]


def test_what_is_done_about_it_is_explained(stage: Stage) -> None:
    stage.jobs = [JobFacts("search", "ann", Need.START)]
    stage.store.pilots = {"dike-test": {"queued": {"12": "Resources"}, "max_jobs": 2}}
    stage.publish()
    assert stage.publisher.pilots == PilotNotice(queued={"12": "Resources"}, max_jobs=2)
    record = JobRecord("search", JobKind.SEARCH, "ann", "train.py", {})
    snapshot = replace(stage.snapshot, pilots=stage.publisher.pilots)
    assert explain(record, snapshot).sentence == (
        "No agent is registered with the Mesos master. Slurm job 12 waits in Slurm's queue: Resources."
    )
    running = replace(snapshot, jobs={"search": JobFacts("search", "ann", Need.NOTHING)})
    assert "Slurm" not in explain(record, running).sentence
    stage.store.pilots = {"dike-test": {"of": "another version"}}
    stage.now += RENEWAL_S
    stage.publish()
    assert stage.publisher.pilots is None


@pytest.mark.parametrize(
    ("notice", "sentence"),
    [
        (PilotNotice(), "All 0 Slurm jobs run that `dike cluster slurm --max` allows."),
        (PilotNotice(max_jobs=1), ""),
        (PilotNotice(starting=("1",), max_jobs=1), "Slurm job 1 starts."),
        (PilotNotice(starting=("1", "2"), max_jobs=2), "The Slurm jobs 1, 2 start."),
        (
            PilotNotice({"1": "Resources", "2": "Priority", "3": "Priority"}, max_jobs=3),
            "The Slurm jobs 1, 2, 3 wait in Slurm's queue: Priority, Resources.",
        ),
        (PilotNotice(problem="sbatch failed."), "sbatch failed."),
        (PilotNotice({"1": "Priority"}, unfit={"job": "It does not fit."}, max_jobs=1), "It does not fit."),
    ],
)
def test_the_answer_in_words(notice: PilotNotice, sentence: str) -> None:
    assert notice.explain("job") == sentence


def test_another_mesos_gets_no_notices() -> None:
    with publishing(MesosAccess(), lambda: None, lambda: Snapshot(0.0)) as publisher:
        assert publisher is None
