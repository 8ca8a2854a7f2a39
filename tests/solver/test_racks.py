"""Racks: the (max,+) tables, least traffic with costs by machine and rack, and the fastest placement across uplinks."""

from __future__ import annotations

import dataclasses
import itertools
import random
import time
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dike.profile import Api
from solver import Cluster, NodeClass
from solver.evaluation import evaluate, planned_tasks
from solver.formulations.instance import (
    Instance,
    NodeCosts,
    RackCosts,
    UniformCosts,
    network_s,
    traffic_bytes,
    violation,
)
from solver.formulations.racks import MAX_STATES, TwoLevelRacks
from solver.hardware import known_hardware
from solver.nodes import NodeKind
from solver.placement.fastest import OutOfTimeError, fastest_placement, least_traffic_placement
from solver.placement.naming import Assignment
from solver.placement.problem import placement_problem
from solver.racks import problem as rack_problem_module
from solver.racks.max_plus import Frame, State, Table, plus, table_capacity, trace
from solver.racks.placement import can_reach_across_racks, fastest_across_racks
from solver.racks.problem import RackProblem, rack_problem
from solver.racks.scoring import RackPlacement
from solver.racks.sharding import Place, Uplinks, distribute_shards
from solver.resources import TaskResources, WorkerShape
from solver.scenario import Scenario
from solver.shards import Shards
from solver.units import BYTES_PER_S_PER_GBPS, GIB
from tests.properties import examples
from tests.solver import solver_brute_force as brute_force
from tests.solver.solver_cases import MB, profile

ORIGIN = (0, 0, 0)
CLOSE = 1e-6

some = examples(80)
many = examples(150)


# (max,+) tables


def _table(generator: random.Random) -> Table:
    """Values of which some are impossible, some lie on lines, some turn up and some down."""
    shape = generator.randint(1, 2), generator.randint(1, 3), generator.randint(1, 7)
    values = np.array([generator.choice([0.0, 1.0, 1.0, 2.5, -3.0]) for _ in range(int(np.prod(shape)))]).reshape(shape)
    if generator.random() < 0.7:
        values = values.cumsum(axis=2)
    if generator.random() < 0.5:
        values[np.array([generator.random() < 0.3 for _ in range(values.size)]).reshape(shape)] = -np.inf
    values[0, 0, 0] = 0.0
    return values


def _every_way(tables: list[Table], goal: State) -> float:
    """The best sum over all ways to share the goal out."""
    best: dict[State, float] = {ORIGIN: 0.0}
    for table in tables:
        after: dict[State, float] = {}
        for held, value in best.items():
            for index, more in np.ndenumerate(table):
                state = plus(held, index)
                if np.isfinite(more):
                    after[state] = max(after.get(state, -np.inf), value + more)
        best = after
    return best.get(goal, -np.inf)


@pytest.mark.slow
def test_combined_tables_hold_the_best_of_all_ways_to_share_the_tasks_out() -> None:
    generator = random.Random(1)
    reached = 0
    for _ in range(80):
        sets = [(_table(generator), generator.randint(1, 3)) for _ in range(generator.randint(1, 3))]
        tables = [table for table, count in sets for _ in range(count)]
        capacity: State = ORIGIN
        for table in tables:
            capacity = plus(capacity, table_capacity(table, ORIGIN))
        goal = tuple(generator.randint(0, most) for most in capacity)
        frame = Frame(goal, capacity)
        leaves = [(frame.leaf(index, table, ORIGIN), count) for index, (table, count) in enumerate(sets)]
        union = frame.union([(leaf, count) for leaf, count in leaves if leaf is not None])
        expected = _every_way(tables, goal)
        found = -np.inf if union is None else union.value(goal)
        assert found == pytest.approx(expected, abs=1e-9)
        if union is None or found == -np.inf:
            continue
        reached += 1
        states: list[tuple[int, State]] = []
        trace(union, goal, lambda index, state, states=states: states.append((index, state)))  # type: ignore[misc]
        assert sorted(index for index, _ in states) == sorted(
            i for i, (_, count) in enumerate(sets) for _ in range(count)
        )
        assert sum(sets[index][0][state] for index, state in states) == pytest.approx(expected, abs=1e-9)
        assert tuple(sum(column) for column in zip(*(state for _, state in states), strict=True)) == goal
    assert reached > 30


# Least traffic

PS = TaskResources(1, 1024, 64)
WORKER = TaskResources(1, 2048, 128, 1)


def _kind(names: list[str], cpus: int, mem_gib: int, gpus: int, gbps: float = 10.0) -> NodeKind:
    return NodeKind(cpus * 1000, mem_gib * 1024, 10_000, gpus, "K80", gbps * BYTES_PER_S_PER_GBPS, None, tuple(names))


