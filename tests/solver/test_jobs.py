"""Many jobs on one cluster: nothing is overbooked, no job starves, and the makespan is near the minimum."""

from __future__ import annotations

import dataclasses
import itertools
import json
import random
import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.many_jobs import least_total_s, mixed_cluster, random_jobs, small_case, uniform_cluster
from dike.exceptions import BadInputError
from dike.profile import Api, ModelProfile
from solver import Cluster, NodeClass, PlanRequest, make_plan
from solver.choices import Order
from solver.gang import evaluated
from solver.hardware import known_hardware
from solver.jobs import JobsPlan, PlanJob, plan_jobs
from solver.jobs.forms import FormCatalogue
from solver.jobs.free_capacity import NOTHING, FreeCapacity, plus
from solver.jobs.packing import Packer
from solver.jobs.speed import even_spread
from solver.nodes import node_kinds
from solver.request import scenario_of
from solver.resources import Amounts, WorkerShape
from solver.units import GIB, MIB
from tests.properties import examples
from tests.solver.solver_cases import MB, digits, k80, machines, profile

MODELS = (
    dataclasses.replace(profile(), why_not_split=""),
    profile([400 * MB, 4 * MB], flops=2e9),
    profile([MB] * 20, api=Api.GRAPH, synchronous=True, flops=1e9),
    dataclasses.replace(digits(), why_not_split="", synced_layers=2),
)

node_classes = st.builds(
    NodeClass,
    name=st.just("set later"),
    count=st.integers(1, 3),
    cpus=st.sampled_from([1.0, 2.5, 8.0, 16.0]),
    mem_bytes=st.sampled_from([2, 8, 32]).map(lambda gib: gib * GIB),
    gpus=st.integers(0, 4),
    gpu_model=st.sampled_from(["K80", "V100"]),
    network_gbps=st.sampled_from([1.0, 10.0, 25.0]),
    rack=st.sampled_from(["r1", "r2"]),
)


@st.composite
def clusters(draw: st.DrawFn) -> Cluster:
    nodes = draw(st.lists(node_classes, min_size=1, max_size=4))
    named = tuple(NodeClass(**{**vars(node), "name": f"class{i}"}) for i, node in enumerate(nodes))
    return Cluster(named, across_racks_gbps=draw(st.sampled_from([None, 10.0])))


@st.composite
def job_lists(draw: st.DrawFn) -> list[PlanJob]:
    jobs = []
    for index in range(draw(st.integers(1, 6))):
        least = draw(st.integers(1, 3))
        model = draw(st.sampled_from(MODELS))
        gpus = draw(st.sampled_from([None, None, 0, 1, 2]))
        is_gang = model.can_split and gpus != 2 and draw(st.booleans())
        jobs.append(
            PlanJob(
                name=f"job{index}",
                profile=model,
                min_workers=least,
                max_workers=draw(st.none() | st.integers(least, 8)),
                steps=draw(st.sampled_from([100, 10_000])),
                weight=draw(st.sampled_from([1.0, 1.0, 3.0])),
                gpus_per_worker=gpus,
                strategy="allreduce" if is_gang else "ps",
            )
        )
    return jobs


