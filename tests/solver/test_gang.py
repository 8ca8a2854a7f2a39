"""Gangs of equal workers: the best of all placements, of any machines, shapes and numbers of workers."""

from __future__ import annotations

import dataclasses
import io
import itertools
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from rich.console import Console

from dike.exceptions import BadInputError, InfeasibleError
from dike.profile import Api, ModelProfile
from framework.training.spec import check_can_run
from solver import Cluster, NodeClass, Plan, PlanRequest, make_plan, planner, smallest_job
from solver.cli.tables import print_plan
from solver.comparison import compare
from solver.drawing.picture import draw_plan
from solver.gang import SIMPLE_TIE_SHARE, GangOption, any_gang, best_gang
from solver.hardware import known_hardware
from solver.methods import plan_with
from solver.request import scenario_of
from solver.resources import CPU_STEP, WorkerShape
from solver.scenario import Scenario
from solver.settings import TIME_LIMIT_S, PlanSettings
from solver.units import BYTES_PER_S_PER_GBPS, GIB
from solver.variants import plan_variants, sweep
from tests.properties import examples
from tests.solver.solver_cases import MB, digits, k80, profile

MAX_WORKERS = 6


def shared(model: ModelProfile, **changes: object) -> ModelProfile:
    """The model with batches that can be shared."""
    return dataclasses.replace(model, why_not_split="", **changes)  # type: ignore[arg-type]


nodes = st.builds(
    lambda cpus, mem, gpus, model, gbps, rack: NodeClass(
        name="x",
        cpus=cpus,
        mem_bytes=mem * GIB,
        gpus=gpus,
        gpu_model=model if gpus else None,
        network_gbps=gbps,
        rack=rack,
        disk_bytes=50 * GIB,
    ),
    st.sampled_from([0.5, 1.0, 2.0, 3.5]),
    st.sampled_from([1, 4, 8, 32]),
    st.sampled_from([0, 0, 1, 2]),
    st.sampled_from(["K80", "V100", "T4"]),
    st.sampled_from([1.0, 2.0, 10.0, 25.0]),
    st.sampled_from(["r1", "r1", "r2", None]),
)
clusters = st.builds(
    lambda classes, within, across: Cluster(
        tuple(dataclasses.replace(one, name=f"n{index}") for index, one in enumerate(classes)),
        within_node_gbps=within,
        across_racks_gbps=across,
    ),
    st.lists(nodes, min_size=1, max_size=4),
    st.sampled_from([5.0, 64.0]),
    st.sampled_from([None, 0.5, 5.0]),
)
models = st.builds(
    lambda size, flops, batch, sample, synced: shared(
        profile([size * MB], flops=flops, batch_size=batch, sample_bytes=sample, slots=0), synced_layers=synced
    ),
    st.sampled_from([1, 20, 200]),
    st.sampled_from([1e6, 1e8, 4e9, 2e10]),
    st.sampled_from([1, 2, 5, 8, 32]),
    st.sampled_from([0, 6_000, 600_000]),
    st.sampled_from([0, 0, 3, 50]),
)


def step_s(scenario: Scenario, shape: WorkerShape, workers_on: dict[str, int]) -> float:
    """The formula of docs/planner.md, 'All-reduce', written down a second time."""
    hardware, model, machines = known_hardware(), scenario.profile, scenario.kind_of
    count = sum(workers_on.values())
    part = math.ceil(model.batch_size / count) * model.flops_step_per_sample
    if shape.gpus:
        compute_s = max(part / hardware.gpu(machines[name].gpu_model).training_flops_per_s for name in workers_on)
    else:
        compute_s = part / hardware.cpu_flops_per_s(shape.cpus, model.longest_path_share)
    input_s = model.batch_size * model.sample_bytes / (shape.cpus * hardware.core_input_bytes_per_s)
    links = [] if shape.gpus else [hardware.ring_bytes_per_core_s * shape.cpus]
    if any(here > 1 for here in workers_on.values()):
        links.append(scenario.cluster.within_node_gbps * BYTES_PER_S_PER_GBPS)
    if len(workers_on) > 1:
        links += [machines[name].network_bytes_per_s for name in workers_on]
        racks = {machines[name].rack for name in workers_on}
        if len(racks) > 1 and scenario.cluster.across_racks_gbps is not None:
            links.append(scenario.cluster.across_racks_gbps * BYTES_PER_S_PER_GBPS)
    share = 1.0 if shape.gpus else min(1.0, shape.cpus)
    own_s = ((hardware.apis[model.api].plain_s or 0.0) + hardware.ring_step_s) / share
    hop_s = hardware.nccl_hop_s if shape.gpus else hardware.ring_hop_s / share
    hops_s = (2 + 2 * model.synced_layers) * 2 * (count - 1) * hop_s
    ring_s = 2 * (count - 1) / count * model.parameter_bytes / min(links) + hops_s
    return (max(compute_s, input_s) if shape.gpus else compute_s + input_s) + own_s + ring_s


