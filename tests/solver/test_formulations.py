"""All formulations give what enumeration gives, and each what the others give where there are too many placements."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import random
from types import SimpleNamespace

import pytest

from benchmarks.programs import FORMULATIONS
from benchmarks.programs.literal import Literal
from dike.exceptions import BadInputError
from solver.formulations import auto, configurations, programs
from solver.formulations.instance import (
    Formulation,
    Instance,
    NodeCosts,
    RackCosts,
    Solution,
    UniformCosts,
    card_s,
    network_s,
    traffic_bytes,
    violation,
)
from solver.milp import SolverError
from solver.nodes import NodeKind
from solver.placement.fastest import OutOfTimeError
from solver.placement.naming import Assignment
from solver.resources import TaskResources
from tests.solver.formulation_cases import MB, best_values, instance, kind, placements, random_instance

CLOSE = 1e-6
SEEDS = range(40)
CHIEF = TaskResources(0.5, 2048, 64)
TAKES = {
    "uniform": set(FORMULATIONS),
    "racks": {"two-level racks", "node-to-node costs"},
    "pairs": {"node-to-node costs"},
}


@functools.cache
def _case(seed: int, costs: str) -> tuple[Instance, dict[str, tuple[float, float]] | None]:
    case = random_instance(seed, costs)
    return case, best_values(case)


def objective_value(found: Solution, formulation: Formulation) -> float:
    return found.traffic_bytes if formulation.objective == "traffic" else found.network_s


def _sound(case: Instance, formulation: Formulation, found: Solution) -> None:
    """What it says of its placement is so."""
    assert violation(case, found.assignment) is None
    assert found.traffic_bytes == traffic_bytes(case, found.assignment)
    assert found.network_s == network_s(case, found.assignment)
    value = objective_value(found, formulation)
    assert found.bound == value if found.proven else found.bound <= value


@pytest.mark.slow
@pytest.mark.parametrize("costs", TAKES)
@pytest.mark.parametrize("name", FORMULATIONS)
def test_a_formulation_finds_what_enumeration_finds(name: str, costs: str) -> None:
    formulation = FORMULATIONS[name]
    placed = 0
    for seed in SEEDS:
        case, expected = _case(seed, costs)
        if formulation.refusal(case) is not None:
            continue
        found = formulation.solve(case)
        if expected is None:
            assert found is None, seed
            continue
        assert found is not None, seed
        assert found.proven, seed
        _sound(case, formulation, found)
        traffic, network = expected[formulation.objective]
        assert found.traffic_bytes == pytest.approx(traffic, rel=CLOSE), seed
        if formulation.objective == "network":
            assert found.network_s == pytest.approx(network, rel=CLOSE), seed
        placed += 1
    # More than a few of the cases that it is made for must have counted.
    assert placed >= 10 if name in TAKES[costs] else placed == 0


@pytest.mark.slow
def test_the_random_instances_are_of_every_kind() -> None:
    cases = [_case(seed, "uniform") for seed in SEEDS]
    unlimited = [best_values(dataclasses.replace(case, ps_per_node=None)) for case, _ in cases]
    assert {case.ps_per_node for case, _ in cases} == {1, 2, None}
    assert {case.chief is None for case, _ in cases} == {True, False}
    assert {case.equal_shards for case, _ in cases} == {True, False}
    assert {len(case.kinds) for case, _ in cases} == {1, 2}
    assert 0.2 < sum(expected is None for _, expected in cases) / len(cases) < 0.6
    # One ps a machine costs traffic or room, and the two objectives are at odds, in some.
    assert any(free != expected for free, (_, expected) in zip(unlimited, cases, strict=True))
    assert any(expected and expected["traffic"][0] < expected["network"][0] for _, expected in cases)


def _fleet(machines: int) -> tuple[NodeKind, ...]:
    """Three fifths with 4 GPUs, a fifth with 2, a fifth with none and a faster card."""
    names = [f"n{index}" for index in range(machines)]
    fifth = machines // 5
    return (
        kind(8, 32, 4, 10, *names[2 * fifth :]),
        kind(8, 32, 2, 10, *names[:fifth]),
        kind(8, 32, 0, 25, *names[fifth : 2 * fifth]),
    )


_draw = random.Random(5)
UNEQUAL = tuple(sorted((_draw.randint(5, 60) * MB for _ in range(5)), reverse=True))
FEW = {"literal", "literal, strengthened"}
LARGER = {
    "one ps": (instance((kind(8, 32, 4, 10, *"abcdefghij"),), 10, (85 * MB,)), set()),
    "equal shards": (instance(_fleet(15), 24, (20 * MB,) * 4), {"literal"}),
    "with a chief, ps stacked": (
        instance(_fleet(15), 24, (20 * MB,) * 4, chief=CHIEF, ps_per_node=None),
        {"literal"},
    ),
    "unequal shards": (instance(_fleet(20), 40, UNEQUAL, chief=CHIEF), FEW),
    "unequal shards, two a machine": (instance(_fleet(30), 70, UNEQUAL, ps_per_node=2), FEW),
    "racks, GPUs idle": (
        instance(_fleet(15), 20, (20 * MB,) * 5, costs=RackCosts({f"n{i}": f"r{i % 4}" for i in range(15)})),
        set(),
    ),
    "racks, all GPUs used": (
        instance(_fleet(25), 70, (20 * MB,) * 8, costs=RackCosts({f"n{i}": f"r{i // 6}" for i in range(25)})),
        set(),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("title", LARGER)
def test_formulations_agree_where_placements_are_too_many_to_count(title: str) -> None:
    case, too_slow = LARGER[title]
    found: dict[str, list[Solution]] = {"traffic": [], "network": []}
    for name, formulation in FORMULATIONS.items():
        if name in too_slow or formulation.refusal(case) is not None:
            continue
        solution = formulation.solve(case)
        assert solution is not None
        assert solution.proven
        _sound(case, formulation, solution)
        found[formulation.objective].append(solution)
    assert len(found["traffic"]) >= 2
    least = found["traffic"][0].traffic_bytes
    assert [s.traffic_bytes for s in found["traffic"]] == pytest.approx([least] * len(found["traffic"]), rel=CLOSE)
    for quickest in found["network"]:
        assert quickest.network_s == pytest.approx(found["network"][0].network_s, rel=CLOSE)
        assert quickest.traffic_bytes == pytest.approx(found["network"][0].traffic_bytes, rel=CLOSE)
        assert quickest.traffic_bytes >= least * (1 - CLOSE)
        assert all(quickest.network_s <= s.network_s * (1 + CLOSE) for s in found["traffic"])


def test_uniform_costs_may_be_written_as_racks_or_pairs() -> None:
    case, _ = LARGER["equal shards"]
    names = [name for kind_ in case.kinds for name in kind_.names]
    uniform = FORMULATIONS["class counts"].solve(case)
    assert uniform is not None
    for costs in (
        RackCosts(dict.fromkeys(names, "r"), 0.1, 1.0, 9.0),
        RackCosts({name: name for name in names}, 0.1, 9.0, 1.0),
        NodeCosts(dict.fromkeys(itertools.combinations(names, 2), 1.0), 0.1, 9.0),
    ):
        found, _ = auto.solve(dataclasses.replace(case, costs=costs))
        assert found is not None
        assert found.traffic_bytes == pytest.approx(uniform.traffic_bytes, rel=CLOSE)


@pytest.mark.slow
def test_sixteen_thousand_machines_are_counted_not_listed() -> None:
    case = instance(_fleet(16_000), 30_000, (MB,) * 5_000, chief=CHIEF)
    found = FORMULATIONS["class counts"].solve(case)
    assert found is not None
    assert found.proven
    # Every ps with as many workers as fit: 5,000 of the 9,600 machines with 4 GPUs.
    assert found.traffic_bytes == pytest.approx(MB * (30_000 * 5_000 - 0.9 * 4 * 5_000), rel=CLOSE)
    quickest = FORMULATIONS["busiest card, class counts"].solve(case)
    assert quickest is not None
    assert quickest.proven
    assert quickest.network_s <= found.network_s


@pytest.mark.slow
def test_a_cost_below_that_of_staying_is_exact_where_it_is_taken() -> None:
    for seed in SEEDS:
        case = dataclasses.replace(random_instance(seed, "uniform"), costs=UniformCosts(1.0, 0.4))
        assert Literal().refusal(case) == "a byte that leaves its machine must cost more than one that stays"
        expected = best_values(case)
        for name in ("class counts", "node-to-node costs", "two-level racks"):
            if FORMULATIONS[name].refusal(case) is None:
                found = FORMULATIONS[name].solve(case)
                assert (found is None) == (expected is None)
                if found is not None and expected is not None:
                    assert found.traffic_bytes == pytest.approx(expected["traffic"][0], rel=CLOSE), (name, seed)


def _hard() -> dict[str, tuple[Instance, float]]:
    """Instances that are not proven in the time given, and the least by the formulation's objective."""
    homogeneous = instance((kind(8, 32, 4, 10, *(f"n{i}" for i in range(10))),), 30, (10 * MB,) * 8, ps_per_node=None)
    least, _ = auto.solve(homogeneous)
    quickest = FORMULATIONS["busiest card, class counts"].solve(homogeneous)
    names = [f"n{i}" for i in range(20)]
    racks = RackCosts({name: f"r{i % 5}" for i, name in enumerate(names)})
    spread = instance((kind(8, 32, 4, 10, *names),), 38, (10 * MB,) * 9, costs=racks)
    nearest, _ = auto.solve(spread)
    assert least is not None
    assert quickest is not None
    assert nearest is not None
    return {
        "literal": (homogeneous, least.traffic_bytes),
        "literal, strengthened": (homogeneous, least.traffic_bytes),
        "unequal shards": (homogeneous, least.traffic_bytes),
        "node-to-node costs": (spread, nearest.traffic_bytes),
        "busiest card, unequal shards": (homogeneous, quickest.network_s),
    }