def _instance(generator: random.Random) -> Instance:
    count = generator.randint(3, 5)
    names = [f"n{index}" for index in range(count)]
    kinds = []
    while names:
        here = [names.pop() for _ in range(min(len(names), generator.randint(1, 3)))]
        kinds.append(_kind(here, generator.randint(1, 4), generator.choice([2, 5, 8]), generator.randint(0, 3)))
    shards = (generator.choice([5, 80]) * MB,) * generator.randint(1, 3)
    rack_of = {name: generator.choice(["left", "right", None]) for kind in kinds for name in kind.names}
    costs = generator.choice([UniformCosts(), RackCosts(rack_of), RackCosts(rack_of, 0.1, 0.5, 0.75)])
    return Instance(
        tuple(kinds),
        WORKER,
        generator.randint(1, 5),
        shards,
        (PS,) * len(shards),
        TaskResources(0.5, 512, 32) if generator.random() < 0.4 else None,
        generator.choice([1, 2, None]),
        costs,
    )


def _splits(total: int, parts: int) -> Iterator[tuple[int, ...]]:
    if parts == 1:
        yield (total,)
        return
    for here in range(total + 1):
        for rest in _splits(total - here, parts - 1):
            yield (here, *rest)


def _every_assignment(instance: Instance) -> Iterator[Assignment]:
    """All of them up to the order of the workers and of the parameter servers, which are alike."""
    names = [name for kind in instance.kinds for name in kind.names]
    for ps in _splits(len(instance.shards), len(names)):
        for workers in _splits(instance.workers, len(names)):
            for chief in names if instance.chief is not None else [None]:
                yield Assignment(
                    tuple(itertools.chain.from_iterable(map(itertools.repeat, names, ps))),
                    tuple(itertools.chain.from_iterable(map(itertools.repeat, names, workers))),
                    chief,
                )


@pytest.mark.slow
def test_the_traffic_is_the_least_of_all_placements() -> None:
    generator = random.Random(2)
    impossible = 0
    for _ in range(60):
        instance = _instance(generator)
        assert TwoLevelRacks().refusal(instance) is None
        solution = TwoLevelRacks().solve(instance)
        fitting = [found for found in _every_assignment(instance) if violation(instance, found) is None]
        if not fitting:
            assert solution is None
            impossible += 1
            continue
        assert solution is not None
        assert solution.proven
        assert violation(instance, solution.assignment) is None
        least = min(traffic_bytes(instance, found) for found in fitting)
        assert solution.traffic_bytes == pytest.approx(least)
        assert solution.bound == solution.traffic_bytes == traffic_bytes(instance, solution.assignment)
        assert solution.network_s == network_s(instance, solution.assignment)
    assert 5 < impossible < 40


def _large(seed: int, costs_of_racks: bool, per_rack: int = 20) -> Instance:
    """A hundred machines of three kinds, dealt out to the racks at random."""
    names = [f"n{index}" for index in range(100)]
    rack_of = {name: f"r{index // per_rack}" for index, name in enumerate(names)}
    random.Random(seed).shuffle(names)
    kinds = _kind(names[:60], 8, 32, 4), _kind(names[60:80], 4, 32, 2), _kind(names[80:], 8, 16, 0)
    costs = RackCosts(rack_of) if costs_of_racks else UniformCosts()
    return Instance(kinds, WORKER, 200, (40 * MB,) * 12, (PS,) * 12, PS, 1, costs)


def test_without_racks_the_traffic_is_that_of_the_program_over_counts() -> None:
    classes = (
        NodeClass(name="a", count=60, cpus=4, mem_bytes=16 * GIB, gpus=4),
        NodeClass(name="b", count=30, cpus=8, mem_bytes=32 * GIB, gpus=1),
    )
    scenario = Scenario.of(profile([40 * MB] * 12, api=Api.GRAPH), Cluster(classes), known_hardware())
    shape, shards = WorkerShape(1, 1.0), scenario.shards(12)
    assert shards.are_equal
    ps = (scenario.sizes.ps(shards.sizes[0]),) * 12
    for workers in (20, 100, 190):
        problem = placement_problem(scenario.kinds, scenario.model(shape), scenario.sizes, shards, workers)
        counts = least_traffic_placement(problem)
        instance = Instance(scenario.kinds, scenario.sizes.worker(shape), workers, shards.sizes, ps)
        tables = TwoLevelRacks().solve(instance)
        assert counts is not None
        assert tables is not None
        assert tables.traffic_bytes == pytest.approx(counts.traffic_bytes)