def every_gang(scenario: Scenario, fewest: int, most: int) -> Iterator[tuple[float, WorkerShape, dict[str, int]]]:
    """All gangs: samples/s, the shape and the workers on each machine."""
    largest = max(kind.cpus for kind in scenario.kinds)
    names = [name for kind in scenario.kinds for name in kind.names]
    for gpus, steps in itertools.product((0, 1), range(1, int(largest / CPU_STEP) + 1)):
        shape = WorkerShape(gpus, steps * CPU_STEP)
        task, model = scenario.sizes.plain(shape), scenario.model(shape)
        rooms = []
        for name in names:
            kind = scenario.kind_of[name]
            fits = not gpus or model.fits_gpu(kind)
            rooms.append(max(0, min(kind.room_for(task), most)) if fits else 0)
        for counts in itertools.product(*(range(room + 1) for room in rooms)):
            if fewest <= sum(counts) <= most:
                workers_on = {name: here for name, here in zip(names, counts, strict=True) if here}
                yield scenario.profile.batch_size / step_s(scenario, shape, workers_on), shape, workers_on


def check_fits(scenario: Scenario, found: GangOption) -> None:
    for name, here in found.workers_on.items():
        assert scenario.kind_of[name].room_for(found.resources) >= here


@examples(400)
@given(models, clusters, st.sampled_from([2, 2, 3]), st.sampled_from([None, 2, 4]))
@example(shared(profile([MB], flops=1e8, batch_size=8, sample_bytes=0)), Cluster(k80(3, gpus=1).nodes), 2, None)
def test_the_plan_is_as_good_as_the_best_of_all_placements(
    model: ModelProfile, machines: Cluster, fewest: int, most: int | None
) -> None:
    scenario = scenario_of(PlanRequest(model, machines))
    limit = min(model.batch_size, MAX_WORKERS if most is None else most)
    found = best_gang(scenario, fewest, limit)
    gangs = list(every_gang(scenario, fewest, limit))
    if not gangs:
        assert found is None
        return
    assert found is not None
    best = max(speed for speed, _, _ in gangs)
    enough = best * (1 - SIMPLE_TIE_SHARE)
    assert found.bound == pytest.approx(best, rel=1e-9)
    assert found.samples_per_s >= enough * (1 - 1e-9)
    assert found.samples_per_s == pytest.approx(model.batch_size / step_s(scenario, found.shape, found.workers_on))
    check_fits(scenario, found)
    # The fewest workers, and the fewest machines for these.
    margin = enough * (1 + 1e-9)
    assert found.workers <= min(sum(on.values()) for speed, _, on in gangs if speed >= margin)
    alike = [len(on) for speed, _, on in gangs if speed >= margin and sum(on.values()) == found.workers]
    assert len(found.workers_on) <= min(alike, default=math.inf)