@pytest.mark.slow
@pytest.mark.parametrize("limit_s", [0.0, 0.15, 0.6])
def test_a_limit_that_is_too_short_proves_nothing_wrong(limit_s: float) -> None:
    unproven = 0
    for name, (case, least) in _hard().items():
        formulation = FORMULATIONS[name]
        try:
            found = formulation.solve(case, limit_s)
        except OutOfTimeError:
            unproven += 1
            continue
        assert found is not None
        _sound(case, formulation, found)
        assert found.bound <= least * (1 + CLOSE)
        assert objective_value(found, formulation) >= least * (1 - CLOSE)
        unproven += not found.proven
    assert unproven >= (5 if limit_s == 0.0 else 1)


@pytest.mark.parametrize("name", [name for name in FORMULATIONS if name != "two-level racks"])
def test_no_time_at_all_is_said(name: str) -> None:
    case, _ = LARGER["one ps"]
    with pytest.raises(OutOfTimeError):
        FORMULATIONS[name].solve(case, 0.0)


def test_bisection_cut_off_at_any_point_keeps_what_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    case, _ = LARGER["unequal shards, two a machine"]
    formulation = FORMULATIONS["busiest card, class counts"]
    best = formulation.solve(case)
    assert best is not None
    bounds = []
    for ticks in range(2, 30):
        clock = itertools.chain([0.0] * ticks, itertools.repeat(200.0))
        monkeypatch.setattr(programs, "time", SimpleNamespace(monotonic=functools.partial(next, clock)))
        found = formulation.solve(case, 100.0)
        assert found is not None
        _sound(case, formulation, found)
        assert found.bound <= best.network_s <= found.network_s
        if found.proven:
            assert found == best
            break
        bounds.append((found.bound, -found.network_s))
    else:
        pytest.fail("it never ended")
    assert len(set(bounds)) > 3
    assert bounds == sorted(bounds) or [b for b, _ in bounds] == sorted(b for b, _ in bounds)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "case", "says"),
    [
        ("literal", instance(_fleet(100), 200, (MB,) * 20), "400,721 rows, more than 300,000"),
        ("unequal shards", instance(_fleet(1000), 200, tuple(range(200, 0, -1))), "405,000 rows, more than 300,000"),
        ("node-to-node costs", instance(_fleet(500), 200, (MB,)), "250,000 products, more than 200,000"),
        (
            "class counts",
            instance((kind(8, 32, 4, 10, "n"),), 1, tuple(range(40, 0, -1)), ps_per_node=None),
            "more than 20,000 ways",
        ),
        (
            "busiest card, class counts",
            instance((kind(8, 32, 4, 10, "n"),), 1, tuple(range(40, 0, -1)), ps_per_node=None),
            "more than 20,000 ways",
        ),
        ("two-level racks", instance(_fleet(5), 1, (2 * MB, MB)), "shards differ"),
        ("class counts", instance(_fleet(5), 1, (MB,), costs=NodeCosts({})), "costs differ by pair"),
        ("busiest card, unequal shards", instance(_fleet(5), 1, (MB,), costs=NodeCosts({})), "costs differ by pair"),
    ],
)
def test_what_is_not_taken_is_refused_with_the_number(name: str, case: Instance, says: str) -> None:
    refusal = FORMULATIONS[name].refusal(case)
    assert refusal is not None
    assert says in refusal