def test_the_names_of_machines_and_racks_make_no_difference() -> None:
    one, other = _large(1, costs_of_racks=True), _large(1, costs_of_racks=True)
    assert isinstance(other.costs, RackCosts)
    renamed = {f"n{index}": f"n{(index * 37 + 20 * (index // 20)) % 100}" for index in range(100)}
    assert len(set(renamed.values())) == 100
    kinds = [dataclasses.replace(kind, names=tuple(map(renamed.get, kind.names))) for kind in reversed(other.kinds)]
    racks = {renamed[name]: f"other {rack}" for name, rack in other.costs.rack_of.items()}
    other = dataclasses.replace(other, kinds=tuple(kinds), costs=dataclasses.replace(other.costs, rack_of=racks))
    first, second = TwoLevelRacks().solve(one), TwoLevelRacks().solve(other)
    assert first is not None
    assert second is not None
    assert first.traffic_bytes == second.traffic_bytes
    assert violation(other, second.assignment) is None


@pytest.mark.slow
def test_the_more_machines_share_a_rack_the_less_crosses() -> None:
    found = [TwoLevelRacks().solve(_large(1, True, per_rack)) for per_rack in (5, 10, 20, 50, 100)]
    crossing = [solution.traffic_bytes for solution in found if solution is not None]
    assert len(crossing) == 5
    assert crossing == sorted(crossing, reverse=True)
    uniform = TwoLevelRacks().solve(_large(1, False))
    assert uniform is not None
    assert crossing[-1] == pytest.approx(uniform.traffic_bytes)


def test_it_says_what_it_does_not_take() -> None:
    instance = _large(1, costs_of_racks=True)
    method = TwoLevelRacks()
    assert isinstance(instance.costs, RackCosts)
    unequal = dataclasses.replace(instance, shards=(50 * MB, *instance.shards[1:]))
    assert "differ in size" in str(method.refusal(unequal))
    assert "pair" in str(method.refusal(dataclasses.replace(instance, costs=NodeCosts({}))))
    racks = {name: rack for name, rack in instance.costs.rack_of.items() if name != "n7"}
    assert "'n7'" in str(method.refusal(dataclasses.replace(instance, costs=RackCosts(racks))))
    kind = _kind([f"x{index}" for index in range(4000)], 8, 32, 4)
    huge = Instance((kind,), WORKER, 8000, (MB,) * 1000, (PS,) * 1000)
    assert str(MAX_STATES) in str(method.refusal(huge))


def test_it_stops_in_time() -> None:
    with pytest.raises(OutOfTimeError):
        TwoLevelRacks().solve(_large(1, costs_of_racks=True), time_limit_s=0.0)


# Fastest across racks

RACKS = ["left", "right", "middle"]
rack_nodes = st.lists(
    st.builds(
        lambda cpus, gpus, model, gbps, mem, rack: NodeClass(
            name="x", cpus=cpus, mem_bytes=mem * GIB, gpus=gpus, gpu_model=model, network_gbps=gbps, rack=rack
        ),
        st.sampled_from([1.0, 2.0, 2.5, 4.0]),
        st.integers(1, 3),
        st.sampled_from(["K80", "V100"]),
        st.sampled_from([0.5, 1.0, 2.0, 10.0]),
        st.sampled_from([4, 16, 64]),
        st.sampled_from(RACKS),
    ),
    min_size=3,
    max_size=4,
)
kinds_of_training = st.tuples(
    st.booleans(), st.sampled_from([Api.GRAPH, Api.GRAPH, Api.KERAS]), st.sampled_from([1e5, 1e8, 4e9])
)
uplinks = st.sampled_from([0.25, 0.5, 1.0, 3.0])


def _case(
    classes: list[NodeClass], training: tuple[bool, Api, float], shards: Shards, workers: int, uplink_gbps: float
) -> tuple[Scenario, RackProblem, brute_force.Job]:
    synchronous, api, flops = training
    model = profile(list(shards.sizes), synchronous=synchronous, api=api, flops=flops, sample_bytes=600, slots=0)
    named = tuple(dataclasses.replace(node, name=f"n{index}") for index, node in enumerate(classes))
    scenario = Scenario.of(model, Cluster(named, across_racks_gbps=uplink_gbps), known_hardware())
    shape, uplink = WorkerShape(1, 0.5), uplink_gbps * BYTES_PER_S_PER_GBPS
    problem = rack_problem(scenario.kinds, scenario.model(shape), scenario.sizes, shards, workers, uplink)
    within = scenario.cluster.within_node_gbps
    job = brute_force.Job(
        model, scenario.sizes, shape, workers, shards.sizes, within, uplink_gbps, requests=shards.requests
    )
    return scenario, problem, job


