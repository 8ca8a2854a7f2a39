"""The three pruning rules, each alone, with what it counts."""

from __future__ import annotations

import itertools

import pytest

from solver import Cluster, NodeClass
from solver.hardware import known_hardware
from solver.nodes import NodeKind, node_kinds
from solver.options import (
    COUNT_LIMIT,
    OptionRange,
    OptionSpace,
    RawSpace,
    cpu_gpu_ratio,
    cpus_per_gpu,
    identical_workers,
    raw_space,
    task_counts,
)
from solver.resources import TaskSizes, WorkerShape
from solver.units import GIB
from tests.solver.solver_cases import MB, digits, k80, machines, profile


def _kinds(cluster: Cluster) -> tuple[NodeKind, ...]:
    return node_kinds(cluster)


def _sizes(cluster: Cluster, **changes: object) -> TaskSizes:
    return TaskSizes.of(profile(**changes), max(node.cpus for node in cluster.nodes))  # type: ignore[arg-type]


def test_the_raw_space_counts_what_listing_it_counts() -> None:
    cluster = Cluster(
        (
            NodeClass(name="a", count=2, cpus=1.0, mem_bytes=GIB, gpus=1),
            NodeClass(name="b", cpus=0.5, mem_bytes=GIB),
        )
    )
    raw = raw_space(_kinds(cluster))
    a, b = (shapes for _, shapes in raw.shapes)
    assert len(a) == 4 * 2
    assert b == (WorkerShape(0, 0.25), WorkerShape(0, 0.5))
    pairs = list(itertools.combinations_with_replacement([None, *a], 2))
    listed = [(pair, single) for pair in pairs for single in [None, *b]]
    assert raw.max_tasks == 10
    assert raw.count == len(listed) * 10 * 10


def test_a_count_stops_at_its_limit() -> None:
    cluster = Cluster(tuple(NodeClass(name=f"n{i}", cpus=i + 1, mem_bytes=GIB, gpus=4) for i in range(200)))
    raw = raw_space(_kinds(cluster))
    assert raw.count == COUNT_LIMIT
    assert identical_workers(raw).removed == COUNT_LIMIT - identical_workers(raw).space.count


def test_rule_1_leaves_one_shape_for_all_workers() -> None:
    shapes = (WorkerShape(0, 0.25), WorkerShape(0, 0.5))
    raw = RawSpace(((2, shapes),), max_tasks=4)
    result = identical_workers(raw)
    # Two machines, each with one of two shapes or none, not told apart: 6 ways instead of 2.
    assert raw.count == 6 * 16
    assert result.space.count == 2 * 16
    assert result.removed == 4 * 16
    assert [entry.shape for entry in result.space.ranges] == list(shapes)


def test_rule_2_gives_the_range_of_flops_and_longest_path() -> None:
    (kind,) = _kinds(k80())
    # 1.21 TFLOP/s over 23.3 GFLOPs are 52 images/s, which take 0.21 cores to prepare; all FLOPs over 0.9 of them are
    # 1.11 operations at a time. In quarter CPUs, rounded up: 0.25 to 1.5.
    assert cpus_per_gpu(profile(), known_hardware(), kind) == (0.25, 1.5)
    # Half the FLOPs on the longest path: two operations at a time.
    assert cpus_per_gpu(profile(longest_share=0.5), known_hardware(), kind) == (0.25, 2.25)
    # A tenth of the FLOPs: ten times the images to prepare.
    low, high = cpus_per_gpu(profile(flops=0.7755e9), known_hardware(), kind)
    assert (low, high) == (2.25, 3.25)


def test_rule_2_leaves_shapes_within_the_range_only() -> None:
    cluster = k80()
    kinds, sizes = _kinds(cluster), _sizes(cluster)
    space = identical_workers(raw_space(kinds)).space
    result = cpu_gpu_ratio(space, kinds, sizes.profile, known_hardware(), sizes)
    shapes = {entry.shape for entry in result.space.ranges}
    assert {shape.gpus for shape in shapes} == {1, 2, 4}
    assert all(0.25 <= shape.cpus / shape.gpus <= 1.5 for shape in shapes)
    assert {shape.cpus for shape in shapes if shape.gpus == 1} == {0.25, 0.75, 1.25, 1.5}
    assert result.removed == space.count - result.space.count > 0
    one = cpu_gpu_ratio(space, kinds, sizes.profile, known_hardware(), sizes, max_gpus_per_worker=1)
    assert {entry.shape.gpus for entry in one.space.ranges} == {1}