def test_many_configurations_are_refused_also_when_each_machine_has_few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(configurations, "MAX_CONFIGURATIONS", 10)
    alike = instance(tuple(kind(8, 32, 4, 10, f"n{i}") for i in range(9)), 4, (MB,))
    different = instance(tuple(kind(8, 32, 1 + i, 10, f"n{i}") for i in range(9)), 9, (MB,))
    assert FORMULATIONS["class counts"].refusal(alike) is None
    assert FORMULATIONS["class counts"].refusal(different) is not None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "name", "why"),
    [
        (instance(_fleet(5), 9, (MB, MB)), "class counts", "equal shards, uniform cost"),
        (instance(_fleet(5), 9, (2 * MB, MB)), "class counts", "unequal shards, uniform cost"),
        (
            instance(_fleet(5), 9, tuple(range(40, 0, -1)), ps_per_node=None),
            "unequal shards",
            "unequal shards, uniform cost",
        ),
        (
            instance(_fleet(5), 9, (MB, MB), costs=RackCosts(dict.fromkeys(["n0", "n1", "n2", "n3", "n4"], "r"))),
            "two-level racks",
            "equal shards, costs within and across racks",
        ),
        (
            instance(_fleet(5), 9, (2 * MB, MB), costs=RackCosts(dict.fromkeys(["n0", "n1", "n2", "n3", "n4"], "r"))),
            "node-to-node costs",
            "unequal shards, costs within and across racks",
        ),
        (
            instance(_fleet(5), 9, (MB, MB), costs=NodeCosts({("n0", "n1"): 3.0})),
            "node-to-node costs",
            "equal shards, costs by pair of machines",
        ),
    ],
)
def test_auto_takes_the_smallest_that_is_exact_and_says_why(case: Instance, name: str, why: str) -> None:
    choice = auto.choose(case)
    assert choice.formulation == FORMULATIONS[name]
    assert choice.why == f"{name}: {why}"