def _check(scenario: Scenario, job: brute_force.Job, shards: Shards, found: RackPlacement) -> None:
    """What it says of the placement is what evaluating the placement gives, and every machine holds its tasks."""
    worth = evaluate(scenario, job.shape, shards, found.assignment)
    assert found.samples_per_s == pytest.approx(worth.samples_per_s)
    assert found.round_s == pytest.approx(worth.step_time.total)
    assert found.network_s == pytest.approx(worth.step_time.network)
    assert found.traffic_bytes == pytest.approx(worth.traffic_bytes)
    assert (len(found.assignment.ps), len(found.assignment.workers)) == (len(shards.sizes), job.workers)
    assert len(set(found.assignment.ps)) == len(found.assignment.ps)
    tasks = planned_tasks(scenario, job.shape, shards, found.assignment)
    for node in scenario.cluster.nodes:
        here = [task for task in tasks if task.node == node.name]
        assert sum(task.cpus for task in here) <= node.cpus + CLOSE
        assert sum(task.mem_mb for task in here) <= node.mem_bytes / 2**20
        assert sum(task.gpus for task in here) <= node.gpus


@many
@given(rack_nodes, kinds_of_training, st.integers(2, 6), st.integers(1, 3), uplinks)
def test_with_equal_shards_no_placement_across_racks_is_faster_or_as_fast_with_less_traffic(
    classes: list[NodeClass], training: tuple[bool, Api, float], workers: int, ps: int, uplink_gbps: float
) -> None:
    shards = Shards((120 * MB // ps,) * ps, {})
    scenario, problem, job = _case(classes, training, shards, workers, uplink_gbps)
    found = fastest_across_racks(problem)
    expected = brute_force.best(job, scenario.cluster.nodes)
    if expected is None:
        assert found is None
        return
    assert found is not None
    _check(scenario, job, shards, found)
    assert found.samples_per_s == pytest.approx(expected.samples_per_s, rel=CLOSE)
    assert found.samples_bound == found.samples_per_s
    if problem.model.profile.synchronous:
        assert found.traffic_bytes == pytest.approx(expected.traffic, rel=CLOSE)
    assert can_reach_across_racks(problem, expected.samples_per_s)
    assert not can_reach_across_racks(problem, expected.samples_per_s * 1.001)


megabytes_of_shards = st.lists(st.integers(10, 60), min_size=2, max_size=3)


def _unequal(megabytes: list[int]) -> Shards:
    return Shards(tuple(sorted((size * MB for size in megabytes), reverse=True)), {})


@pytest.mark.slow
@some
@given(rack_nodes, kinds_of_training, st.integers(2, 6), megabytes_of_shards, uplinks)
def test_with_few_unequal_shards_no_placement_across_racks_is_faster(
    classes: list[NodeClass], training: tuple[bool, Api, float], workers: int, megabytes: list[int], uplink_gbps: float
) -> None:
    shards = _unequal(megabytes)
    scenario, problem, job = _case(classes, training, shards, workers, uplink_gbps)
    found = fastest_across_racks(problem)
    expected = brute_force.best(job, scenario.cluster.nodes)
    assert (found is None) == (expected is None)
    if found is not None and expected is not None:
        _check(scenario, job, shards, found)
        assert found.samples_per_s == pytest.approx(expected.samples_per_s, rel=CLOSE)
        assert found.samples_bound == found.samples_per_s
        assert can_reach_across_racks(problem, expected.samples_per_s)
        assert not can_reach_across_racks(problem, expected.samples_per_s * 1.001)
        if problem.model.profile.synchronous:
            assert found.traffic_bytes == pytest.approx(expected.traffic, rel=CLOSE)


@pytest.mark.slow
@some
@given(rack_nodes, kinds_of_training, st.integers(2, 6), megabytes_of_shards, uplinks)
def test_with_many_unequal_shards_no_placement_across_racks_beats_the_bound(
    classes: list[NodeClass], training: tuple[bool, Api, float], workers: int, megabytes: list[int], uplink_gbps: float
) -> None:
    shards = _unequal(megabytes)
    scenario, problem, job = _case(classes, training, shards, workers, uplink_gbps)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rack_problem_module, "MAX_STATES", 0)
        found = fastest_across_racks(problem)
        expected = brute_force.best(job, scenario.cluster.nodes)
        if expected is None:
            assert found is None
            return
        assert can_reach_across_racks(problem, expected.samples_per_s)
    if found is not None:
        _check(scenario, job, shards, found)
        assert found.samples_per_s <= expected.samples_per_s * (1 + CLOSE)
        assert found.samples_bound >= expected.samples_per_s * (1 - CLOSE)


def _racks_of(count: int, per_rack: int, gbps: float) -> Cluster:
    racks = tuple(
        NodeClass(
            name=f"r{i}",
            count=per_rack,
            cpus=8,
            mem_bytes=32 * GIB,
            gpus=4,
            gpu_model="K80",
            network_gbps=12.5,
            rack=str(i),
        )
        for i in range(count)
    )
    return Cluster(racks, across_racks_gbps=gbps)


@pytest.mark.parametrize("synchronous", [True, False])
def test_an_uplink_that_limits_nothing_leaves_the_fastest_placement_without_racks(synchronous: bool) -> None:
    scenario = Scenario.of(profile([20 * MB] * 6, synchronous=synchronous), _racks_of(4, 5, 1e6), known_hardware())
    shape, shards = WorkerShape(1, 1.0), scenario.shards(6)
    model = scenario.model(shape)
    assert shards.are_equal
    without = fastest_placement(placement_problem(scenario.kinds, model, scenario.sizes, shards, 50))
    found = fastest_across_racks(
        rack_problem(scenario.kinds, model, scenario.sizes, shards, 50, 1e6 * BYTES_PER_S_PER_GBPS)
    )
    assert without is not None
    assert found is not None
    assert found.samples_per_s == pytest.approx(without.samples_per_s)
    assert found.traffic_bytes == pytest.approx(without.traffic_bytes)


@pytest.mark.slow
@pytest.mark.parametrize("synchronous", [True, False])
def test_shards_of_a_few_sizes_are_placed_at_best_and_many_nearly_equal_ones_nearly(synchronous: bool) -> None:
    scenario = Scenario.of(profile(synchronous=synchronous), _racks_of(5, 10, 10.0), known_hardware())
    shape, uplink = WorkerShape(1, 1.0), 10 * BYTES_PER_S_PER_GBPS
    shards = scenario.shards(8)
    assert 1 < len(set(shards.sizes)) < 8
    problem = rack_problem(scenario.kinds, scenario.model(shape), scenario.sizes, shards, 180, uplink)
    best = fastest_across_racks(problem)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rack_problem_module, "MAX_STATES", 0)
        near = fastest_across_racks(problem)
    assert best is not None
    assert near is not None
    assert best.samples_bound == best.samples_per_s
    assert best.samples_per_s * (1 - CLOSE) <= near.samples_bound <= best.samples_per_s * 1.05
    assert best.samples_per_s * 0.97 <= near.samples_per_s <= best.samples_per_s * (1 + CLOSE)


