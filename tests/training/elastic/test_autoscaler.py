"""Which size a job changes to, from what is known of it and of others, and how its speed is learned."""

from __future__ import annotations

import pytest

from dike.profile import Api
from framework.mesos.offers import by_agent
from framework.training.elastic.autoscaler import (
    MAX_SPEED_WINDOW_S,
    MIN_SPEED_WINDOW_S,
    NEAR_WORKERS,
    SPEED_WARM_UP_S,
    JobModels,
    Situation,
    SpeedMeter,
    decide,
    work_balance,
    worker_counts,
)
from framework.training.elastic.layout import Size
from tests.mesos.fake_mesos import FakeMesos
from tests.training.elastic.elastic_stage import ElasticStage, elastic, heavy

NOW = Size(2, 1)
SPEC = elastic(1, 8, profile=heavy(Api.GRAPH))
SIZES = [Size(workers, 1) for workers in (1, 3, 4)]


def linear(size: Size) -> float:
    return 100.0 * size.workers


def situation(**changes: object) -> Situation:
    values: dict[str, object] = {"now": NOW, "sizes": SIZES, "samples_left": 20_000.0, "cost_s": 10.0, **changes}
    return Situation(**values)  # type: ignore[arg-type]


def learned() -> JobModels:
    """What is known of a job at its start."""
    stage = ElasticStage(SPEC)
    stage.start(1)
    assert stage.job.result.plan is not None
    return JobModels(SPEC, stage.job.result.plan, [agent.node_class() for agent in by_agent([FakeMesos().offer(0)])])


def test_a_job_grows_to_where_it_is_fastest() -> None:
    choice = decide(situation(), linear)
    assert choice is not None
    assert choice.size == Size(4, 1)
    assert "saves 50 s" in choice.reason


@pytest.mark.parametrize(("cost_s", "changes"), [(49.0, True), (50.0, False)])
def test_the_saving_must_exceed_the_cost(cost_s: float, changes: bool) -> None:
    assert (decide(situation(cost_s=cost_s), linear) is not None) is changes


def test_a_job_that_is_nearly_done_stays() -> None:
    assert decide(situation(samples_left=100.0), linear) is None


def test_a_gain_within_the_error_is_none() -> None:
    assert decide(situation(samples_left=1e9), lambda size: 100.0 + size.workers) is None


def test_of_sizes_that_are_alike_the_smallest_is_taken() -> None:
    speeds = {2: 100.0, 3: 199.0, 4: 200.0}
    choice = decide(situation(sizes=[Size(3, 1), Size(4, 1)]), lambda size: speeds[size.workers])
    assert choice is not None
    assert choice.size == Size(3, 1)


def test_a_job_shrinks_where_fewer_workers_are_faster() -> None:
    choice = decide(situation(), lambda size: 100.0 / size.workers)
    assert choice is not None
    assert choice.size == Size(1, 1)


def test_a_change_is_not_taken_back() -> None:
    """Whatever the speeds: after a change, the same knowledge asks for no other one."""
    for speed in (linear, lambda size: 100.0 / size.workers, lambda size: 100.0 - (size.workers - 3) ** 2):
        first = decide(situation(sizes=[Size(w, 1) for w in (1, 3, 4)]), speed)
        if first is not None:
            sizes = [Size(w, 1) for w in (1, 2, 3, 4) if w != first.size.workers]
            assert decide(situation(now=first.size, sizes=sizes), speed) is None


def test_a_job_shrinks_for_who_waits_however_little_is_left() -> None:
    choice = decide(situation(now=Size(4, 1), samples_left=0.0, fair_workers=1, waiting=("search",)), linear)
    assert choice is not None
    assert choice.size == Size(1, 1)
    assert "search waits" in choice.reason


def test_a_job_within_its_share_keeps_it() -> None:
    assert decide(situation(fair_workers=2, waiting=("search",)), linear) is None


