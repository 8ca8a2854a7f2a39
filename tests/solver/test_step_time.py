"""The step-time model: the longest path, what the APIs cost, transfers that overlap the work."""

from __future__ import annotations

import dataclasses
import itertools
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.pollux_traces import FORMS, large_placements, small_placements
from dike.profile import Api
from solver import Cluster, NodeClass
from solver.evaluation import evaluate
from solver.hardware import Hardware, known_hardware
from solver.nodes import node_kinds
from solver.placement.naming import Assignment
from solver.resources import WorkerShape
from solver.scenario import Scenario
from solver.search.relaxation import fastest
from solver.search.space import Space
from solver.step_time import StepModel
from solver.units import GIB, SIMPLE_TIE_SHARE
from tests.properties import examples
from tests.solver import solver_brute_force as brute_force
from tests.solver.solver_cases import MB, k80, profile

WITHIN_GBPS = 16.0
OVERLAPPING = dataclasses.replace(known_hardware(), overlap=True)

many = examples(100)

machines = st.lists(
    st.builds(
        lambda gpus, model, gbps, cpus: NodeClass(
            name="x", cpus=cpus, mem_bytes=64 * GIB, gpus=gpus, gpu_model=model, network_gbps=gbps
        ),
        st.integers(0, 2),
        st.sampled_from(["K80", "V100"]),
        st.sampled_from([0.5, 1.0, 2.0, 10.0]),
        st.sampled_from([2.0, 4.0]),
    ),
    min_size=1,
    max_size=3,
)


def _named(classes: list[NodeClass]) -> Cluster:
    nodes = tuple(dataclasses.replace(node, name=f"n{index}") for index, node in enumerate(classes))
    return Cluster(nodes, within_node_gbps=WITHIN_GBPS)


@many
@given(
    machines,
    st.lists(st.integers(1, 60), min_size=1, max_size=3),
    st.sampled_from([1e6, 1e8, 1e9, 4e9]),
    st.sampled_from([WorkerShape(0, 1.0), WorkerShape(0, 2.0), WorkerShape(1, 0.5), WorkerShape(1, 0.25)]),
    st.integers(1, 4),
    st.sampled_from([0.3, 1.0]),
)
def test_with_overlap_no_placement_is_faster_than_the_bound_and_the_fastest_is_found(
    classes: list[NodeClass], megabytes: list[int], flops: float, shape: WorkerShape, workers: int, longest: float
) -> None:
    sizes = [size * MB for size in megabytes]
    model = profile(sizes, api=Api.GRAPH, synchronous=True, flops=flops, sample_bytes=6_000, longest_share=longest)
    cluster = _named(classes)
    scenario = Scenario.of(model, cluster, OVERLAPPING)
    results = []
    for ps in range(1, min(len(classes), len(sizes)) + 1):
        shards = scenario.shards(ps)
        job = brute_force.Job(
            model,
            scenario.sizes,
            shape,
            workers,
            shards.sizes,
            WITHIN_GBPS,
            hardware=OVERLAPPING,
            requests=shards.requests,
        )
        best = brute_force.best(job, cluster.nodes)
        results += [] if best is None else [best.samples_per_s]
    found = fastest([Space(scenario, [shape], (workers, workers), identical=True)], 0.0, time.monotonic() + 60)
    assert (found.best is None) == (not results) or not shape.gpus
    if found.best is None or not results:
        return
    assert found.bound >= max(results) * (1 - 1e-9)
    assert max(results) * (1 + 1e-6) >= found.best.samples_per_s >= max(results) * (1 - SIMPLE_TIE_SHARE)


def test_overlap_hides_the_shorter_of_work_and_the_rest() -> None:
    model = profile(synchronous=True, api=Api.KERAS)
    cluster = k80(3, network_gbps=2.0)
    where = Assignment(("k80-0",), ("k80-1", "k80-2"), None)
    times = []
    for hardware in (known_hardware(), OVERLAPPING):
        scenario = Scenario.of(model, cluster, hardware)
        times.append(evaluate(scenario, WorkerShape(1, 2.0), scenario.shards(1), where).step_time)
    apart, together = times
    rest = apart.network + apart.update + apart.dispatch
    assert together.total == pytest.approx(max(apart.total - rest, rest))
    assert together.total < apart.total


