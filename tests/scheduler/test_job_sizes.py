"""Elastic jobs whose sizes are decided on together; Mesos and slots are fakes, jobs, planner and policies are real."""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

import pytest

from framework.policies.jobs.registry import POLICIES
from framework.scheduler.job import Need
from framework.scheduler.records import JobKind, JobRecord
from framework.service.explain import explain
from framework.service.explanation import Verdict
from tests.scheduler.training_stage import TrainingStage
from tests.training.elastic.elastic_stage import INTERVAL_S, elastic, elastic_gang
from tests.training.job_stage import spec

AGENTS = {f"agent-{number}": 4.0 for number in range(4)}
MATCHING_BUDGET_S = 20.0
LONG = 100_000


def cluster(allocation: str | None, jobs: int = 0, steps: int = LONG, **more: Any) -> TrainingStage:
    """A cluster of 16 CPUs with `jobs` jobs of 1 to 6 workers, each of another user."""
    made = TrainingStage(AGENTS, allocation, MATCHING_BUDGET_S, **more)
    for number in range(jobs):
        submit(made, number, steps=steps)
    return made


def submit(made: TrainingStage, number: int, *, user: str = "", steps: int = LONG, least: int = 1) -> None:
    made.admit(dataclasses.replace(elastic(least, 6), job_id=f"j{number}"), number, user=user, steps=steps)


def ends(made: TrainingStage, count: int, limit_s: float = 4000.0) -> list[str]:
    """The first jobs that end, in their order."""
    waited_s = 0.0
    while len(made.stage.ended) < count and waited_s < limit_s:
        made.run(5.0)
        waited_s += 5.0
    assert not made.stage.failed
    assert len(made.stage.ended) >= count
    return made.stage.ended


def test_without_an_allocation_a_job_takes_what_there_is() -> None:
    made = cluster(None, jobs=2)
    made.run(5.0)
    assert made.sizes[0] > 1
    made.stage.close()


@pytest.mark.parametrize("name", POLICIES)
def test_all_jobs_end_under_each_policy(name: str) -> None:
    made = cluster(name, jobs=6, steps=150)
    ends(made, 6)
    assert not any(note for observer in made.observers.values() for note in observer.restarts)
    made.stage.close()


@pytest.mark.parametrize("name", POLICIES)
def test_jobs_without_parameter_servers_end_under_each_policy(name: str) -> None:
    made = cluster(name)
    for number in range(5):
        made.admit(dataclasses.replace(elastic_gang(1, 6), job_id=f"j{number}"), number, steps=300)
    made.run(2 * MATCHING_BUDGET_S)
    assert max(made.sizes) > 1
    tasks = [task for job in made.training.values() for task in job.tasks]
    assert all(task.planned.is_plain for task in tasks)
    ends(made, 5)
    assert not any(note for observer in made.observers.values() for note in observer.restarts)
    made.stage.close()


def test_jobs_begin_with_the_least_when_many_come_and_grow_when_others_end() -> None:
    made = cluster("dike", jobs=4, steps=200)
    submit(made, 4)
    made.run(5.0)
    assert all(workers >= 1 for workers in made.sizes), "no job waits for workers that others can spare"
    before = made.sizes[4]
    ends(made, 4)
    made.run(3 * MATCHING_BUDGET_S)
    assert made.sizes[4] > before
    assert "times as fast" in made.observers["j4"].reasons[-1]
    made.stage.close()


def test_a_job_makes_room_for_one_that_comes_and_takes_no_part_in_what_it_decides_itself() -> None:
    made = cluster("drf", jobs=1)
    made.run(10.0)
    alone = made.sizes[0]
    assert alone > 1
    submit(made, 1)
    assert made.training["j1"].need is Need.NOTHING, "no workers are assigned to it yet"
    made.run(2 * INTERVAL_S + 2 * MATCHING_BUDGET_S)
    first, second = made.sizes
    assert 1 <= first < alone
    assert second >= 1
    assert "it is given" in made.observers["j0"].reasons[0]
    assert made.observers["j0"].restarts == []
    made.stage.close()


