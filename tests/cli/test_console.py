"""What `dike run` says about a plan and about changes of size."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from dike.profile import Api, ModelProfile
from executor.messages import LogChunk
from framework.cli.console import PlainObserver
from framework.training.spec import Resize
from solver.choices import Strategy
from solver.settings import PlanSettings
from tests.training.elastic.elastic_stage import SHARED, heavy
from tests.training.job_stage import JobStage, spec

CONSOLE_WIDTH = 200


def observer(profile: ModelProfile) -> tuple[PlainObserver, io.StringIO]:
    """An observer and what it prints; the chief's output included."""
    text = io.StringIO()
    return PlainObserver(Console(file=text, width=CONSOLE_WIDTH), profile, {"stdout": text, "stderr": text}), text


def planned(profile: ModelProfile, strategy: Strategy, workers: int) -> tuple[JobStage, PlainObserver, io.StringIO]:
    stage = JobStage(spec(profile=profile, planning=PlanSettings(strategy=strategy), max_workers=workers))
    stage.start(2)
    plan = stage.job.result.plan
    assert plan is not None
    assert plan.option.workers == workers
    shown, text = observer(profile)
    shown.planned(plan)
    return stage, shown, text


@pytest.mark.parametrize(
    ("profile", "strategy", "workers", "says"),
    [
        (heavy(Api.KERAS), "ps", 2, "asynchronous"),
        (heavy(Api.GRAPH), "ps", 2, "asynchronous"),
        (heavy(Api.GRAPH, synchronous=True), "ps", 2, ""),
        (SHARED, "allreduce", 2, "synchronous"),
        (SHARED, "one", 1, ""),
        (heavy(Api.KERAS), "ps", 1, ""),
    ],
)
def test_what_several_workers_compute_is_one_line(
    profile: ModelProfile, strategy: Strategy, workers: int, says: str
) -> None:
    _, _, text = planned(profile, strategy, workers)
    lines = [line for line in text.getvalue().splitlines() if line.startswith("dike: training is ")]
    assert len(lines) == bool(says)
    if says:
        assert lines[0].startswith(f"dike: training is {says}: 2 workers ")


def test_output_of_a_follower_is_labelled() -> None:
    stage, shown, text = planned(SHARED, "allreduce", 2)
    text.truncate(0)
    for task in stage.job.tasks:
        shown.log(task, LogChunk(task.task_id, "stdout", 0, b"hello\n"))
    assert text.getvalue().lstrip("\0") == "hello\n[worker:1] hello\n"


@pytest.mark.parametrize(
    ("sizes", "says"),
    [
        ((1, 0, 3, 0), "1 to 3 workers at step 7: 2.0 s"),
        ((3, 0, 1, 0), "3 to 1 workers at step 7: 2.0 s"),
        ((1, 1, 3, 2), "1 to 3 workers and 1 to 2 ps at step 7: 2.0 s"),
    ],
)
def test_a_change_of_size_names_parameter_servers_if_there_are_any(sizes: tuple[int, int, int, int], says: str) -> None:
    shown, text = observer(SHARED)
    shown.resized(Resize(*sizes, "", 7, 2.0))
    assert says in text.getvalue()