def test_asynchronous_steps_overlap_anyway() -> None:
    cluster = k80(3, network_gbps=2.0)
    where = Assignment(("k80-0",), ("k80-1", "k80-2"), None)
    totals = set()
    for hardware in (known_hardware(), OVERLAPPING):
        scenario = Scenario.of(profile(), cluster, hardware)
        totals.add(evaluate(scenario, WorkerShape(1, 2.0), scenario.shards(1), where).step_time.total)
    assert len(totals) == 1


@pytest.mark.parametrize("share", [0.0, 0.3, 0.7, 1.0])
@pytest.mark.parametrize("cpus", [0.5, 1.0, 2.0, 8.0, 64.0])
def test_cores_speed_up_what_is_off_the_longest_path_and_operations_by_amdahl(share: float, cpus: float) -> None:
    hardware = known_hardware()
    one = hardware.core_training_flops_per_s
    time = one / hardware.cpu_flops_per_s(cpus, share)
    if cpus <= 1:
        assert time == pytest.approx(1 / cpus)
        return
    p = hardware.parallel_share
    on_path, off_path = share * (1 - p + p / cpus), (1 - share) / cpus
    assert time == pytest.approx(on_path + off_path)
    # Never faster than all cores at work, nor than the longest path; never slower than without branches.
    assert 1 / cpus * (1 - 1e-12) <= time <= (1 - p + p / cpus) * (1 + 1e-12)
    assert time >= on_path


def test_branches_help_cpus_and_not_gpus() -> None:
    kind = node_kinds(k80())[0]

    def compute_s(shape: WorkerShape, longest: float) -> float:
        return StepModel(profile(longest_share=longest), shape, known_hardware(), 8e9, 10 * MB).compute_s(kind)

    on_cpus = [compute_s(WorkerShape(0, 4.0), share) for share in (0.2, 0.5, 0.9, 1.0)]
    assert all(early < late for early, late in itertools.pairwise(on_cpus))
    assert compute_s(WorkerShape(1, 4.0), 0.2) == compute_s(WorkerShape(1, 4.0), 1.0)


def test_every_api_has_its_costs_with_a_source() -> None:
    apis = known_hardware().apis
    assert set(apis) == set(Api)
    for api, costs in apis.items():
        assert costs.source
        assert (costs.dispatch_s > 0) == api.has_separate_chief
        assert costs.latency_s >= 0
    assert apis[Api.KERAS].latency_s > apis[Api.GRAPH].latency_s


def _round_s(model_api: Api, workers: int, hardware: Hardware) -> float:
    model = profile([576, 18_432, 16_384, 1_280], api=model_api, flops=683_400, longest_share=1.0, batch_size=64)
    machine = Cluster((NodeClass(name="laptop", cpus=2, mem_bytes=8 * GIB),))
    scenario = Scenario.of(dataclasses.replace(model, sample_bytes=256), machine, hardware)
    where = Assignment(("laptop",), ("laptop",) * workers, None)
    return evaluate(scenario, WorkerShape(0, 1.5 / workers), scenario.shards(1), where).step_time.total


def test_the_small_cnn_takes_about_what_was_measured() -> None:
    # Milliseconds a step of all workers together, 2 shared cores: Keras 14.5 with 1 worker, 11 with 2; v1 6.4 with 2.
    for api, workers, measured in ((Api.KERAS, 1, 14.5e-3), (Api.KERAS, 2, 11e-3), (Api.GRAPH, 2, 6.4e-3)):
        predicted = _round_s(api, workers, known_hardware()) / workers
        assert measured / 1.5 < predicted < measured * 1.5


@pytest.mark.parametrize(("model", "error"), [("imagenet", 0.15), ("bert", 0.08), ("deepspeech2", 0.12)])
def test_recorded_steps_on_many_machines_are_predicted_from_those_on_few(model: str, error: float) -> None:
    known, unknown = small_placements(model), large_placements(model)
    assert known.nodes.max() == 4
    assert unknown.nodes.min() == 6
    errors = {
        form.name: float(np.abs(form.fit(known)(unknown) / unknown.seconds - 1).mean())
        for form in FORMS
        if form.name in ("computing alone", "bytes, sum")
    }
    assert errors["bytes, sum"] < error
    assert errors["bytes, sum"] < errors["computing alone"]