def test_the_search_across_racks_stops_in_time() -> None:
    scenario = Scenario.of(profile([20 * MB] * 6), _racks_of(3, 4, 1.0), known_hardware())
    shape, shards = WorkerShape(1, 1.0), scenario.shards(6)
    problem = rack_problem(scenario.kinds, scenario.model(shape), scenario.sizes, shards, 20, BYTES_PER_S_PER_GBPS)
    with pytest.raises(OutOfTimeError):
        fastest_across_racks(problem, time.monotonic() - 1)


# Unequal shards to chosen machines


def _busiest(places: list[Place], sizes: list[int], links: Uplinks, held: list[int]) -> float:
    stored = [0, 0, 0]
    for place, shard in zip(places, held, strict=True):
        stored[place.rack] += sizes[shard]
    cards = [place.card_s[shard] for place, shard in zip(places, held, strict=True)]
    return max(*cards, *(links.busy_s(rack, here) for rack, here in enumerate(stored)))


def test_no_exchange_of_two_shards_shortens_the_time_of_the_busiest_link() -> None:
    generator = random.Random(3)
    for _ in range(30):
        sizes = sorted((generator.randint(10, 60) for _ in range(6)), reverse=True)
        places = [
            Place(generator.randrange(3), generator.randint(0, 2), tuple(generator.random() * size for size in sizes))
            for _ in sizes
        ]
        links = Uplinks(10.0, tuple(generator.randint(1, 8) for _ in range(3)), sum(sizes))
        dealt = list(distribute_shards(places, sizes, links))
        assert sorted(dealt) == list(range(6))
        for one, two in itertools.combinations(range(6), 2):
            swapped = list(dealt)
            swapped[one], swapped[two] = dealt[two], dealt[one]
            assert _busiest(places, sizes, links, swapped) >= _busiest(places, sizes, links, dealt) * (1 - 1e-12)