def test_rule_2_shares_scarce_cpus_out() -> None:
    # Four GPUs on four cores: beside a ps and the chief (half a core each) 0.75 are left for each GPU.
    cluster = k80(cpus=4.0)
    kinds, sizes = _kinds(cluster), _sizes(cluster, flops=0.7755e9)
    space = identical_workers(raw_space(kinds)).space
    result = cpu_gpu_ratio(space, kinds, sizes.profile, known_hardware(), sizes)
    assert 0.75 in {entry.shape.cpus for entry in result.space.ranges if entry.shape.gpus == 1}


def test_rule_2_without_gpus_cuts_a_machine_into_even_shares() -> None:
    cluster = machines(1, cpus=2.0)
    kinds = _kinds(cluster)
    sizes = TaskSizes.of(digits(), 2.0)
    space = identical_workers(raw_space(kinds)).space
    result = cpu_gpu_ratio(space, kinds, digits(), known_hardware(), sizes)
    # A ps and the chief take a quarter each: one worker gets 1.5, two get 0.75; more where the helpers are elsewhere.
    assert {entry.shape.cpus for entry in result.space.ranges} == {0.75, 1.0, 1.5, 1.75, 2.0}
    assert all(entry.shape.gpus == 0 for entry in result.space.ranges)


def test_rule_3_bounds_workers_by_gpus_and_ps_by_machines() -> None:
    cluster = k80()
    kinds, sizes = _kinds(cluster), _sizes(cluster)
    wide = OptionSpace(tuple(OptionRange(WorkerShape(gpus, gpus * 1.0), 160, 160) for gpus in (1, 2, 4)))
    result = task_counts(wide, kinds, sizes.profile, sizes)
    assert [(entry.max_workers, entry.max_ps) for entry in result.space.ranges] == [(20, 5), (10, 5), (5, 5)]
    assert result.space.count == 5 * (20 + 10 + 5)
    assert result.removed == 3 * 160 * 160 - result.space.count
    limited = task_counts(wide, kinds, sizes.profile, sizes, max_workers=7)
    assert [entry.max_workers for entry in limited.space.ranges] == [7, 7, 5]
    paper = task_counts(wide, kinds, sizes.profile, sizes, every_machine_works=True)
    assert [entry.min_workers for entry in paper.space.ranges] == [5, 5, 5]
    # As solver FACTS 5 counts the paper's options: 16, 6 and 1 numbers of workers, 5 of parameter servers.
    assert paper.space.count == 115


@pytest.mark.parametrize(
    ("megabytes", "useful"),
    [([100], 1), ([1000, 1, 1, 1], 1), ([50, 50], 2), ([411, 67, 59, 16], 2), ([10] * 30, 5), ([20, 10, 10], 2)],
)
def test_rule_3_leaves_out_parameter_servers_without_effect(megabytes: list[int], useful: int) -> None:
    cluster = k80()
    sizes = TaskSizes.of(profile([size * MB for size in megabytes]), 8.0)
    space = OptionSpace((OptionRange(WorkerShape(1, 1.0), 20, 20),))
    result = task_counts(space, _kinds(cluster), sizes.profile, sizes)
    assert result.space.ranges[0].max_ps == useful


def test_rule_3_drops_shapes_that_fit_no_machine() -> None:
    cluster = k80()
    sizes = _sizes(cluster)
    space = OptionSpace((OptionRange(WorkerShape(8, 1.0), 20, 20), OptionRange(WorkerShape(1, 9.0), 20, 20)))
    result = task_counts(space, _kinds(cluster), sizes.profile, sizes)
    assert result.space.ranges == ()
    assert result.removed == space.count
