"""Resources allocated by marginal gain: nothing is overbooked, no job starves, gains decide."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dike.exceptions import BadInputError
from solver.jobs.free_capacity import NOTHING, plus
from solver.online import OnlineJob, allocate
from solver.online.speed import Counts
from solver.resources import Amounts
from tests.properties import examples

WORKER: Amounts = (1000, 1024, 0, 1)
PS: Amounts = (500, 512, 0, 0)


def _speeds(t0: float, t1: float, t2: float, workers: int = 8, ps: int = 4) -> np.ndarray:
    w, p = np.meshgrid(np.arange(1, workers + 1), np.arange(1, ps + 1))
    return 1 / (t0 / w + t1 + t2 * w / p)


def _job(name: str, samples_left: float = 1000.0, t1: float = 0.01, **changes: object) -> OnlineJob:
    values: dict[str, object] = {"samples_per_s": _speeds(1.0, t1, 0.001), "worker": WORKER, "ps": PS}
    return OnlineJob(name, samples_left, **{**values, **changes})  # type: ignore[arg-type]


def _total(gpus: int) -> Amounts:
    return 100_000, 1 << 20, 0, gpus


def _used(jobs: list[OnlineJob], counts: dict[str, Counts]) -> Amounts:
    used = NOTHING
    for job in jobs:
        if job.name in counts:
            workers, ps = counts[job.name]
            used = plus(plus(plus(used, job.worker, workers), job.ps, ps), job.chief)
    return used


@st.composite
def job_lists(draw: st.DrawFn) -> list[OnlineJob]:
    return [
        _job(
            f"job{index}",
            draw(st.floats(0, 1e6)),
            draw(st.floats(0, 0.5)),
            min_workers=draw(st.integers(1, 6)),
            weight=draw(st.sampled_from([1.0, 1.0, 5.0])),
            young=draw(st.booleans()),
            chief=draw(st.sampled_from([NOTHING, (1000, 512, 0, 0)])),
        )
        for index in range(draw(st.integers(1, 6)))
    ]


@examples(60)
@given(jobs=job_lists(), gpus=st.integers(6, 40), cpus=st.integers(8, 60))
def test_nothing_is_overbooked_and_no_job_starves(jobs: list[OnlineJob], gpus: int, cpus: int) -> None:
    total = (cpus * 1000, 1 << 20, 0, gpus)
    now, ran = jobs, []
    for _ in jobs:
        counts = allocate(now, total)
        assert all(have >= need for have, need in zip(total, _used(now, counts), strict=True))
        for job in now:
            if job.name in counts:
                workers, ps = counts[job.name]
                assert job.min_workers <= workers <= 8
                assert 1 <= ps <= 4
        ran.append(set(counts))
        now = [dataclasses.replace(job, waited=0 if job.name in counts else job.waited + 1) for job in now]
    # Each fits alone, so in as many rounds as there are jobs each has run.
    assert set.union(*ran) == {job.name for job in jobs}


def test_no_job_exceeds_its_minimum_while_a_minimum_that_fits_waits() -> None:
    jobs = [_job("long", 1e9), _job("short", 10.0), _job("wide", 10.0, min_workers=3)]
    assert {name: workers for name, (workers, _) in allocate(jobs, _total(5)).items()} == {
        "long": 1,
        "short": 1,
        "wide": 3,
    }
    counts = allocate(jobs, _total(4))
    assert "wide" not in counts
    assert counts["long"][0] == 3


def test_resources_go_where_they_save_most() -> None:
    counts = allocate([_job("short", 1000.0), _job("long", 50_000.0)], _total(8))
    assert counts["long"][0] > counts["short"][0]
    does_not_scale = _job("does not", samples_per_s=_speeds(0.01, 1.0, 0.001))
    counts = allocate([_job("scales"), does_not_scale], _total(8))
    assert counts["scales"][0] > counts["does not"][0]
    counts = allocate([_job("light", 1000.0), _job("heavy", 1000.0, weight=50.0)], _total(8))
    assert counts["heavy"][0] > counts["light"][0]


def test_one_by_one_it_is_the_greedy_of_the_paper() -> None:
    """With speeds of diminishing returns in workers, and one ps, each worker goes where it gains most."""
    speeds = {name: _speeds(1.0, t1, 0.0, ps=1) for name, t1 in (("a", 0.05), ("b", 0.3), ("c", 0.0))}
    left = {"a": 900.0, "b": 2000.0, "c": 300.0}
    jobs = [_job(name, left[name], samples_per_s=speeds[name]) for name in speeds]
    workers = dict.fromkeys(speeds, 1)

    def gain(name: str) -> float:
        at = workers[name]
        return left[name] * (1 / speeds[name][0, at - 1] - 1 / speeds[name][0, at]) if at < 8 else 0.0

    for _ in range(9):
        best = max(workers, key=gain)
        workers[best] += 1
    assert {name: counts[0] for name, counts in allocate(jobs, _total(12)).items()} == workers


def test_young_jobs_come_second_where_gains_are_close() -> None:
    twins = [_job("young", young=True), _job("old")]
    assert {name: counts[0] for name, counts in allocate(twins, _total(3)).items()} == {"young": 1, "old": 2}
    other = [_job("young", 1100.0, young=True), _job("old")]
    assert allocate(other, _total(3))["young"][0] == 2


def test_no_task_is_added_that_does_not_gain() -> None:
    slows_down = _job("a", samples_per_s=_speeds(1.0, 0.0, 10.0, ps=1))
    assert allocate([slows_down], _total(8)) == {"a": (1, 1)}


def test_it_is_as_good_as_the_best_of_all_allocations_or_nearly() -> None:
    random = np.random.default_rng(0)
    ratios = []
    for _ in range(20):
        jobs = [
            _job(str(index), 10 ** random.uniform(2, 4), samples_per_s=_speeds(1, random.uniform(0, 0.3), 0.01, 6, 1))
            for index in range(3)
        ]
        counts = allocate(jobs, _total(9))

        def seconds(workers: tuple[int, ...], jobs: list[OnlineJob] = jobs) -> float:
            return sum(job.samples_left / job.samples_per_s[0, w - 1] for job, w in zip(jobs, workers, strict=True))

        best = min(seconds(w) for w in itertools.product(range(1, 7), repeat=3) if sum(w) <= 9)
        ratios.append(seconds(tuple(counts[job.name][0] for job in jobs)) / best)
    assert max(ratios) < 1.02


@pytest.mark.parametrize(
    "changes",
    [
        {"samples_left": float("inf")},
        {"samples_left": -1.0},
        {"weight": 0.0},
        {"samples_per_s": np.zeros((1, 1))},
        {"samples_per_s": np.zeros((0, 1))},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_jobs_that_make_no_sense_are_refused(changes: dict[str, object]) -> None:
    with pytest.raises(BadInputError, match="Job 'a'"):
        dataclasses.replace(_job("a"), **changes)


def test_names_are_unique() -> None:
    with pytest.raises(BadInputError, match="Two jobs are called 'a'"):
        allocate([_job("b"), _job("a"), _job("a")], _total(4))


def test_gangs_get_workers_and_no_parameter_servers() -> None:
    row = _speeds(1.0, 0.01, 0.0, ps=1)
    gang = _job("gang", samples_per_s=row, ps=(1 << 30, 0, 0, 0), is_gang=True, min_workers=2)
    kept = dataclasses.replace(gang, name="kept", kept=(3, 0))
    counts = allocate([gang, kept, _job("other")], _total(8))
    assert (counts["gang"][1], counts["kept"][1]) == (0, 0)
    assert counts["kept"][0] >= 3
    assert counts["other"][1] >= 1
    assert sum(workers for workers, _ in counts.values()) == 8
    with pytest.raises(BadInputError, match="the speeds of a gang must be a single row"):
        _job("gang", is_gang=True)