@examples(100)
@given(models, clusters, st.sampled_from([2, 3]), st.sampled_from([None, 2, 4]))
def test_a_gang_of_unknown_speed_has_as_many_workers_as_are_asked_for_and_fit(
    model: ModelProfile, machines: Cluster, fewest: int, most: int | None
) -> None:
    unknown = dataclasses.replace(model, api=Api.LOOP, batch_size=0, why_alone="It has a loop of its own.")
    scenario = scenario_of(PlanRequest(unknown, machines, strategies=frozenset({"allreduce"})))
    limit = fewest if most is None else max(most, fewest)
    found = any_gang(scenario, fewest, limit if most else None)
    gpus = int(any(node.gpus for node in machines.nodes))
    sizes = [
        sum(on.values()) for _, shape, on in every_gang(_known(scenario, limit), fewest, limit) if shape.gpus == gpus
    ]
    if not sizes:
        assert found is None
        return
    assert found is not None
    assert (found.workers, found.samples_per_s, found.shape.gpus) == (max(sizes), 0.0, gpus)
    check_fits(scenario, found)


def _known(scenario: Scenario, batch: int) -> Scenario:
    known = dataclasses.replace(scenario.profile, batch_size=batch, flops_step_per_sample=1e9, sample_bytes=0)
    return dataclasses.replace(scenario, profile=known)


FOUR_GPUS = k80(1, gpus=4, cpus=16.0)
LARGE = shared(profile([10 * MB] * 4, flops=8e9, batch_size=64, sample_bytes=6_000))


def planned(model: ModelProfile, machines: Cluster, bounds: dict[str, Any] | None = None, **options: Any) -> Plan:
    plan = make_plan(PlanSettings(**options).request(model, machines, **(bounds or {})))
    assert Plan.loads(plan.dumps()) == plan
    return plan


def test_the_gpus_of_a_machine_share_the_batches_of_a_fit() -> None:
    plan = planned(LARGE, FOUR_GPUS)
    assert (plan.strategy, plan.result, plan.is_plain) == ("allreduce", "same as python", True)
    assert [(task.name, task.gpus, task.is_plain) for task in plan.tasks] == [
        (f"worker:{index}", 1, True) for index in range(4)
    ]
    assert plan.option.chief is None
    assert plan.variables == {}
    check_can_run(plan)
    one = planned(LARGE, FOUR_GPUS, strategy="one")
    assert plan.samples_per_s > 2 * one.samples_per_s
    assert plan.step_time_s.compute == pytest.approx(one.step_time_s.compute / 4)
    assert any("--strategy one requests it" in said for said in plan.why)
    assert [each.strategy for each in plan.strategies[:1]] == ["allreduce"]
    assert {each.strategy for each in plan.strategies} == {"one", "allreduce", "ps"}


def test_of_gangs_that_are_nearly_as_fast_the_one_with_fewest_workers_is_chosen() -> None:
    fewer = 0
    for flops in (10.0 ** (7 + step / 8) for step in range(24)):
        model = dataclasses.replace(LARGE, flops_step_per_sample=flops)
        scenario = scenario_of(PlanRequest(model, FOUR_GPUS))
        found = best_gang(scenario, 2, None)
        assert found is not None
        speeds: dict[int, float] = {}
        for speed, shape, on in every_gang(scenario, 2, 4):
            if shape.gpus:
                speeds[sum(on.values())] = max(speed, speeds.get(sum(on.values()), 0.0))
        best = max(speeds.values())
        if found.shape.gpus:
            assert found.workers == min(each for each, speed in speeds.items() if speed >= best * 0.95)
            fewer += speeds[found.workers] < best
    assert fewer > 1


def test_every_worker_reads_the_whole_batch() -> None:
    slow = dataclasses.replace(LARGE, sample_bytes=6_000_000)
    two, four = (planned(slow, FOUR_GPUS, {"min_workers": count, "max_workers": count}) for count in (2, 4))
    for plan in (two, four):
        assert plan.step_time_s.input == pytest.approx(64 * 6e6 / (plan.option.worker.cpus * 1.5e8))


@pytest.mark.parametrize("batch", [2, 5, 64])
def test_no_worker_has_an_empty_part(batch: int) -> None:
    model = dataclasses.replace(LARGE, flops_step_per_sample=1e13, batch_size=batch)
    assert planned(model, k80(20, gpus=4)).option.workers <= batch
    with pytest.raises(BadInputError, match=f"{batch + 1} workers cannot share a batch of {batch} samples"):
        planned(model, k80(20, gpus=4), {"min_workers": batch + 1})


