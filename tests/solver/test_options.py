"""The pruning rules, each alone, all together and switched off one by one, with what they count."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dike.exceptions import BadInputError
from solver import Cluster, NodeClass, PlanRequest, make_plan
from solver.capacity import Machines
from solver.choices import RULES
from solver.hardware import known_hardware
from solver.nodes import NodeKind, node_kinds
from solver.options import (
    COUNT_LIMIT,
    PAPER,
    OptionRange,
    OptionSpace,
    Pruning,
    all_gpus_used,
    cpu_gpu_ratio,
    cpus_per_gpu,
    identical_workers,
    parse_rules,
    prune,
    raw_space,
    task_counts,
    without_spare_cpus,
)
from solver.resources import TaskResources, TaskSizes, WorkerShape
from solver.shards import useful_ps_count
from solver.units import GIB
from tests.properties import examples
from tests.solver.solver_cases import MB, digits, k80, machines, profile


def _kinds(cluster: Cluster) -> tuple[NodeKind, ...]:
    return node_kinds(cluster)


def _sizes(cluster: Cluster, **changes: object) -> TaskSizes:
    return TaskSizes.of(profile(**changes), max(node.cpus for node in cluster.nodes))  # type: ignore[arg-type]


def _prune(cluster: Cluster, rules: frozenset[str], sizes: TaskSizes, **limits: int) -> tuple[Pruning, ...]:
    kinds = _kinds(cluster)
    useful_ps = useful_ps_count(sizes.profile, sum(kind.count for kind in kinds))
    return prune(raw_space(kinds, **limits), rules, kinds, known_hardware(), sizes, useful_ps)


def _shapes(space: OptionSpace) -> set[WorkerShape]:
    return {shape for entry in space.ranges for shape in entry.shapes}


def test_the_raw_space_counts_what_listing_it_counts() -> None:
    cluster = Cluster(
        (
            NodeClass(name="a", count=2, cpus=1.0, mem_bytes=GIB, gpus=1),
            NodeClass(name="b", cpus=0.5, mem_bytes=GIB),
        )
    )
    (raw,) = raw_space(_kinds(cluster)).ranges
    a = [WorkerShape(gpus, quarters / 4) for gpus in (0, 1) for quarters in (1, 2, 3, 4)]
    b = [WorkerShape(0, 0.25), WorkerShape(0, 0.5)]
    assert set(raw.shapes) == set(a) | set(b)
    pairs = list(itertools.combinations_with_replacement([None, *a], 2))
    listed = [(pair, single) for pair in pairs for single in [None, *b]]
    assert (raw.max_workers, raw.max_ps) == (10, 10)
    assert raw.count == len(listed) * 10 * 10
    (limited,) = raw_space(_kinds(cluster), max_workers=3, max_gpus_per_worker=1).ranges
    assert limited.max_workers == 3
    (no_gpus,) = raw_space(_kinds(k80()), max_gpus_per_worker=2).ranges
    assert {shape.gpus for shape in no_gpus.shapes} == {0, 1, 2}


def test_a_count_stops_at_its_limit() -> None:
    cluster = Cluster(tuple(NodeClass(name=f"n{i}", cpus=i + 1, mem_bytes=GIB, gpus=4) for i in range(200)))
    raw = raw_space(_kinds(cluster))
    assert raw.count == COUNT_LIMIT
    assert identical_workers(raw).removed == COUNT_LIMIT - identical_workers(raw).space.count


def test_rule_1_leaves_one_shape_for_all_workers() -> None:
    shapes = (WorkerShape(0, 0.25), WorkerShape(0, 0.5))
    # Two indistinguishable machines, each with one of two shapes or none: 6 ways instead of 2.
    space = OptionSpace((OptionRange(shapes, 4, 4, mixed=True, ways=6),))
    result = identical_workers(space)
    assert space.count == 6 * 16
    assert result.space.count == 2 * 16
    assert result.removed == 4 * 16
    assert [entry.shapes for entry in result.space.ranges] == [(shape,) for shape in shapes]


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


def test_rule_2_leaves_numbers_of_gpus_and_the_cpus_to_the_placement() -> None:
    cluster = k80()
    kinds, sizes = _kinds(cluster), _sizes(cluster)
    space = identical_workers(raw_space(kinds)).space
    result = cpu_gpu_ratio(space, kinds, known_hardware(), sizes)
    assert [{shape.gpus for shape in entry.shapes} for entry in result.space.ranges] == [{1}, {2}, {4}]
    assert all(0.25 <= shape.cpus / shape.gpus <= 1.5 for shape in _shapes(result.space))
    assert {shape.cpus for shape in _shapes(result.space) if shape.gpus == 1} == {0.25, 0.75, 1.25, 1.5}
    # However many ratios fit, a number of GPUs is one option for each pair of numbers of tasks.
    assert result.space.count == 3 * 160 * 160
    assert result.removed == space.count - result.space.count > 0


def test_rule_2_shares_scarce_cpus_out() -> None:
    # Four GPUs on four cores: beside a ps and the chief (half a core each) 0.75 are left for each GPU.
    cluster = k80(cpus=4.0)
    kinds, sizes = _kinds(cluster), _sizes(cluster, flops=0.7755e9)
    result = cpu_gpu_ratio(identical_workers(raw_space(kinds)).space, kinds, known_hardware(), sizes)
    assert 0.75 in {shape.cpus for shape in _shapes(result.space) if shape.gpus == 1}


def test_rule_2_without_gpus_cuts_a_machine_into_even_shares() -> None:
    cluster = machines(1, cpus=2.0)
    kinds = _kinds(cluster)
    sizes = TaskSizes.of(digits(), 2.0)
    result = cpu_gpu_ratio(identical_workers(raw_space(kinds)).space, kinds, known_hardware(), sizes)
    # A ps and the chief take a quarter each: one worker gets 1.5, two get 0.75; more where the helpers are elsewhere.
    assert {shape.cpus for shape in _shapes(result.space)} == {0.75, 1.0, 1.5, 1.75, 2.0}
    assert all(shape.gpus == 0 for shape in _shapes(result.space))
    # CPUs do the computing here, so each share is an option of its own.
    assert all(len(entry.shapes) == 1 for entry in result.space.ranges)


def test_rule_2_gives_cpu_workers_machines_without_gpus_where_workers_may_differ() -> None:
    cluster = Cluster((*k80(2).nodes, NodeClass(name="plain", cpus=4.0, mem_bytes=8 * GIB)))
    kinds, sizes = _kinds(cluster), _sizes(cluster)
    mixed = cpu_gpu_ratio(raw_space(kinds), kinds, known_hardware(), sizes).space
    assert {shape.gpus for shape in _shapes(mixed)} == {0, 1, 2, 4}
    alike = cpu_gpu_ratio(identical_workers(raw_space(kinds)).space, kinds, known_hardware(), sizes).space
    assert {shape.gpus for shape in _shapes(alike)} == {1, 2, 4}


def _wide() -> OptionSpace:
    return OptionSpace(tuple(OptionRange((WorkerShape(gpus, gpus * 1.0),), 160, 160) for gpus in (1, 2, 4)))


def test_rule_3_bounds_workers_by_gpus_and_ps_by_machines() -> None:
    cluster = k80()
    kinds, sizes = _kinds(cluster), _sizes(cluster)
    result = task_counts(_wide(), kinds, sizes, useful_ps=30)
    assert [(entry.max_workers, entry.max_ps) for entry in result.space.ranges] == [(20, 5), (10, 5), (5, 5)]
    assert result.space.count == 5 * (20 + 10 + 5)
    assert result.removed == 3 * 160 * 160 - result.space.count


@pytest.mark.parametrize(
    ("megabytes", "useful"),
    [([100], 1), ([1000, 1, 1, 1], 1), ([50, 50], 2), ([411, 67, 59, 16], 2), ([10] * 30, 5), ([20, 10, 10], 2)],
)
def test_rule_3_leaves_out_parameter_servers_without_effect(megabytes: list[int], useful: int) -> None:
    model = profile([size * MB for size in megabytes])
    cluster = k80()
    space = _prune(cluster, PAPER, TaskSizes.of(model, 8.0))[-1].space
    assert {entry.max_ps for entry in space.ranges} == {useful}


def test_rule_3_drops_shapes_that_fit_no_machine() -> None:
    cluster = k80()
    shapes = (WorkerShape(8, 1.0),), (WorkerShape(1, 9.0),)
    space = OptionSpace(tuple(OptionRange(shape, 20, 20) for shape in shapes))
    result = task_counts(space, _kinds(cluster), _sizes(cluster), useful_ps=5)
    assert result.space.ranges == ()
    assert result.removed == space.count


def test_all_gpus_used_leaves_the_largest_number_of_workers_of_each_size() -> None:
    cluster = k80()
    kinds, sizes = _kinds(cluster), _sizes(cluster)
    result = all_gpus_used(task_counts(_wide(), kinds, sizes, useful_ps=30).space, kinds, known_hardware(), sizes)
    counts = [(entry.min_workers, entry.max_workers) for entry in result.space.ranges]
    assert counts == [(20, 20), (10, 10), (5, 5)]
    assert result.space.count == 15


def test_all_gpus_used_drops_workers_with_so_many_cpus_that_gpus_would_be_idle() -> None:
    cluster = k80()
    kinds, sizes = _kinds(cluster), _sizes(cluster)
    space = OptionSpace((OptionRange((WorkerShape(1, 1.0), WorkerShape(1, 4.0)), 160, 5),))
    (left,) = all_gpus_used(space, kinds, known_hardware(), sizes).space.ranges
    assert left.shapes == (WorkerShape(1, 1.0),)
    assert (left.min_workers, left.max_workers) == (20, 20)


def test_all_gpus_in_use_needs_workers_that_are_alike() -> None:
    with pytest.raises(BadInputError, match="'all_gpus_used' needs the rule 'identical_workers'"):
        make_plan(PlanRequest(digits(), machines(1), rules=frozenset({"all_gpus_used"})))


def test_gpus_whose_memory_is_too_small_may_be_idle() -> None:
    cluster = Cluster((*k80(2).nodes, *k80(1, name="small", gpu_model="V100").nodes))
    sizes = TaskSizes.of(profile([7_000 * MB]), 8.0)
    kinds = _kinds(cluster)
    # The model and its gradients take 14.3 GB: a V100's memory holds them, a K80's does not.
    (left,) = all_gpus_used(
        OptionSpace((OptionRange((WorkerShape(1, 1.0),), 50, 3),)), kinds, known_hardware(), sizes
    ).space.ranges
    assert left.max_workers == max(0, kinds[-1].room_for(sizes.worker(WorkerShape(1, 1.0))))


def test_the_example_of_the_paper_has_fewer_than_twenty_options() -> None:
    cluster = k80(cpus=4.0, mem_bytes=16 * GIB)
    prunings = _prune(cluster, frozenset(RULES), _sizes(cluster))
    assert [pruning.rule for pruning in prunings] == [
        "identical_workers",
        "cpu_gpu_ratio",
        "task_counts",
        "all_gpus_used",
    ]
    # 1, 2 or 4 GPUs a worker, all in use, and 1 to 5 parameter servers.
    assert prunings[-1].space.count == 15
    assert sum(pruning.removed for pruning in prunings) + 15 == raw_space(_kinds(cluster)).count
    plan = make_plan(PlanRequest(profile(), cluster, rules=frozenset(RULES)))
    assert plan.options.considered == 15
    assert plan.options.pruned == {pruning.rule: pruning.removed for pruning in prunings}
    assert sum(task.gpus for task in plan.tasks) == 20


@pytest.mark.parametrize("off", [frozenset({rule}) for rule in set(RULES) - {"identical_workers"}] + [frozenset(RULES)])
@pytest.mark.parametrize("cluster", [k80(2), machines(3)])
def test_what_is_generated_is_pruned_or_considered(cluster: Cluster, off: frozenset[str]) -> None:
    sizes = TaskSizes.of(digits(), max(node.cpus for node in cluster.nodes))
    raw = raw_space(_kinds(cluster))
    prunings = _prune(cluster, frozenset(RULES) - off, sizes)
    left = prunings[-1].space
    assert {pruning.rule for pruning in prunings} == (RULES.keys() | {"task_counts"}) - off
    assert all(pruning.removed >= 0 for pruning in prunings)
    assert raw.count == sum(pruning.removed for pruning in prunings) + left.count
    assert left.count > 0


def test_rules_by_name() -> None:
    assert parse_rules("all") == frozenset(RULES)
    assert parse_rules("none") == frozenset()
    assert parse_rules("default") == frozenset({"cpu_gpu_ratio"})
    assert parse_rules("paper") == PAPER
    assert parse_rules("default", "traffic") == frozenset(RULES)
    assert parse_rules("cpu_gpu_ratio") == frozenset({"cpu_gpu_ratio"})
    assert parse_rules(" all_gpus_used , cpu_gpu_ratio") == frozenset({"cpu_gpu_ratio", "all_gpus_used"})
    assert parse_rules("paper,-identical_workers") == frozenset({"cpu_gpu_ratio"})
    assert parse_rules("-cpu_gpu_ratio") == frozenset()
    assert parse_rules("paper,-cpu_gpu_ratio,all_gpus_used") == frozenset(RULES) - {"cpu_gpu_ratio"}
    assert parse_rules("all,-identical_workers") == frozenset(RULES) - {"identical_workers"}


@pytest.mark.parametrize("text", ["cpu_ratio", "-cpu_ratio", "all,cpu_ratio", "", "identical_workers,", "-all"])
def test_an_unknown_rule_names_the_known(text: str) -> None:
    with pytest.raises(
        BadInputError, match=r"is not a rule; rules are identical_workers, cpu_gpu_ratio, all_gpus_used, "
    ):
        parse_rules(text)


def test_a_request_with_an_unknown_rule() -> None:
    with pytest.raises(BadInputError, match="'fastest' is not a rule"):
        make_plan(PlanRequest(digits(), machines(1), rules=frozenset({"fastest"})))


@pytest.mark.slow
def test_any_rule_can_be_switched_off() -> None:
    model, cluster = profile(synchronous=True), k80(2, network_gbps=2.0)
    inside = make_plan(PlanRequest(model, cluster, rules=PAPER))
    for rule in PAPER:
        plan = make_plan(PlanRequest(model, cluster, rules=PAPER - {rule}))
        assert plan.samples_per_s >= inside.samples_per_s * 0.95
        assert rule not in plan.options.pruned
        assert plan.options.considered > inside.options.considered


def test_cpu_only_machines_work_too_where_workers_may_differ() -> None:
    # On a fast network a machine without GPUs adds its samples; alike workers would all need GPUs.
    plain = NodeClass(name="plain", cpus=32.0, mem_bytes=64 * GIB, network_gbps=100)
    gpu = NodeClass(name="gpu", cpus=8.0, mem_bytes=32 * GIB, gpus=1, gpu_model="K80", network_gbps=100)
    model, cluster = profile([4 * MB] * 4, flops=1e8), Cluster((plain, gpu))
    inside = make_plan(PlanRequest(model, cluster, max_workers=3, rules=PAPER))
    rules = PAPER - {"identical_workers"}
    free = make_plan(PlanRequest(model, cluster, max_workers=3, rules=rules))
    workers = [(task.node, task.gpus) for task in free.tasks if task.role == "worker"]
    assert {("plain", 0), ("gpu", 1)} <= set(workers)
    assert free.samples_per_s > inside.samples_per_s * 1.05
    assert free.optimal


@examples(60)
@given(
    st.lists(st.tuples(st.sampled_from([1.0, 2.5, 8.0]), st.integers(1, 8), st.integers(0, 4)), min_size=1, max_size=3),
    st.lists(st.lists(st.integers(0, 2_000), max_size=3), min_size=1, max_size=3),
)
def test_rooms_are_those_of_each_machine(classes: list[tuple[float, int, int]], loads_mb: list[list[int]]) -> None:
    nodes = tuple(NodeClass(name=f"n{i}", cpus=c, mem_bytes=m * GIB, gpus=g) for i, (c, m, g) in enumerate(classes))
    kinds = _kinds(Cluster(nodes))
    tasks = [TaskResources(0.75, 700, 10), TaskResources(0.5, 300, 10, gpus=1)]
    loads = [[TaskResources(0.4, size, 64) for size in sizes] for sizes in loads_mb]
    found = Machines(kinds).capacity(tasks, loads)
    for (i, kind), (j, task), (k, load) in itertools.product(enumerate(kinds), enumerate(tasks), enumerate(loads)):
        assert found[i, j, k] == kind.room_for(task, load)


def test_of_workers_that_differ_in_spare_cpus_the_largest_stays() -> None:
    cluster = k80(1)
    sizes = TaskSizes.of(digits(), 8.0)
    shapes = [WorkerShape(1, cpus) for cpus in (0.5, 1.0, 1.25, 1.5, 1.75, 2.0)] + [WorkerShape(2, 2.0)]
    left = without_spare_cpus(shapes, _kinds(cluster), sizes)
    # Four of 1.5 CPUs fit beside a ps and the chief, of 1.75 beside one of them, of 2 only alone; of 1.25 beside a ps
    # with more CPUs.
    assert set(left) == {WorkerShape(1, cpus) for cpus in (1.0, 1.25, 1.5, 1.75, 2.0)} | {
        WorkerShape(1, 0.5),
        WorkerShape(2, 2.0),
    }
