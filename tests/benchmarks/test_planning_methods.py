"""The methods of planning that only evaluations use: brute force by hand, and Dike against all of them."""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Iterator

import numpy as np
import pytest

from benchmarks.planning_methods import ALL_PLANNERS, exhaustive, static_allocation
from benchmarks.planning_methods.exhaustive import exhaust
from benchmarks.planning_methods.layouts import layout_count, row_count, shard_layouts, worker_rows
from benchmarks.planning_methods.static_allocation import PrefixSpeeds
from dike.exceptions import BadInputError, InfeasibleError
from dike.profile import Api
from solver import Cluster, PlanRequest
from solver.baselines.setting import BaselineChoice, MachineIndices, Setting
from solver.comparison import compare
from solver.evaluation import evaluate
from solver.methods import plan_with
from solver.nodes import NodeKind
from solver.placement.naming import Assignment
from solver.placement.problem import hosts_workers
from solver.units import SIMPLE_TIE_SHARE, SPEED_TIE_SHARE
from tests.solver.solver_cases import MB, MIXED, four_variables, k80, k80_node, places_by_role, profile


def _random_request(seed: int, most_gpus: int = 4) -> PlanRequest:
    chance = random.Random(seed)
    count = chance.randint(2, 4) if most_gpus > 2 else chance.randint(2, 3)
    nodes = [
        k80_node(
            f"n{index}",
            chance.choice([1, 2, 4, 8] if most_gpus else [1, 2]),
            # The first has a GPU, so that CPU-only clusters are those with `most_gpus` 0.
            chance.randint(min(most_gpus, int(index == 0)), most_gpus),
            chance.choice([0.5, 2, 10]),
            chance.choice(["left", "right"]),
        )
        for index in range(count)
    ]
    cluster = Cluster(tuple(nodes), across_racks_gbps=chance.choice([None, None, 1]))
    model = profile(
        [chance.randint(1, 60) * MB for _ in range(3)],
        api=chance.choice([Api.GRAPH, Api.KERAS]),
        synchronous=chance.random() < 0.5,
        flops=chance.choice([1e8, 4e9]),
    )
    return PlanRequest(model, cluster)


def _speed(setting: Setting, choice: BaselineChoice) -> float:
    return evaluate(setting.scenario, choice.shape, choice.shards, choice.assignment).samples_per_s


def _all_speeds(setting: Setting, *, inside_rules: bool) -> Iterator[float]:
    """Every placement of every option, machine by machine and with no symmetry, by `evaluate`."""
    scenario, sizes = setting.scenario, setting.scenario.sizes
    kinds = [scenario.kinds[number] for number in setting.kind_of]

    def room(kind: NodeKind, shelf: list[int], *, chief: bool) -> int:
        taken = [sizes.ps(size) for size in shelf] + ([sizes.chief] if chief and sizes.chief else [])
        most = kind.room_for(sizes.worker(shape), taken)
        return most if hosts_workers(kind, scenario.model(shape)) else min(most, 0)

    shapes = setting.shapes if inside_rules else {*setting.shapes, setting.slice}
    for shape, ps in itertools.product(shapes, range(1, setting.max_ps + 1)):
        shards = scenario.shards(ps)
        for on in itertools.product(range(len(kinds)), repeat=ps):
            if inside_rules and len(set(on)) < ps:
                continue
            shelves = [[size for size, at in zip(shards.sizes, on, strict=True) if at == i] for i in range(len(kinds))]
            rooms = [room(kind, shelf, chief=False) for kind, shelf in zip(kinds, shelves, strict=True)]
            for workers in itertools.product(*(range(most + 1) for most in rooms)):
                chiefs = [
                    name
                    for name, kind, shelf, here in zip(setting.names, kinds, shelves, workers, strict=True)
                    if room(kind, shelf, chief=True) >= here
                ]
                if any(workers) and (chiefs or sizes.chief is None):
                    at = tuple(name for name, here in zip(setting.names, workers, strict=True) for _ in range(here))
                    assignment = Assignment(tuple(setting.names[i] for i in on), at, next(iter(chiefs), None))
                    yield evaluate(scenario, shape, shards, assignment).samples_per_s


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("inside_rules", [True, False])
def test_iterative_finds_the_best_of_all_placements(
    seed: int, inside_rules: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exhaustive, "PLACEMENTS_PER_CHUNK", 64)
    setting = Setting.of(_random_request(seed, most_gpus=seed % 3))
    expected = max(_all_speeds(setting, inside_rules=inside_rules), default=None)
    if expected is None:
        with pytest.raises(InfeasibleError):
            exhaust(setting, inside_rules=inside_rules)
        return
    choice = exhaust(setting, inside_rules=inside_rules)
    assert _speed(setting, choice) == pytest.approx(expected, rel=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 106))
