"""Why a job does not run: the deciding reason, what is missing on which agent, which tasks hold it."""

from __future__ import annotations

import copy
import dataclasses
import json
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from rich.console import Console

from dike.exceptions import BadInputError
from framework.cli.job_tables import print_explanation
from framework.mesos import events
from framework.scheduler.agents import AgentDirectory
from framework.scheduler.amounts import describe
from framework.scheduler.feasibility import Nodes
from framework.scheduler.job import Need
from framework.scheduler.records import JobKind, JobRecord, JobState, TaskNeed
from framework.scheduler.reservation import RESERVE_AFTER_S
from framework.search.records import Parameter, SearchSpec
from framework.search.slot_pool import SearchSizing
from framework.service.explain import explain, reason_never_fits
from framework.service.explanation import Explanation, Verdict
from framework.service.requests import SearchJobRequest, TrainingRequest
from framework.training.planning import TrainingSizing, plan_request
from solver import NodeClass, make_plan
from tests.scheduler.scheduler_stage import FakeJob, SchedulerStage
from tests.training.job_stage import GIB, profile, spec


def explained(stage: SchedulerStage, job_id: str, state: JobState = JobState.QUEUED, **more: Any) -> Explanation:
    stage.run(2.0)
    record = JobRecord(job_id, JobKind.TRAINING, "ada", "train.py", {}, state=state, **more)
    explanation = explain(record, stage.scheduler.snapshot)
    # It is printed as JSON.
    assert json.loads(json.dumps(dataclasses.asdict(explanation)))["verdict"] == explanation.verdict
    return explanation


@pytest.fixture
def stage() -> Iterator[SchedulerStage]:
    found = SchedulerStage({"agent-0": 4.0, "agent-1": 2.0})
    yield found
    found.close()


def test_a_job_that_runs(stage: SchedulerStage) -> None:
    stage.submit("job", lasts_s=1e6)
    stage.run(3.0)
    explanation = explained(stage, "job", JobState.RUNNING)
    assert explanation.verdict is Verdict.RUNNING
    assert "with 1 task on 1 agent." in explanation.sentence
    assert explanation.last_offer_s is not None


def test_a_job_that_has_ended_or_is_not_known_yet(stage: SchedulerStage) -> None:
    explanation = explained(stage, "job", JobState.FAILED, failure="worker:0 has failed.")
    assert explanation.verdict is Verdict.ENDED
    assert explanation.sentence == "The job failed: worker:0 has failed."
    assert explained(stage, "new").verdict is Verdict.TURN


def test_what_is_missing_on_which_agent_and_who_holds_it(stage: SchedulerStage) -> None:
    stage.submit("holds", 1, 3.0, user="bob", lasts_s=1e6)
    stage.run(4.0)
    stage.submit("job", 1, 4.0)
    stage.run(3.0)
    explanation = explained(stage, "job")
    assert explanation.verdict is Verdict.RESOURCES
    assert "agent-0, which comes nearest, is 3 cpus, 3072 MiB short" in explanation.sentence
    assert explanation.needs == (TaskNeed("worker", 1, 4.0, 4096.0),)
    rows = {row.node: row for row in explanation.agents}
    assert rows["agent-0"].missing == {"cpus": 3.0, "mem": 3072.0}
    assert rows["agent-0"].held_by_jobs == {"holds": {"cpus": 3.0, "mem": 3072.0}}
    assert rows["agent-0"].total["cpus"] == 4.0
    assert rows["agent-0"].can_ever_hold
    assert not rows["agent-1"].can_ever_hold
    assert rows["agent-1"].missing == {"cpus": 2.0, "mem": 2048.0}
    assert any("holds of bob" in sentence for sentence in explanation.could_be_freed)


