"""The scheduler on a real Mesos: roles and reservations, constraints, agents shared with others, silence while idle."""

from __future__ import annotations

import contextlib
import queue
from collections.abc import Iterator
from typing import Any

import pytest

from framework.embedded.agents import AgentSpec
from framework.embedded.cluster import EmbeddedCluster
from framework.mesos.offers import AgentOffer
from framework.mesos.tasks import take_resources
from framework.scheduler.job import JobEntry
from framework.scheduler.records import JobKind, JobRecord
from framework.service.explain import explain
from framework.service.explanation import Verdict
from tests.embedded.embedded_support import RawFramework
from tests.scheduler.scheduler_stage import FakeJob
from tests.scheduler.subscribed_stage import SubscribedStage

pytestmark = pytest.mark.mesos

MEM_MIB = 64.0


class SleepingJob(FakeJob):
    """One whose tasks are commands that sleep."""

    def _info(self, number: int, agent: AgentOffer) -> dict[str, Any]:
        pool = agent.pool
        own, rest = take_resources(pool, cpus=self.cpus, mem_mib=MEM_MIB)
        merged: dict[str, Any] = {}
        for piece in (*own, *rest):
            key = (piece["name"], piece["role"])
            merged.setdefault(key, {**piece, "scalar": {"value": 0.0}})
            merged[key]["scalar"]["value"] = round(merged[key]["scalar"]["value"] + piece["scalar"]["value"], 3)
        return {
            "name": f"{self.job_handle.job_id} worker:{number}",
            "task_id": {"value": f"{self.job_handle.job_id}.{number}"},
            "agent_id": {"value": agent.agent_id},
            "resources": list(merged.values()),
            "command": {"value": "exec sleep 1000"},
        }


class SleepingJobsStage(SubscribedStage):
    """Submits jobs that sleep."""

    def submit(self, job_id: str, cpus: float, *, constraints: tuple[str, ...] = ()) -> FakeJob:
        made: list[FakeJob] = []

        def make(handle: JobEntry) -> FakeJob:
            made.append(SleepingJob(handle, 1, cpus))
            handle.sizing = made[0]
            return made[0]

        self.scheduler.admit(job_id, "ada", next(self.numbers), make, constraints=constraints)
        return made[0]

    def running(self, job_id: str) -> dict[str, Any] | None:
        """A job's task as the master has it, once it runs."""
        for framework in (self.master.ask("/state") or {})["frameworks"]:
            for task in framework["tasks"]:
                if task["id"] == f"{job_id}.0" and task["state"] == "TASK_RUNNING":
                    return dict(task)
        return None

    def suppressed(self) -> bool:
        metrics = self.master.ask("/metrics/snapshot") or {}
        ours = f"/{self.driver.framework_id}/"
        return [value for name, value in metrics.items() if ours in name and name.endswith("/suppressed")] == [1.0]


@pytest.fixture(scope="module")
def cluster() -> Iterator[EmbeddedCluster]:
    agents = [
        AgentSpec("cpus:1;mem:1024;disk:1024;cpus(team):2;mem(team):512", "rack:r1"),
        AgentSpec("cpus:2;mem:4096;disk:1024", "rack:r2"),
    ]
    with EmbeddedCluster(agents) as found:
        yield found


@pytest.fixture
def team(cluster: EmbeddedCluster) -> Iterator[SleepingJobsStage]:
    found = SleepingJobsStage(cluster, "team")
    yield found
    found.close()


def test_what_is_reserved_for_our_role_is_used_first_and_constraints_hold(team: SleepingJobsStage) -> None:
    assert {one.node: one.total["cpus"] for one in team.directory.current() or ()} == {"agent-0": 3.0, "agent-1": 2.0}
    team.submit("here", 1.5, constraints=("rack:IS:r1",))
    team.submit("there", 1.0, constraints=("rack:IS_NOT:r1",))
    team.until(lambda: team.running("here"), "a task on the reserved part")
    there = team.until(lambda: team.running("there"), "a task on the other agent")
    slaves = {slave["hostname"]: slave for slave in (team.master.ask("/slaves") or {})["slaves"]}
    used = [piece for piece in slaves["agent-0"]["used_resources_full"] if piece["name"] == "cpus"]
    assert [(piece["role"], piece["scalar"]["value"]) for piece in used] == [("team", 1.5)]
    assert there["slave_id"] == slaves["agent-1"]["id"]


def test_other_frameworks_get_everything_while_we_are_idle(team: SleepingJobsStage, cluster: EmbeddedCluster) -> None:
    team.until(team.suppressed, "offers suppressed")
    other = RawFramework(cluster.master)
    offered: set[str] = set()

    def has_all() -> bool:
        with contextlib.suppress(queue.Empty):
            offered.update(offer["hostname"] for offer in other.events.get_nowait().get("offers", ()))
        return offered == {"agent-0", "agent-1"}

    team.until(has_all, "all agents offered to the other framework")
    other.close()
    team.submit("job", 1.0)
    team.until(lambda: team.running("job"), "a task after REVIVE")
    team.until(team.suppressed, "offers suppressed again: the job wants nothing more")


def test_an_agent_that_another_framework_holds_is_waited_for_and_named(cluster: EmbeddedCluster) -> None:
    other = RawFramework(cluster.master)
    held: dict[str, Any] = {}
    while "agent-1" not in held:
        # Frameworks of earlier tests have ended; there are no others.
        held |= {offer["hostname"]: offer["id"] for offer in other.next_event("OFFERS")["offers"]}
    ours = SleepingJobsStage(cluster, "*")
    ours.submit("job", 2.0, constraints=("rack:IS:r2",))
    ours.submit("small", 1.0, constraints=("rack:IS:r9",))

    def verdict(job_id: str) -> Verdict:
        return explain(JobRecord(job_id, JobKind.TRAINING, "ada", "train.py", {}), ours.scheduler.snapshot).verdict

    ours.until(lambda: verdict("job") is Verdict.NO_OFFERS, "no offer of agent-1")
    assert verdict("small") is Verdict.CONSTRAINTS
    other.call("DECLINE", offer_ids=list(held.values()), filters={"refuse_seconds": 60.0})
    task = ours.until(lambda: ours.running("job"), "a task once the other has let go")
    assert task["resources"]["cpus"] == 2.0
    other.close()
    ours.close()