def _left_over(plan: JobsPlan, cluster: Cluster) -> dict[str, list[float]]:
    """What is free on each machine, added up task by task; asserts that the plan's own sums say the same."""
    left = {
        name: [node.cpus * 1000, node.mem_bytes // MIB, node.disk_bytes // MIB, node.gpus]
        for node in cluster.nodes
        for name in node.node_names
    }
    for job in plan.placed:
        option, seen = job.option, set()
        for part in job.placement:
            assert part.workers + part.ps + part.chief > 0
            tasks = [option.worker] * part.workers + [option.ps_task] * part.ps
            if part.chief:
                assert option.chief is not None
                tasks.append(option.chief)
            assert part.gpus == sum(task.gpus for task in tasks)
            if job.method == "optimus":
                assert part.cpus == pytest.approx(sum(task.cpus for task in tasks))
                assert part.mem_mb == sum(task.mem_mb for task in tasks)
                assert part.disk_mb == sum(task.disk_mb for task in tasks)
            for machine in part.machines:
                assert machine not in seen
                seen.add(machine)
                for resource, amount in enumerate((part.cpus * 1000, part.mem_mb, part.disk_mb, part.gpus)):
                    left[machine][resource] -= amount
        for role, count in (("workers", option.workers), ("ps", option.ps), ("chief", int(option.chief is not None))):
            assert sum(getattr(part, role) * len(part.machines) for part in job.placement) == count
    return left


def _check(plan: JobsPlan, jobs: list[PlanJob], cluster: Cluster) -> dict[str, list[float]]:
    left = _left_over(plan, cluster)
    assert min(min(amounts) for amounts in left.values()) >= -1e-6
    names = {job.name: job for job in jobs}
    assert sorted([job.name for job in plan.placed] + [job.name for job in plan.unplaced]) == sorted(names)
    model_of = {name: node.gpu_model for node in cluster.nodes for name in node.node_names}
    for placed in plan.placed:
        job = names[placed.name]
        assert job.min_workers <= placed.option.workers <= (job.max_workers or 10**6)
        assert placed.samples_per_s > 0
        assert placed.remaining_s == pytest.approx(job.steps * job.profile.batch_size / placed.samples_per_s)
        if placed.method == "optimus" and placed.option.worker.gpus:
            used = {model_of[name] for part in placed.placement if part.workers for name in part.machines}
            assert used == {placed.gpu_model}
    assert plan.gpus_used == sum(job.option.workers * job.option.worker.gpus for job in plan.placed)
    return left


def _minimum_fits(job: PlanJob, jobs: list[PlanJob], cluster: Cluster, left: dict[str, list[float]]) -> bool:
    """Tries every machine for the ps and the chief, and counts the workers that then fit."""
    kinds = node_kinds(cluster)
    kind_of = {name: index for index, kind in enumerate(kinds) for name in kind.names}
    for form in FormCatalogue(jobs, cluster, kinds, known_hardware()).forms(job):
        helpers = [form.needs.ps[0]] + ([form.needs.chief] if form.needs.chief != NOTHING else [])
        for hosts in itertools.product(left, repeat=len(helpers)):
            free = {name: list(amounts) for name, amounts in left.items()}
            for host, need in zip(hosts, helpers, strict=True):
                free[host] = [have - amount for have, amount in zip(free[host], need, strict=True)]
            if any(min(amounts) < -1e-6 for amounts in free.values()):
                continue
            workers = sum(
                min(
                    int((have + 1e-6) // need) for have, need in zip(free[name], form.needs.worker, strict=True) if need
                )
                for name in free
                if form.usable[kind_of[name]]
            )
            if workers >= job.min_workers:
                return True
    return False


@examples(20)
@given(jobs=job_lists(), cluster=clusters())
def test_by_gain_nothing_is_overbooked_and_only_what_cannot_fit_waits(jobs: list[PlanJob], cluster: Cluster) -> None:
    plan = plan_jobs(jobs, cluster)
    left = _check(plan, jobs, cluster)
    for waiting in plan.unplaced:
        assert waiting.reason.endswith(".")
        job = next(job for job in jobs if job.name == waiting.name)
        assert not _minimum_fits(job, jobs, cluster, left)
    again = plan_jobs(jobs, cluster)
    assert (again.placed, again.unplaced) == (plan.placed, plan.unplaced)
    json.dumps(plan.to_json(), allow_nan=False)


@examples(30)
@given(jobs=job_lists(), cluster=clusters())
def test_in_the_given_order_without_exact_planning(jobs: list[PlanJob], cluster: Cluster) -> None:
    # Additional empty machines, enough of them that planning exactly would take too long.
    tiny = NodeClass(name="tiny", count=300, cpus=0.001, mem_bytes=MIB, disk_bytes=MIB)
    larger = Cluster((*cluster.nodes, tiny), across_racks_gbps=cluster.across_racks_gbps)
    plan = plan_jobs(jobs, larger, "given")
    assert {job.method for job in plan.placed} <= {"optimus"}
    left = _check(plan, jobs, larger)
    holding = {name: amounts for name, amounts in left.items() if not name.startswith("tiny")}
    for waiting in plan.unplaced:
        job = next(job for job in jobs if job.name == waiting.name)
        assert not _minimum_fits(job, jobs, larger, holding)


@pytest.mark.slow
def test_in_the_given_order_each_job_is_planned_exactly_on_what_is_left() -> None:
    cluster = Cluster((*k80(3).nodes, NodeClass(name="cpu", count=2, cpus=8, mem_bytes=32 * GIB)))
    jobs = [
        PlanJob("a", MODELS[0], max_workers=6),
        PlanJob("b", MODELS[3]),
        PlanJob("c", MODELS[2], min_workers=5),
    ]
    plan = plan_jobs(jobs, cluster, "given")
    _check(plan, jobs, cluster)
    assert [job.method for job in plan.placed] == ["exact"] * len(plan.placed)
    alone = make_plan(PlanRequest(MODELS[0], cluster, max_workers=6, max_gpus_per_worker=1))
    assert plan.placed[0].samples_per_s == pytest.approx(alone.samples_per_s)
    assert plan.placed[0].step_time_s == pytest.approx(alone.step_time_s.total)


@pytest.mark.parametrize("model", MODELS, ids=["resnet", "large", "graph", "digits"])
def test_the_table_says_what_an_even_placement_reaches(model: object) -> None:
    job = PlanJob("a", model, max_workers=12)  # type: ignore[arg-type]
    cluster = k80(16, cpus=16.0)
    kinds = node_kinds(cluster)
    (form, *_) = FormCatalogue([job], cluster, kinds, known_hardware()).forms(job)
    equal = [ps for ps in range(1, form.table.max_ps + 1) if form.scenario.shards(ps).byte_imbalance == 1]
    assert equal
    for workers, ps in itertools.product(range(1, 13), equal):
        placement = Packer(FreeCapacity(kinds)).place(form, workers, ps)
        assert placement is not None
        assert form.table.s_per_sample(workers, ps) == pytest.approx(1 / placement.samples_per_s)


@given(workers=st.integers(0, 40), ps=st.integers(0, 40), count=st.integers(1, 80))
def test_an_even_spread_deals_everything_out(workers: int, ps: int, count: int) -> None:
    groups = even_spread(workers, ps, count)
    assert sum(n * w for n, w, _ in groups) == workers
    assert sum(n * p for n, _, p in groups) == ps
    assert sum(n for n, _, _ in groups) <= count
    assert all(
        workers // count <= w <= -(-workers // count) and ps // count <= p <= -(-ps // count) for _, w, p in groups
    )


@examples(50)
@given(cluster=clusters(), seed=st.integers(0, 2**32))
def test_free_capacity_counts_what_looking_at_every_machine_counts(cluster: Cluster, seed: int) -> None:
    random_, kinds = random.Random(seed), node_kinds(cluster)
    free = FreeCapacity(kinds)
    left = [free.free_on(machine) for machine in range(len(free.names))]
    taken: list[tuple[int, Amounts]] = []
    for _ in range(40):
        machine = random_.randrange(len(left))
        need = tuple(random_.randint(0, have) // random_.choice([1, 2, 4]) for have in left[machine])
        if taken and random_.random() < 0.4:
            machine, need = taken.pop(random_.randrange(len(taken)))
            free.release(machine, need)
            left[machine] = plus(left[machine], need)
        else:
            free.reserve(machine, need)  # type: ignore[arg-type]
            taken.append((machine, need))  # type: ignore[arg-type]
            left[machine] = plus(left[machine], need, -1)  # type: ignore[arg-type]
    assert [free.free_on(machine) for machine in range(len(left))] == left
    usable = free.anywhere.copy()
    usable[0] = False
    task: Amounts = (500, 512, 64, 1)
    allowed = [machine for machine in range(len(left)) if usable[free.kind_of[machine]]]
    fitting = [machine for machine in allowed if all(h >= n for h, n in zip(left[machine], task, strict=True))]
    found = [machine for row in free.holding(task, usable) for machine in free.machines(row, 10**6)]
    assert sorted(found) == fitting
    rooms = sum(min(h // n for h, n in zip(left[machine], task, strict=True)) for machine in allowed)
    assert int((free.capacity(task, usable).clip(0) * free.counts).sum()) == rooms
    assert free.total(usable) == tuple(sum(left[machine][r] for machine in allowed) for r in range(4))


def test_machines_stay_what_they_are_while_their_rows_move() -> None:
    """Ever more classes of free resources, of three GPU models in turn."""
    cluster = Cluster(tuple(k80(50, name=name, gpu_model=name).nodes[0] for name in ("K80", "V100", "P100")))
    free = FreeCapacity(node_kinds(cluster))
    left = [free.free_on(machine) for machine in range(150)]
    for machine in (index % 3 * 50 + index // 3 for index in range(150)):
        need: Amounts = (10 * machine, machine, 1, machine % 3)
        free.reserve(machine, need)
        left[machine] = plus(left[machine], need, -1)
    assert [free.free_on(machine) for machine in range(150)] == left
    for kind in range(3):
        usable = np.arange(3) == kind
        need = (7000, 32_000, 0, 3)
        found = {machine for row in free.holding(need, usable) for machine in free.machines(row, 50)}
        fitting = {
            machine
            for machine in range(kind * 50, kind * 50 + 50)
            if all(have >= amount for have, amount in zip(left[machine], need, strict=True))
        }
        assert found == fitting
        beside: Amounts = (1000, 0, 0, 0)
        rooms = free.capacity(need, usable, beside)
        for row in range(len(rooms)):
            for machine in free.machines(row, 50):
                one = zip(left[machine], beside, need, strict=True)
                room = min((have - own) // amount for have, own, amount in one if amount)
                assert rooms[row] == (room if machine // 50 == kind else 0)


@pytest.mark.slow
def test_no_job_starves_while_another_grows() -> None:
    cluster = k80(2, cpus=16.0)
    jobs = [PlanJob(f"job{i}", MODELS[0], steps=10 ** (i + 1)) for i in range(8)]
    plan = plan_jobs(jobs, cluster)
    assert [job.option.workers for job in plan.placed] == [1] * 8
    more = plan_jobs([*jobs, PlanJob("late", MODELS[0]), PlanJob("urgent", MODELS[0], weight=5.0)], cluster)
    assert [job.name for job in more.unplaced] == ["job7", "late"]
    assert all("GPU" in job.reason and "short" in job.reason for job in more.unplaced)


def test_longer_jobs_and_heavier_ones_get_more() -> None:
    cluster = k80(3, cpus=16.0)
    for longer in (PlanJob("b", MODELS[0], steps=100_000), PlanJob("b", MODELS[0], weight=10.0)):
        short, long = plan_jobs([PlanJob("a", MODELS[0]), longer], cluster).placed
        assert long.option.workers > short.option.workers


def test_jobs_spread_over_gpu_models() -> None:
    cluster = Cluster((*k80(4).nodes, *k80(1, name="v100", gpu_model="V100").nodes))
    plan = plan_jobs([PlanJob(f"job{i}", MODELS[0], max_workers=8) for i in range(4)], cluster)
    assert {job.gpu_model for job in plan.placed} == {"K80", "V100"}
    assert len(plan.unplaced) == 0


def test_the_time_limit_leaves_everyone_the_minimum() -> None:
    jobs = random_jobs(20, 2, 8, np.random.default_rng(0))
    plan = plan_jobs(jobs, uniform_cluster(10), time_limit_s=1e-9)
    assert not plan.complete
    assert [job.option.workers for job in plan.placed] == [1] * 20
    assert plan_jobs(jobs, uniform_cluster(10)).complete


def test_a_minimum_above_the_width_of_the_tables() -> None:
    (placed,) = plan_jobs([PlanJob("a", MODELS[2], min_workers=1030)], k80(300, cpus=16.0)).placed
    assert placed.option.workers >= 1030


@pytest.mark.slow
@pytest.mark.parametrize("order", ["gain", "given"])
def test_hundreds_of_jobs_on_a_thousand_machines(order: str) -> None:
    cluster, jobs = mixed_cluster(1000), random_jobs(250, 10, 20, np.random.default_rng(3))
    plan = plan_jobs(jobs, cluster, order)  # type: ignore[arg-type]
    _check(plan, jobs, cluster)
    assert not plan.unplaced
    assert plan.tasks > 10 * len(jobs)


@pytest.mark.slow
def test_the_sum_of_times_is_near_the_least_possible() -> None:
    ratios = []
    for seed in range(10):
        jobs, cluster = small_case(np.random.default_rng(seed))
        plan = plan_jobs(jobs, cluster)
        assert not plan.unplaced
        total_s = sum(job.remaining_s for job in plan.placed)
        ratios.append(total_s / least_total_s(jobs, cluster, total_s * (1 + 1e-9)))
    assert min(ratios) >= 1
    assert statistics.mean(ratios) < 1.1
    assert max(ratios) < 1.3


@pytest.mark.parametrize(
    ("job", "cluster", "says"),
    [
        (PlanJob("a", MODELS[0], gpus_per_worker=1), machines(2), "need GPUs and the cluster has none"),
        (PlanJob("a", MODELS[0], gpus_per_worker=8), k80(1), "needs 8 GPUs and no machine has more than 4: 4 short"),
        (
            PlanJob("a", MODELS[0], min_workers=9),
            k80(2, cpus=32.0),
            "need 9 GPUs and the K80 machines have 8 GPUs left: 1 GPU",
        ),
        (PlanJob("a", profile([9000 * MB])), k80(1), "GPU memory"),
        (
            PlanJob("a", profile([9000 * MB]), gpus_per_worker=0),
            machines(3),
            "more CPUs, memory or disk than any machine",
        ),
        (PlanJob("a", MODELS[0], gpus_per_worker=2, min_workers=3), k80(2, gpus=3), "in pieces for 2 workers of"),
        (PlanJob("a", MODELS[0]), k80(1, cpus=0.25), "1 worker, 1 parameter server, 1 chief"),
        (PlanJob("a", MODELS[0]), k80(3, cpus=2.0, gpus=1, mem_bytes=4 * GIB, disk_bytes=900 * MIB), ""),
    ],
)
def test_the_reason_names_what_is_short(job: PlanJob, cluster: Cluster, says: str) -> None:
    for order in ("gain", "given"):
        plan = plan_jobs([job], cluster, order)  # type: ignore[arg-type]
        if says:
            assert says in plan.unplaced[0].reason
        else:
            assert not plan.unplaced


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"min_workers": 0}, "min_workers is 0"),
        ({"min_workers": 3, "max_workers": 2}, "max_workers is 2 and min_workers 3"),
        ({"steps": 0}, "steps is 0"),
        ({"weight": 0.0}, "weight is 0"),
        ({"weight": float("nan")}, "weight is nan"),
        ({"gpus_per_worker": -1}, "gpus_per_worker is -1"),
    ],
)
def test_bad_jobs(changes: dict[str, object], says: str) -> None:
    with pytest.raises(BadInputError, match=says):
        PlanJob("a", MODELS[0], **changes)  # type: ignore[arg-type]


def test_bad_requests() -> None:
    job = PlanJob("a", MODELS[0])
    with pytest.raises(BadInputError, match="Two jobs are called 'a'"):
        plan_jobs([job, job], k80())
    with pytest.raises(BadInputError, match="no job to place"):
        plan_jobs([], k80())
    with pytest.raises(BadInputError, match="'best' is not an order of jobs; use given or gain"):
        plan_jobs([job], k80(), "best")  # type: ignore[arg-type]
    with pytest.raises(BadInputError, match="time limit"):
        plan_jobs([job], k80(), time_limit_s=0.0)


@examples(60)
@given(job_lists(), clusters(), st.sampled_from(["gain", "given"]))
def test_the_speed_of_a_gang_is_that_of_its_machines(jobs: list[PlanJob], cluster: Cluster, order: Order) -> None:
    plan = plan_jobs(jobs, cluster, order)
    job_of = {job.name: job for job in jobs}
    for placed in plan.placed:
        if not job_of[placed.name].is_gang:
            assert placed.option.ps > 0
            continue
        workers_on = {name: part.workers for part in placed.placement for name in part.machines}
        assert (sum(workers_on.values()), placed.option.ps, placed.option.chief) == (placed.option.workers, 0, None)
        assert all(part.ps == part.chief == 0 for part in placed.placement)
        if placed.option.workers > 1:
            scenario = scenario_of(PlanRequest(job_of[placed.name].profile, cluster))
            shape = WorkerShape(placed.option.worker.gpus, placed.option.worker.cpus)
            found = evaluated(scenario, shape, workers_on)
            assert placed.samples_per_s == pytest.approx(found.samples_per_s)


@pytest.mark.parametrize("order", ["gain", "given"])
def test_gangs_share_the_machines_with_other_jobs(order: Order) -> None:
    model = dataclasses.replace(profile([10 * MB] * 4, flops=8e9, batch_size=64), why_not_split="")
    jobs = [
        PlanJob("gang", model, max_workers=4, strategy="allreduce"),
        PlanJob("servers", model, max_workers=4),
        PlanJob("alone", model, max_workers=1, strategy="allreduce"),
    ]
    plan = plan_jobs(jobs, k80(4), order)
    placed = {job.name: job for job in plan.placed}
    assert (placed["gang"].option.workers, placed["gang"].option.ps) == (4, 0)
    assert placed["servers"].option.ps > 0
    assert (placed["alone"].option.workers, placed["alone"].tasks) == (1, 1)


@pytest.mark.parametrize(
    ("model", "gpus", "said"),
    [(digits(), None, "cannot train with all-reduce"), (MODELS[0], 2, "a worker of a gang has one GPU")],
)
def test_a_gang_that_cannot_be_is_refused(model: ModelProfile, gpus: int | None, said: str) -> None:
    with pytest.raises(BadInputError, match=said):
        PlanJob("job", model, gpus_per_worker=gpus, strategy="allreduce")