def test_what_is_missing_is_told_of_the_task_that_lacks_most() -> None:
    class Pair(FakeJob):
        def needs(self, nodes: Nodes) -> tuple[TaskNeed, ...]:
            return (TaskNeed("worker", 1, 2.0, 1024.0), TaskNeed("ps", 1, 1.0, 65536.0))

    stage = SchedulerStage({"agent-0": 3.0})
    stage.submit("job", 1, 64.0, kind=Pair)
    explanation = explained(stage, "job")
    assert explanation.agents[0].missing == {"mem": 62464.0}
    stage.submit("runs", kind=Pair, lasts_s=1e6)
    stage.run(3.0)
    running = explained(stage, "runs", JobState.RUNNING)
    assert running.verdict is Verdict.RUNNING
    assert running.agents[0].missing == {}
    # Its own tasks are among the holders.
    assert running.agents[0].held_by_jobs == {"runs": {"cpus": 1.0, "mem": 1024.0}}
    stage.close()


def test_what_is_missing_is_told_where_each_task_has_room_but_not_all_together(
    capsys: pytest.CaptureFixture[str],
) -> None:
    class Pair(FakeJob):
        def needs(self, nodes: Nodes) -> tuple[TaskNeed, ...]:
            return (TaskNeed("worker", 1, 1.0, 2048.0), TaskNeed("ps", 1, 0.5, 1536.0))

    stage = SchedulerStage({"agent-0": 3.0})
    stage.submit("job", 4, kind=Pair)
    explanation = explained(stage, "job")
    assert explanation.agents[0].missing == {"mem": 512.0}
    print_explanation(Console(width=200), explanation, 0.0)
    assert "512.0 MiB mem" in capsys.readouterr().out
    stage.close()


def test_an_ended_job_is_told_of_no_offers(capsys: pytest.CaptureFixture[str], stage: SchedulerStage) -> None:
    print_explanation(Console(), explained(stage, "job", JobState.KILLED, failure="killed by eve"), 0.0)
    assert capsys.readouterr().out == "job: The job was killed by eve.\n"


def test_jobs_that_are_served_before_it() -> None:
    stage = SchedulerStage({"agent-0": 1.0})
    for number in range(3):
        stage.submit(f"job-{number}", lasts_s=1e6)
    stage.run(4.0)
    explanation = explained(stage, "job-2")
    assert explanation.ahead == ("job-1",)
    assert explanation.verdict is Verdict.RESOURCES
    stage.close()


def test_a_job_that_fits_no_agent_seen_so_far(stage: SchedulerStage) -> None:
    stage.submit("job", 1, 64.0)
    explanation = explained(stage, "job")
    assert explanation.verdict is Verdict.NEVER_FITS
    assert "can never fit on the agents seen so far" in explanation.sentence


def test_agents_that_were_there_count_as_seen() -> None:
    stage = SchedulerStage({"agent-0": 4.0, "agent-1": 8.0})
    stage.submit("job", 1, 8.0)
    del stage.master.agents["agent-1"]
    stage.run(5.0)
    explanation = explained(stage, "job")
    assert explanation.verdict is Verdict.NEVER_FITS
    assert "these are gone: agent-1" in explanation.sentence
    stage.close()


@pytest.mark.parametrize(
    ("constraint", "words"),
    [
        ("rack:IS:r9", "the agents have r1, r2"),
        ("rak:IS:r1", "none has the attribute rak; did you mean rack?"),
        ("rack:IS:r2", "cannot hold it"),
    ],
)
def test_constraints_that_stand_in_the_way(stage: SchedulerStage, constraint: str, words: str) -> None:
    stage.master.attributes["agent-0"]["rack"] = "r1"
    stage.master.attributes["agent-1"]["rack"] = "r2"
    stage.directory.refresh()
    stage.submit("job", 1, 4.0, constraints=[constraint])
    explanation = explained(stage, "job")
    assert explanation.verdict is Verdict.CONSTRAINTS
    assert words in explanation.sentence
    assert f"The constraint {constraint} does not admit it." in explanation.agents[0].obstacles