def test_auto_says_why_nothing_is_exact() -> None:
    case = instance(_fleet(500), 9, (MB, MB), costs=NodeCosts({("n0", "n1"): 3.0}))
    with pytest.raises(BadInputError) as caught:
        auto.choose(case)
    message = str(caught.value)
    assert "9 workers and 2 ps on 500 machines" in message
    assert all(f"{f.name}: {f.refusal(case)}" in message for f in auto.PREFERRED)
    assert "\n" not in message


def test_eq_1_and_the_busiest_card_by_hand() -> None:
    case = instance((kind(8, 32, 4, 8, "a", "b"), kind(8, 32, 0, 16, "c")), 3, (30 * MB, 10 * MB))
    placed = Assignment(ps=("a", "c"), workers=("a", "a", "b"), chief=None)
    # a holds 30 MB: two of three workers are there; c holds 10 MB and no worker.
    assert traffic_bytes(case, placed) == pytest.approx((0.1 * 60 + 30 + 3 * 10) * MB)
    # a sends 30 MB and receives 2 x 10, b receives 40, c sends 30 on a card twice as fast; 1 GB/s, both ways.
    assert network_s(case, placed) == pytest.approx(2 * 40e6 / 1e9)
    assert card_s(case, 30 * MB, 2, 1e9) == pytest.approx(2 * 30e6 / 1e9)
    assert card_s(case, 10 * MB, 0, 2e9) == pytest.approx(2 * 30e6 / 2e9)