def test_no_method_beats_dike_by_more_than_a_tie(seed: int) -> None:
    request = _random_request(seed)
    comparison = compare(request, planners=ALL_PLANNERS)
    rows = {row.method: row for row in comparison.rows}
    assert rows.keys() == ALL_PLANNERS.keys()
    fastest = max(row.samples_per_s for row in comparison.rows)
    setting = Setting.of(request)
    in_rules = _speed(setting, exhaust(setting, inside_rules=True))
    # Iterative may put several ps on a machine, and is the fastest of the other methods.
    others = max(row.samples_per_s for name, row in rows.items() if name not in ("dike", "iterative"))
    assert rows["iterative"].samples_per_s >= max(others, in_rules) * (1 - 1e-9) or fastest > others
    least = (1 - SIMPLE_TIE_SHARE) * (1 - SPEED_TIE_SHARE) * (1 - 1e-9)
    if request.cluster.across_racks_gbps is None:
        assert rows["dike"].samples_per_s >= in_rules * least
    shares = [row.share for row in comparison.rows]
    assert shares == sorted(shares, reverse=True)


@pytest.mark.parametrize("synchronous", [False, True])
def test_sar_tuned_has_the_best_counts_and_size_by_turns(synchronous: bool) -> None:
    setting = Setting.of(PlanRequest(four_variables(synchronous=synchronous), MIXED))
    best = 0.0
    for shape, ps in itertools.product(setting.shapes, (1, 2, 3)):
        shards = setting.scenario.shards(ps)
        rooms = [
            min(kind.room_for(setting.scenario.sizes.worker(shape), [setting.scenario.sizes.ps(shards.sizes[0])]), 4)
            for kind in (setting.scenario.kinds[number] for number in setting.kind_of)
        ]
        turns = itertools.islice(itertools.cycle(setting.names), ps, None)
        workers: list[str] = []
        while len(workers) < sum(rooms):
            name = next(turns)
            if workers.count(name) < rooms[setting.names.index(name)]:
                workers.append(name)
                on = Assignment(setting.names[:ps], tuple(workers), None)
                best = max(best, evaluate(setting.scenario, shape, shards, on).samples_per_s)
    plan = plan_with("sar_tuned", setting.request, planners=ALL_PLANNERS)
    assert plan.samples_per_s == pytest.approx(best)
    assert places_by_role(plan)["ps"] == list(setting.names[: plan.option.ps])


def test_iterative_claims_nothing_of_options_it_does_not_see() -> None:
    request = PlanRequest(four_variables(), MIXED, rules=frozenset({"identical_workers"}))
    assert not ALL_PLANNERS["iterative"](request).optimal