def test_agents_left_out_after_failures(stage: SchedulerStage) -> None:
    class Excluding(FakeJob):
        def excluded_agents(self) -> dict[str, float]:
            return {"S0": 120.0}

    stage.submit("job", 1, 4.0, kind=Excluding).need = Need.REPLACE_LOST
    stage.jobs["job"].cpus = 4.5
    stage.master.agents["agent-0"] = 5.0
    stage.jobs["job"].keeps_offers = True
    explanation = explained(stage, "job")
    assert explanation.verdict is Verdict.EXCLUDED
    assert "agent-0 after failures there, for another 120 s" in explanation.sentence
    assert "avoids it after failures" in explanation.agents[0].obstacles[0]


def test_agents_that_are_kept_for_another_job() -> None:
    stage = SchedulerStage({"agent-0": 4.0, "agent-1": 4.0})
    stage.submit("holds", 1, 2.0, lasts_s=1e6)
    stage.run(3.0)
    stage.submit("pair", 2, 4.0)
    stage.run(RESERVE_AFTER_S + 3)
    stage.submit("small", 1, 1.0, user="bob")
    explanation = explained(stage, "small")
    assert explanation.verdict is Verdict.RESERVED
    assert "reserved for job pair" in explanation.sentence
    assert all("It is reserved for job pair." in row.obstacles for row in explanation.agents)
    stage.close()


def test_other_frameworks_hold_it() -> None:
    stage = SchedulerStage({"agent-0": 4.0}, others={"agent-0": 3.0})
    stage.submit("job", 1, 2.0)
    stage.run(5.0)
    explanation = explained(stage, "job")
    assert explanation.verdict is Verdict.NO_OFFERS
    assert "Other frameworks use what it needs" in explanation.sentence
    assert explanation.agents[0].held_by_others["cpus"] == 3.0
    stage.close()


def test_no_connection_and_no_agents(stage: SchedulerStage) -> None:
    stage.submit("job", 1, 64.0)
    stage.master.agents.clear()
    stage.run(3.0)
    assert explained(stage, "job").verdict is Verdict.NO_AGENTS
    stage.scheduler.handle(events.Disconnected())
    assert explained(stage, "job").verdict is Verdict.NOT_CONNECTED


def slave(name: str, cpus: float, reserved: Mapping[str, Mapping[str, float]] | None = None) -> dict[str, Any]:
    resources = {"cpus": cpus, "mem": 8192.0, "disk": 20_000.0, "gpus": 0.0, "ports": "[31000-31009, 31020-31020]"}
    return {
        "id": f"X-{name}",
        "hostname": name,
        "active": True,
        "attributes": {"rack": "r1", "slots": 2.0},
        "resources": resources,
        "unreserved_resources": resources,
        "reserved_resources": dict(reserved or {}),
        "used_resources": {},
    }


def test_what_is_reserved_for_other_roles_is_no_ours_and_is_told() -> None:
    slaves = [slave("one", 0.25, {"team": {"cpus": 4.0, "mem": 100.0}})]
    stage = SchedulerStage({})
    stage.master.ask = lambda path: {"slaves": slaves}  # type: ignore[method-assign]
    stage.directory = AgentDirectory(stage.master.ask)
    stage.directory.refresh()
    known = stage.directory.current()
    assert known is not None
    assert known[0].total["cpus"] == 0.25
    assert known[0].total["ports"] == 11.0
    assert known[0].attributes == {"rack": "r1", "slots": "2"}
    ours = AgentDirectory(stage.master.ask, role="team/ada")
    ours.refresh()
    assert [one.total["cpus"] for one in ours.current() or ()] == [4.25]
    snapshot = dataclasses.replace(stage.scheduler.snapshot, agents=known)
    request = SearchJobRequest(spec=dataclasses.asdict(search_spec(slot_cpus=2.0)))
    assert "reserved for the role team" in reason_never_fits(request, snapshot)
    assert reason_never_fits(request, dataclasses.replace(snapshot, agents=ours.current())) == ""
    ours.close()
    stage.close()