@pytest.mark.slow
@pytest.mark.parametrize("costs", TAKES)
def test_a_total_is_the_sum_over_all_pairs_of_tasks(costs: str) -> None:
    for seed in SEEDS:
        case, _ = _case(seed, costs)
        placed = next(placements(case), None)
        if placed is None:
            continue
        pairs = sum(
            size * case.costs.between(holder, node)
            for holder, size in zip(placed.ps, case.shards, strict=True)
            for node in placed.workers
        )
        assert traffic_bytes(case, placed) == pytest.approx(pairs)
        assert all(case.costs.between(a, b) == case.costs.between(b, a) for a in placed.ps for b in placed.workers)


@pytest.mark.parametrize(
    ("placed", "says"),
    [
        (Assignment(("a",), ("a", "b"), "b"), "1 ps and 2 workers are placed"),
        (Assignment(("a", "b"), ("a", "b"), None), "the chief is missing"),
        (Assignment(("a", "b"), ("a", "d"), "b"), "'d' is not a machine"),
        (Assignment(("a", "a"), ("a", "b"), "b"), "'a' has more than 1 ps"),
        (Assignment(("a", "b"), ("c", "c"), "b"), "'c' is too small for its 2 tasks"),
        (Assignment(("a", "b"), ("a", "c"), "b"), None),
    ],
)
def test_what_is_wrong_with_an_assignment(placed: Assignment, says: str | None) -> None:
    case = instance((kind(8, 32, 2, 10, "a", "b"), kind(8, 32, 1, 10, "c")), 2, (MB, MB), chief=CHIEF)
    assert violation(case, placed) == says
    if says is None:
        assert programs.checked_solution(case, placed, "traffic", proven=False, bound=1.0).bound == 1.0
    else:
        with pytest.raises(SolverError, match="is wrong"):
            programs.checked_solution(case, placed, "traffic", proven=True, bound=1.0)


def test_a_chief_too_many() -> None:
    case = instance((kind(8, 32, 2, 10, "a"),), 1, (MB,))
    assert violation(case, Assignment(("a",), ("a",), "a")) == "there is an extra chief"


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"shards": (), "ps": ()}, "0 ps and 9 workers are not a job"),
        ({"workers": 0}, "1 ps and 0 workers are not a job"),
        ({"shards": (MB, MB)}, "There are 2 shards but 1 ps"),
    ],
)
def test_an_instance_that_is_none(changes: dict[str, object], says: str) -> None:
    with pytest.raises(BadInputError, match=says):
        dataclasses.replace(instance(_fleet(5), 9, (MB,)), **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", FORMULATIONS)
def test_a_ps_that_fits_nowhere(name: str) -> None:
    case = instance((kind(8, 4, 1, 10, "a", "b"),), 1, (2000 * MB,))
    assert FORMULATIONS[name].solve(case) is None