def test_parameter_servers_together_are_faster_where_the_network_is_slow() -> None:
    # All tasks on one machine; several ps there take gradients in at the same time, which the third rule excludes.
    setting = Setting.of(
        PlanRequest(four_variables(synchronous=True, flops=1e8, sample_bytes=1000), k80(2, network_gbps=0.1))
    )
    choice = exhaust(setting)
    assert len({*choice.assignment.ps, *choice.assignment.workers}) == 1
    assert len(choice.assignment.ps) > 1
    assert _speed(setting, choice) > 1.05 * _speed(setting, exhaust(setting, inside_rules=True))


@pytest.mark.parametrize("seed", range(12))
def test_speeds_on_arrays_are_what_the_evaluation_says(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(static_allocation, "CELLS", 30)
    setting = Setting.of(_random_request(seed, most_gpus=seed % 3))
    chance = np.random.default_rng(seed)
    shards = setting.scenario.shards(3)
    ps_on, workers_on = (chance.integers(0, len(setting.names), size) for size in (3, 7))
    every = np.arange(len(setting.names))
    local = np.bincount(ps_on, weights=shards.sizes, minlength=len(every))
    rows = np.array([np.bincount(workers_on[:count], minlength=len(every)) for count in range(1, 8)])
    for shape in setting.shapes:
        prefixes = PrefixSpeeds(setting, shape).of_prefixes(shards, ps_on, workers_on)
        by_rows = PrefixSpeeds(setting, shape).of_rows(shards, every, local, rows)
        for count in range(1, 8):
            on = setting.choice(shape, 3, MachineIndices(ps_on, workers_on[:count], None), 1).assignment
            expected = evaluate(setting.scenario, shape, shards, on).samples_per_s
            assert prefixes[count - 1] == pytest.approx(expected, rel=1e-12)
            assert by_rows[count - 1] == pytest.approx(expected, rel=1e-12)


def test_what_is_too_large_for_iterative_is_a_row_with_a_reason() -> None:
    request = PlanRequest(profile(api=Api.GRAPH), k80(10))
    comparison = compare(request, ["sar_basic", "iterative", "first_fit"], planners=ALL_PLANNERS)
    assert [row.method for row in comparison.rows] == ["sar_basic", "first_fit", "iterative"]
    last = comparison.to_json()[-1]
    assert re.search(r"about 10\^11 placements, more than its limit of 200,000,000", last["reason"])
    assert last["samples_per_s"] == 0.0
    with pytest.raises(BadInputError, match="about 10"):
        plan_with("iterative", request, planners=ALL_PLANNERS)


def test_too_many_ways_to_place_parameter_servers_alone_are_refused() -> None:
    # Hardly any way to place workers, but one for each partition of 20 parameter servers.
    setting = Setting.of(PlanRequest(profile([MB + index for index in range(20)], api=Api.GRAPH), k80(200, gpus=1)))
    with pytest.raises(BadInputError, match=r"about 10\^14 placements of the parameter servers alone"):
        exhaust(setting)


def test_too_many_placements_of_workers_are_refused_by_their_number() -> None:
    setting = Setting.of(PlanRequest(four_variables(), k80(30)))
    with pytest.raises(BadInputError, match=r"try \d{3},\d{3},\d{3} placements"):
        exhaust(setting)


@pytest.mark.parametrize(("counts", "ps"), [((5,), 4), ((1, 1, 2), 3), ((2, 3), 5)])
def test_layouts_are_counted_as_they_are_listed(counts: tuple[int, ...], ps: int) -> None:
    nodes = tuple(k80(count, name=f"kind{index}", gpus=index).nodes[0] for index, count in enumerate(counts))
    setting = Setting.of(PlanRequest(four_variables(), Cluster(nodes)))
    shards = [size * MB for size in range(ps, 0, -1)]
    kinds, sizes = setting.scenario.kinds, setting.scenario.sizes
    listed = shard_layouts(kinds, sizes, shards, ps_may_share=True)
    assert sum(map(len, listed.values())) == layout_count(counts, ps)
    for runs in listed:
        assert len(worker_rows(runs, [2] * len(counts))) == row_count(runs, [2] * len(counts))