SIZE: dict[str, Any] = {"sampler": "grid", "trial_count": 4}


def search_spec(**changes: Any) -> SearchSpec:
    values: dict[str, Any] = {"name": "search", "script": "train.py", "arguments": (), "flags": {"lr": "--lr"}}
    values |= {"space": (Parameter("lr", low=0.1, high=1.0),), "sampler": "random", "trial_count": 4}
    return SearchSpec(**{**values, **changes})


def test_at_submit_time_it_is_said_what_can_never_fit(stage: SchedulerStage) -> None:
    request = TrainingRequest(script="train.py", profile=profile().to_json())
    assert reason_never_fits(request, dataclasses.replace(stage.scheduler.snapshot, agents=None)) == ""
    stage.submit("other", 1, 64.0)
    stage.run(3.0)
    assert reason_never_fits(request, stage.scheduler.snapshot) == ""
    large = dataclasses.replace(profile(), parameter_bytes=64 * GIB, variables=())
    assert "can never fit" in reason_never_fits(
        TrainingRequest(script="train.py", profile=large.to_json()), stage.scheduler.snapshot
    )
    assert "admits no agent" in reason_never_fits(
        dataclasses.replace(request, constraints=("hostname:IS:elsewhere",)), stage.scheduler.snapshot
    )
    # The request type refuses this constraint, so the value is set past its validation.
    unchecked = copy.copy(request)
    object.__setattr__(unchecked, "constraints", ("rack",))
    with pytest.raises(BadInputError, match="FIELD:OPERATOR:VALUE"):
        reason_never_fits(unchecked, stage.scheduler.snapshot)


def node(name: str, cpus: float, gpus: int = 0) -> NodeClass:
    return NodeClass(name=name, cpus=cpus, mem_bytes=16 * GIB, gpus=gpus, gpu_model="K80" if gpus else None)


def test_a_training_job_takes_at_least_one_task_of_each_role_and_fits_where_these_do() -> None:
    sizing = TrainingSizing(spec(max_workers=8))
    needs = sizing.needs((node("a", 4.0), node("b", 4.0)))
    assert [need.name for need in needs] == ["worker", "parameter server"]
    assert all(need.ports == 1 and need.cpus > 0 and need.mem > 0 for need in needs)
    assert len(sizing.fit((node("a", 4.0), node("b", 4.0))).nodes) == 1
    assert "CPUs" in sizing.fit((node("a", 0.1),)).problem
    assert TrainingSizing(spec(elastic=(3, 5))).needs((node("a", 9.0),))[0].count == 3


def test_a_plan_of_the_users_wants_its_own_agents() -> None:
    whole = TrainingSizing(spec(max_workers=1)).fit((node("a", 4.0),))
    assert whole.nodes == {"a"}
    plan = make_plan(plan_request(spec(max_workers=1), (node("a", 4.0),)))
    sizing = TrainingSizing(spec(plan=plan))
    assert sizing.fit((node("a", 4.0), node("b", 4.0))).nodes == {"a"}
    assert "needs agent a; the agents are b" in sizing.fit((node("b", 4.0),)).problem
    assert "which is" in sizing.fit((node("a", 0.1),)).problem
    assert {need.name for need in sizing.needs(())} == {"worker", "ps"}


def test_a_search_needs_one_slot() -> None:
    sizing = SearchSizing(search_spec(slot_cpus=2.0, slot_mem_mib=1024.0))
    assert sizing.fit((node("small", 1.0), node("large", 2.0))).nodes == {"large"}
    assert "small, the best agent, is 1 cpu short" in sizing.fit((node("small", 1.0),)).problem
    assert sizing.needs((node("gpu", 2.0, gpus=2),))[0].gpus == 1.0


def test_amounts_in_words() -> None:
    assert describe({"cpus": 0.5, "mem": 512.0, "gpus": 1.0}) == "0.5 cpus, 512 MiB, 1 gpu"
    assert describe({}) == "nothing"
