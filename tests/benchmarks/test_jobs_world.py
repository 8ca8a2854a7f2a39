"""Many jobs in virtual time: what a round costs, and that nothing is given out twice or lost."""

from __future__ import annotations

import itertools
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.simulation.jobs.comparison import Sources, Workload, compare
from benchmarks.simulation.jobs.estimates import EstimateSettings
from benchmarks.simulation.jobs.losses import PATIENCE, TrueCurve
from benchmarks.simulation.jobs.machines import Host, Machines
from benchmarks.simulation.jobs.scheduler import SCHEDULERS, scheduler_named
from benchmarks.simulation.jobs.world import JobsOutcome, JobsSettings, JobsWorld
from benchmarks.simulation.world import PolicyViolationError
from tests.benchmarks.jobs_cases import Recorded, job, recording
from tests.solver.solver_cases import profile

TABLES = Path(__file__).parents[2] / "benchmarks" / "data" / "pollux"
TRUTH = JobsSettings(estimates=EstimateSettings(0.0, 0.0))
TWO_GPUS = Machines(count=1, gpus=2, cpus=8)


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Sources:
    """Models of both kinds."""
    profiles = tmp_path_factory.mktemp("profiles")
    (profiles / "resnet.json").write_text(profile(batch_size=16).dumps(), encoding="utf-8")
    tables = tmp_path_factory.mktemp("tables")
    for name in ("cifar10", "bert"):
        (tables / name).symlink_to(TABLES / name)
    return Sources.read(tables, profiles, Machines(count=4))


def simulated(name: str, *arrivals_s: float, machines: Machines = TWO_GPUS, samples: float = 36_000) -> JobsOutcome:
    jobs = [job(number, at_s, samples) for number, at_s in enumerate(arrivals_s)]
    return JobsWorld(jobs, machines, scheduler_named(name), TRUTH, 0).run()


def test_fifo_by_hand() -> None:
    """Jobs of 3600 s with one worker: two run in parallel, the third starts in the round after their ends."""
    outcome = simulated("fifo", 0, 0, 100)
    assert outcome.completion_s == pytest.approx((3630, 3630, 4200 - 100 + 3630))
    assert outcome.makespan_s == pytest.approx(7830)
    assert outcome.gpu_share == pytest.approx((2 * 3630 + 3630) / (2 * 7830))
    assert outcome.resizes == 0


def test_drf_by_hand() -> None:
    """Alone with two workers for a round; then one each; two again in the round after the first has ended."""
    outcome = simulated("drf", 0, 10)
    first_done = 20 * 570 + 10 * 570
    first_ends = 1200 + (36_000 - first_done) / 10
    second_done = 10 * 570 + 10 * 2400
    assert first_ends == pytest.approx(3090)
    second_ends = 3600 + 30 + (36_000 - 10 * (3600 - 630)) / 20
    assert second_done == pytest.approx(10 * (3600 - 630))
    assert outcome.completion_s == pytest.approx((first_ends + 0, second_ends - 10))
    assert outcome.resizes == 2


def test_nothing_happens_before_the_first_arrival_nor_in_gaps() -> None:
    outcome = simulated("fifo", 5_000, 100_000)
    assert outcome.completion_s == pytest.approx((400 + 3630, 200 + 3630))


def test_learning_a_speed_takes_time() -> None:
    alone = simulated("tetris", 0, machines=Machines(count=1, gpus=1))
    assert alone.completion_s == pytest.approx((3630 + 50,))


@pytest.mark.slow
@pytest.mark.parametrize("name", [*SCHEDULERS, "gain/spread/in-turn", "drf/fewest/balanced"])
def test_no_machine_is_overfull_and_every_job_ends(sources: Sources, name: str) -> None:
    machines = sources.machines
    jobs = Workload(jobs=14, per_hour=12).draw(sources.models(3), machines, 3)
    assert {one.model.name for one in jobs} == {"bert", "cifar10", "resnet-async", "resnet-sync"}
    rounds: list[Recorded] = []
    outcome = JobsWorld(jobs, machines, recording(scheduler_named(name), rounds), JobsSettings(), 3).run()
    most = 0
    for of_round in rounds:
        used: dict[int, np.ndarray] = defaultdict(lambda: np.zeros(4))
        needs = {one.id: one.needs for one in of_round.jobs}
        for number, hosts in of_round.hosts.items():
            assert sum(host.workers for host in hosts) <= jobs[number].max_workers
            for host in hosts:
                used[host.machine] += np.array(needs[number].of(host.workers, host.ps))
        assert all((amounts <= machines.capacity).all() for amounts in used.values())
        most = max(most, sum(int(amounts[3]) for amounts in used.values()))
    assert most == 16, "the jobs never filled the cluster"
    assert len(outcome.completion_s) == len(jobs)
    for one, took_s in zip(jobs, outcome.completion_s, strict=True):
        best = one.max_workers * one.model.samples_per_s(((1, min(1, one.model.max_ps)),), one.batch_size)
        assert took_s > one.samples / (4 * best)


@pytest.mark.slow
def test_the_same_seed_gives_the_same_and_another_one_does_not(sources: Sources) -> None:
    workload = Workload(jobs=8, per_hour=12)
    first, again = (compare(sources, workload, ["optimus", "drf"], JobsSettings(), range(2)) for _ in range(2))
    assert first == again
    assert first[0].outcomes[0] != first[0].outcomes[1]
    # A policy sees the same jobs whatever others are compared with it.
    (alone,) = compare(sources, workload, ["drf"], JobsSettings(), range(2))
    assert alone == first[1]


def test_giving_out_too_much_is_refused() -> None:
    overfull = replace(scheduler_named("fifo"), place=lambda needs, counts, free: (Host(0, counts[0], 0),))
    jobs = [job(0, requested=3)]
    with pytest.raises(PolicyViolationError, match="fifo puts more on machine 0 than it has at 0 s"):
        JobsWorld(jobs, TWO_GPUS, replace(overfull, allocate=lambda *_: {0: (3, 0)}), TRUTH, 0).run()
    idle = replace(overfull, allocate=lambda *_: {})
    with pytest.raises(PolicyViolationError, match="fifo leaves 1 jobs waiting at 0 s"):
        JobsWorld(jobs, TWO_GPUS, idle, TRUTH, 0).run()


def test_the_rule_of_convergence_ends_a_curve_where_it_ends() -> None:
    for seed in range(20):
        curve = TrueCurve.draw(np.random.default_rng(seed), 0.0)
        losses = [curve.loss(epoch / curve.epochs) for epoch in range(curve.epochs + 1)]
        slow = [(before - after) / before < curve.threshold for before, after in itertools.pairwise(losses)]
        ends = next(at for at in range(PATIENCE, len(slow) + 1) if all(slow[at - PATIENCE : at]))
        assert ends == curve.epochs
