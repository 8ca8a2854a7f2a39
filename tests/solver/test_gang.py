"""Gangs of equal workers: the best of all placements, of any machines, shapes and numbers of workers."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from dike.profile import Api, ModelProfile
from solver import Cluster, NodeClass, PlanRequest
from solver.gang import SIMPLE_TIE_SHARE, GangOption, any_gang, best_gang
from solver.hardware import known_hardware
from solver.request import scenario_of
from solver.resources import CPU_STEP, WorkerShape
from solver.scenario import Scenario
from solver.units import BYTES_PER_S_PER_GBPS, GIB
from tests.properties import examples
from tests.solver.solver_cases import MB, k80, profile

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
    hops_s = (2 + 2 * model.synced_layers) * 2 * (count - 1) * hardware.ring_hop_s / share
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
    known = dataclasses.replace(scenario.profile, batch_size=batch, flops_step_per_sample=1.0, sample_bytes=0)
    return dataclasses.replace(scenario, profile=known)