def test_a_batch_of_one_sample_is_trained_by_one_task() -> None:
    single = dataclasses.replace(LARGE, batch_size=1)
    assert planned(single, FOUR_GPUS).strategy == "one"
    with pytest.raises(InfeasibleError, match="2 workers cannot share a batch of 1 sample"):
        planned(single, FOUR_GPUS, strategy="allreduce")


@pytest.mark.parametrize("within", [0.05, 64.0])
def test_one_task_wins_unless_a_gang_is_faster_by_more_than_the_tie(within: float) -> None:
    machines = dataclasses.replace(FOUR_GPUS, within_node_gbps=within)
    plan = planned(LARGE, machines)
    one, gang = (planned(LARGE, machines, strategy=name) for name in ("one", "allreduce"))
    assert plan.strategy == ("one" if within < 1 else "allreduce")
    assert (one.samples_per_s >= gang.samples_per_s * (1 - SIMPLE_TIE_SHARE)) == (plan.strategy == "one")
    if plan.strategy == "one":
        assert "--strategy allreduce requests them anyway" in plan.why[0]
    assert gang.option.workers >= 2


def test_bounds_of_the_number_of_workers_are_kept() -> None:
    assert planned(LARGE, FOUR_GPUS, {"max_workers": 1}).strategy == "one"
    assert planned(LARGE, FOUR_GPUS, {"max_workers": 3}).option.workers <= 3
    slow = dataclasses.replace(FOUR_GPUS, within_node_gbps=0.05)
    assert planned(LARGE, slow, {"min_workers": 3}).option.workers == 3
    with pytest.raises(InfeasibleError, match="no room for 200 workers, the minimum"):
        planned(dataclasses.replace(LARGE, batch_size=512), FOUR_GPUS, {"min_workers": 200})


def test_a_script_that_only_servers_make_faster_gets_one_sentence_about_them() -> None:
    alone = dataclasses.replace(LARGE, why_not_split="it has a mask")
    plan = planned(alone, k80(4))
    assert plan.strategy == "one"
    assert "Several workers cannot share its batches: it has a mask." in plan.why[0]
    (said,) = (each for each in plan.why if "--strategy ps" in each)
    assert re.fullmatch(
        r"Asynchronous workers with parameter servers \(--strategy ps\) would train \d+\.\d times as many samples/s, "
        "with another result.",
        said,
    )
    ps = planned(alone, k80(4), strategy="ps")
    assert {each.strategy: each.result for each in plan.strategies} == {"one": "same as python", "ps": "asynchronous"}
    assert plan.strategies[1].samples_per_s <= ps.samples_per_s * 1.01
    assert not any("--strategy ps" in each for each in planned(alone, k80(1, gpus=0, cpus=2.0)).why)