def test_who_gets_nothing_waits_and_is_told_why() -> None:
    made = cluster("fifo")
    submit(made, 0, least=6)
    submit(made, 1, least=6)
    made.run(20.0)
    assert made.sizes == [6, 0]
    assert made.observers["j1"].waits == ["The allocation currently gives all workers to other jobs."]
    found = explain(JobRecord("j1", JobKind.TRAINING, "", "train.py", {}), made.stage.scheduler.snapshot)
    assert found.verdict is Verdict.TURN
    assert "dike serve --allocation" in found.sentence
    made.stage.scheduler.cancel_job("j0")
    made.run(10.0)
    assert made.workers("j1") == 6
    made.stage.close()


def test_users_get_together_what_their_weights_say() -> None:
    made = cluster("optimus", weight={"rich": 3.0})
    for number, user in enumerate(["rich", "poor", "poor", "poor", "poor"]):
        submit(made, number, user=user)
    made.run(200.0)
    rich, *poor = made.sizes
    assert rich > sum(poor) > 0
    made.stage.close()


def test_a_job_of_a_fixed_size_keeps_it_and_gets_room() -> None:
    made = cluster("drf", jobs=1)
    made.run(10.0)
    alone = made.sizes[0]
    fixed = made.admit(spec(job_id="fixed", min_workers=2, max_workers=2), 1)
    made.run(60.0)
    assert [task.name for task in fixed.tasks if task.planned.role == "worker"] == ["worker:0", "worker:1"]
    assert made.sizes[0] < alone
    before = {task.task_id for task in fixed.tasks}
    made.run(3 * MATCHING_BUDGET_S)
    assert {task.task_id for task in fixed.tasks} == before
    made.stage.close()


def test_a_job_that_is_nearly_done_is_not_changed() -> None:
    made = cluster("drf", jobs=2, steps=150)
    submit(made, 2, steps=130)
    submit(made, 3, steps=120)
    ends(made, 4)
    assert sum(len(observer.resizes) for observer in made.observers.values()) == 0
    made.stage.close()


def test_a_long_job_is_measured_at_other_sizes_before_others_decide_on_it() -> None:
    made = cluster("optimus", jobs=1, sample_runs=2)
    made.run(8.0)
    given = made.sizes[0]
    made.run(120.0)
    reasons = made.observers["j0"].reasons
    assert [reason.startswith("a sample run") for reason in reasons[:3]] == [True, True, False]
    samples = [resize.to_workers for resize in made.observers["j0"].resizes[:2]]
    assert given > samples[0] > samples[1]
    assert made.sizes[0] > samples[1], "it has again what it is given"
    short = cluster("optimus", jobs=1, steps=600, sample_runs=2)
    short.run(60.0)
    assert not any(reason.startswith("a sample run") for reason in short.observers["j0"].reasons)
    unasked = cluster("drf", jobs=1, sample_runs=2)
    unasked.run(60.0)
    assert unasked.observers["j0"].reasons == []
    for one in (made, short, unasked):
        one.stage.close()


def test_a_job_that_cannot_say_what_it_takes_does_not_stop_the_others(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    made = cluster("drf", jobs=1)
    monkeypatch.setattr("framework.training.planning.smallest_job", lambda request: 1 / 0)
    made.admit(spec(job_id="odd", min_workers=40, max_workers=40), 1)
    with caplog.at_level(logging.WARNING):
        made.run(10.0)
    assert made.sizes[0] > 0
    assert "cannot predict what job odd needs: ZeroDivisionError" in caplog.text
    made.stage.close()


def test_a_policy_that_fails_leaves_all_as_it_is(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    made = cluster("drf", jobs=2)
    made.run(10.0)
    before = made.sizes

    def broken(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("framework.scheduler.job_sizes.user_limits", broken)
    submit(made, 2)
    with caplog.at_level(logging.ERROR):
        made.run(2 * MATCHING_BUDGET_S)
    assert made.sizes == [*before, 0]
    assert "the policy drf failed" in caplog.text
    made.stage.close()