def test_the_least_size_is_kept_even_above_the_share() -> None:
    assert decide(situation(sizes=[Size(3, 1), Size(4, 1)], fair_workers=0, waiting=("search",)), linear) is None


def test_a_job_grows_no_further_than_its_share_while_others_want_more() -> None:
    choice = decide(situation(fair_workers=3), linear)
    assert choice is not None
    assert choice.size == Size(3, 1)


def test_what_is_given_bounds_the_size_and_a_larger_one_has_to_pay() -> None:
    given = decide(situation(allotted=Size(3, 1)), linear)
    assert given is not None
    assert given.size == Size(3, 1)
    assert not given.needs_no_offers
    assert decide(situation(allotted=Size(3, 1), samples_left=100.0), linear) is None
    assert decide(situation(allotted=NOW), linear) is None
    assert decide(situation(allotted=Size(2, 2)), lambda size: 1.0) is None


def test_what_is_not_given_any_more_is_given_up_at_once_whatever_is_left() -> None:
    given = decide(situation(allotted=Size(1, 1), samples_left=0.0), linear)
    assert given is not None
    assert (given.size, given.needs_no_offers) == (Size(1, 1), True)
    assert "it is given 1 worker and 1 ps" in given.reason
    others = decide(situation(allotted=Size(4, 1), fair_workers=1, waiting=("a search",)), linear)
    assert others is not None
    assert others.size == Size(1, 1), "other frameworks come first"


def test_workers_that_divide_the_step_evenly_are_worth_more() -> None:
    assert [work_balance(4, Size(workers, 1)) for workers in (1, 2, 4)] == [1.0, 1.0, 1.0]
    assert work_balance(4, Size(3, 1)) == pytest.approx(2 / 3)
    assert work_balance(None, Size(3, 1)) == 1.0


def test_large_jobs_think_of_few_numbers() -> None:
    counts = worker_counts(500, 1, 1024, None)
    assert {1, 1024, *range(500 - NEAR_WORKERS, 500 + NEAR_WORKERS + 1)} <= set(counts)
    assert len(counts) < 80
    assert worker_counts(2, 1, 4, 4) == [1, 2, 3, 4]
    assert {1, 2, 4, 8, 16, 32, 64} <= set(worker_counts(30, 1, 64, 64))


def test_speed_is_known_after_a_while_and_is_the_newest() -> None:
    meter = SpeedMeter()
    for tenth in range(round((SPEED_WARM_UP_S + MIN_SPEED_WINDOW_S) * 10)):
        meter.add(tenth / 10, tenth)
        assert meter.steps_per_s is None
    for tenth in range(30, 60):
        meter.add(tenth / 10, tenth)
    assert meter.steps_per_s is not None
    assert abs(meter.steps_per_s - 10) < 1e-6
    for second in range(6, 6 + 2 * round(MAX_SPEED_WINDOW_S)):
        meter.add(second, 60 + 2 * (second - 6))
    assert abs(meter.steps_per_s - 2) < 1e-6
    meter.restart()
    assert meter.steps_per_s is None


def test_what_is_left_is_what_the_script_says_or_else_as_much_as_there_was() -> None:
    models = learned()
    models.progressed(0.0, 100, None)
    assert models.samples_left(250) == 150 * 64
    assert models.samples_left(None) == 100 * 64
    assert models.samples_left(50) == 0


def test_a_measured_speed_scales_what_was_predicted() -> None:
    models = learned()
    now = Size(1, 1)
    ratio = models.samples_per_s(Size(2, 1)) / models.samples_per_s(now)
    assert not models.measure(now)
    for tenth in range(60):
        models.progressed(tenth / 10, tenth, None)
    assert models.measure(now)
    assert abs(models.samples_per_s(now) - 640) < 7
    assert abs(models.samples_per_s(Size(2, 1)) / models.samples_per_s(now) - ratio) < 0.05
