"""What jobs are drawn, and what is believed of them."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean

import numpy as np
import pytest

from benchmarks.simulation.jobs.estimates import (
    EstimateSettings,
    FittedProgress,
    FittedSpeeds,
    PerturbedSpeeds,
    make_progress,
    make_speeds,
)
from benchmarks.simulation.jobs.machines import Machines
from benchmarks.simulation.jobs.workload import Request, make_jobs, poisson_requests, read_trace, window
from tests.benchmarks.jobs_cases import LinearModel, job

MACHINE = (8000, 8192, 0, 4)


def test_poisson_arrivals() -> None:
    requests = poisson_requests(4000, 12, ["a", "b"], np.random.default_rng(0))
    times_s = np.array([request.arrival_s for request in requests])
    assert times_s[0] == 0
    gaps_s = np.diff(times_s)
    # Of the exponential distribution the mean is the standard deviation.
    assert gaps_s.mean() == pytest.approx(300, rel=0.06)
    assert gaps_s.std() == pytest.approx(300, rel=0.08)
    assert fmean(request.model == "a" for request in requests) == pytest.approx(0.5, abs=0.03)


def test_a_trace_says_what_it_knows_and_the_rest_is_drawn(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(
        "arrival_s,model,samples,workers,batch_size\n90,linear,,,\n30,linear,5e5,3,20\n60,linear,,4,\n",
        encoding="utf-8",
    )
    trace = read_trace(path)
    assert [request.arrival_s for request in trace] == [30, 60, 90]
    assert trace[0] == Request(30, "linear", 5e5, 3, 20)
    assert trace[2] == Request(90, "linear")
    jobs = make_jobs(trace, {"linear": LinearModel()}, Machines(), 2, np.random.default_rng(1))
    assert (jobs[0].samples, jobs[0].batch_size, jobs[0].requested, jobs[0].max_workers) == (5e5, 20, 2, 2)
    for drawn in jobs[1:]:
        assert 0.5 * 36_000 <= drawn.samples <= 10 * 36_000
        assert drawn.samples <= drawn.limit_samples <= 3 * drawn.samples
    # What one line says changes no other job.
    silent = make_jobs(
        [Request(30, "linear"), *trace[1:]], {"linear": LinearModel()}, Machines(), 2, np.random.default_rng(1)
    )
    assert silent[1:] == jobs[1:]
    assert window(trace, 2, np.random.default_rng(0))[0].arrival_s == 0
    assert {window(trace, 2, np.random.default_rng(seed))[1].arrival_s for seed in range(9)} == {30}
    assert {window(trace, 1, np.random.default_rng(seed))[0].workers for seed in range(30)} == {3, 4, None}


def test_no_job_requests_more_than_all_machines_hold() -> None:
    trace = [Request(0, "linear", workers=4)]
    for mem_gib, requested in ((192, 4), (1.5, 2)):
        machines = Machines(count=2, mem_gib=mem_gib)
        (job,) = make_jobs(trace, {"linear": LinearModel()}, machines, 8, np.random.default_rng(1))
        assert job.requested == requested


def test_beliefs_with_errors_are_as_wrong_as_they_are_to_be() -> None:
    rng = np.random.default_rng(0)
    settings = EstimateSettings(convergence_error=0.2, speed_error=0.1)
    estimates = [make_progress(job(number), settings, rng) for number in range(20)]
    assert {round(one.samples_left(0.0) / 36_000, 6) for one in estimates} == {0.8, 1.2}
    assert {round(one.samples_left(0.5) / 18_000, 6) for one in estimates} == {0.9, 1.1}
    table = make_speeds(job(0), MACHINE, settings, rng, sharding="greedy").table()
    exact = PerturbedSpeeds(job(0), MACHINE, 0.0, rng, sharding="greedy").table()
    # Four workers fit one machine; more are slower by a fifth.
    assert exact.tolist() == [[10, 20, 30, 40, 40, 48, 56, 64]]
    assert set(np.round(table / exact, 6).ravel()) == {0.9, 1.1}


def test_the_fitted_length_approaches_the_truth_as_the_job_proceeds() -> None:
    one = job(0)
    progress = FittedProgress(one, np.random.default_rng(0))
    assert progress.young
    assert progress.samples_left(0.0) == one.limit_samples
    for done in range(10, 81, 10):
        progress.observe((done - 10) / 100, done / 100)
    assert not progress.young
    assert progress.samples_left(0.8) == pytest.approx(0.2 * one.samples, rel=0.5)


def test_fitted_speeds_are_near_the_truth_after_sample_runs() -> None:
    exact = PerturbedSpeeds(job(0), MACHINE, 0.0, np.random.default_rng(0), sharding="greedy").table()
    speeds = FittedSpeeds(job(0), MACHINE, np.random.default_rng(0), sharding="greedy")
    assert np.abs(speeds.table() / exact - 1).max() < 0.3
    for _ in range(20):
        speeds.observe((6, 0), 48.0)
    assert speeds.table()[0, 5] == pytest.approx(48, rel=0.2)