def test_a_shown_plan_does_not_take_long(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    own = planner._planned
    monkeypatch.setattr(planner, "_planned", lambda request, told: asked.append(request) or own(request, told))
    planned(LARGE, k80(2))
    assert [request.time_limit_s for request in asked] == [TIME_LIMIT_S, planner.SHOWN_TIME_LIMIT_S]


DDP = dataclasses.replace(
    digits(Api.LOOP), batch_size=0, why_alone="It has a loop of its own.", own_distribution="torch.distributed"
)


@pytest.mark.parametrize(
    ("bounds", "options", "workers"),
    [
        ({}, {}, 1),
        ({"min_workers": 2}, {}, 2),
        ({"max_workers": 3}, {}, 3),
        ({"min_workers": 2, "max_workers": 30}, {}, 16),
        ({}, {"strategy": "allreduce"}, 2),
        ({"min_workers": 5}, {"strategy": "allreduce"}, 5),
    ],
)
def test_a_script_that_distributes_itself_gets_the_workers_that_are_asked_for(
    bounds: dict[str, Any], options: dict[str, Any], workers: int
) -> None:
    plan = planned(DDP, k80(4), bounds, **options)
    assert (plan.option.workers, plan.option.ps, plan.samples_per_s) == (workers, 0, 0.0)
    assert {task.gpus for task in plan.tasks} == {1}
    assert len({task.node for task in plan.tasks}) == -(-workers // 4)
    if workers > 1:
        assert "as the options say" in plan.why[0]
    check_can_run(plan)


def test_it_needs_room_for_the_minimum() -> None:
    with pytest.raises(InfeasibleError, match="no room for 17 workers, the minimum"):
        planned(DDP, k80(4), {"min_workers": 17})
    assert planned(DDP, k80(1, gpus=0, cpus=2.0), {"min_workers": 2}).option.worker.gpus == 0


def test_the_smallest_gang_is_its_smallest_workers() -> None:
    ((name, task),) = smallest_job(PlanSettings().request(LARGE, FOUR_GPUS, min_workers=2))
    assert (name, task.gpus, task.cpus) == ("worker", 1, CPU_STEP)
    ((name, task),) = smallest_job(PlanSettings().request(LARGE, FOUR_GPUS))
    assert (name, task.gpus) == ("task", 1)


def test_workers_are_numbered_rack_by_rack() -> None:
    nodes = tuple(
        dataclasses.replace(k80(1, gpus=1).nodes[0], name=f"n{index}", rack=f"r{index % 2}") for index in range(4)
    )
    plan = planned(
        dataclasses.replace(LARGE, flops_step_per_sample=1e12),
        Cluster(nodes, across_racks_gbps=10.0),
        {"min_workers": 4},
    )
    assert [task.node for task in plan.tasks] == ["n0", "n2", "n1", "n3"]


@pytest.mark.parametrize(
    "change",
    [
        {"option": {"workers": 5}},
        {"option": {"workers": 0}},
        {"tasks": "is_plain"},
        {"option": {"chief": {"cpus": 1.0, "mem_mb": 1, "disk_mb": 1, "gpus": 0}}},
    ],
)
def test_a_stored_gang_must_be_consistent(change: dict[str, Any]) -> None:
    data = planned(LARGE, FOUR_GPUS).to_json()
    if "option" in change:
        data["option"] |= change["option"]
    else:
        data["tasks"][1]["is_plain"] = False
    with pytest.raises(BadInputError, match="This is not a plan of Dike"):
        Plan.from_json(data)


def test_a_gang_is_shown_and_drawn(tmp_path: Path) -> None:
    plan = planned(LARGE, k80(3), {"min_workers": 12})
    console = Console(record=True, width=120, file=io.StringIO())
    print_plan(console, plan)
    text = console.export_text()
    for expected in ("exchange of gradients", "allreduce", "same as python", "6 of 64 samples", "asynchronous"):
        assert expected in text
    path = tmp_path / "plan.svg"
    draw_plan(plan, path)
    assert "MiB" in path.read_text(encoding="utf-8")
    assert "around the ring" in path.read_text(encoding="utf-8")


def test_methods_compare_a_task_and_a_gang() -> None:
    request = PlanSettings().request(LARGE, k80(2))
    rows = {row.method: row for row in compare(request).rows}
    assert (rows["one"].workers, rows["one"].ps) == (1, 0)
    assert (rows["allreduce"].workers, rows["allreduce"].ps) == (rows["dike"].workers, 0)
    assert rows["optimus"].ps > 0
    alone = dataclasses.replace(LARGE, why_not_split="it has a mask")
    rows = {row.method: row for row in compare(PlanSettings().request(alone, k80(2)), ["one", "allreduce"]).rows}
    assert "it has a mask" in rows["allreduce"].reason
    with pytest.raises(BadInputError, match="it has a mask"):
        plan_with("allreduce", PlanSettings().request(alone, k80(2)))


def test_variants_of_a_gang() -> None:
    request = PlanSettings().request(LARGE, k80(1))
    small, large = plan_variants(sweep(request, "k80.count=1,4"), make_plan)
    assert small.plan is not None
    assert large.plan is not None
    assert small.plan.strategy == large.plan.strategy == "allreduce"
    assert small.plan.option.workers < large.plan.option.workers
