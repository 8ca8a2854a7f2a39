"""The methods that Dike is compared with: positions worked out by hand, and nobody beats the exhaustive one."""

from __future__ import annotations

import dataclasses
import itertools
import random
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from dike.exceptions import BadInputError, InfeasibleError
from dike.profile import Api, ModelProfile
from solver import Cluster, NodeClass, Plan, PlanRequest, make_plan
from solver.baselines import iterative, speeds
from solver.baselines.iterative import exhaust
from solver.baselines.layouts import layout_count, row_count, shard_layouts, worker_rows
from solver.baselines.setting import Choice, On, Setting
from solver.baselines.speeds import Speeds
from solver.choices import METHODS
from solver.cluster_file import read_cluster
from solver.comparison import compare
from solver.evaluation import evaluate
from solver.methods import PLANNERS, plan_with
from solver.nodes import NodeKind
from solver.options import PAPER
from solver.placement.naming import Assignment
from solver.placement.problem import hosts_workers
from solver.search.option_search import TIE
from solver.units import GIB
from tests.solver.solver_cases import MB, k80, machines, profile

EXAMPLES = Path(__file__).parents[2] / "examples" / "clusters"
FOUR_VARIABLES = [40 * MB, 30 * MB, 20 * MB, 10 * MB]


def _node(name: str, cpus: float = 8, gpus: int = 4, gbps: float = 10, rack: str | None = None) -> NodeClass:
    return NodeClass(
        name=name,
        cpus=cpus,
        mem_bytes=32 * GIB,
        gpus=gpus,
        gpu_model="K80" if gpus else None,
        disk_bytes=100 * GIB,
        network_gbps=gbps,
        rack=rack,
    )


def _random_request(seed: int, most_gpus: int = 4) -> PlanRequest:
    chance = random.Random(seed)
    count = chance.randint(2, 4) if most_gpus > 2 else chance.randint(2, 3)
    nodes = [
        _node(
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


def _speed(setting: Setting, choice: Choice) -> float:
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
    for shape, ps in itertools.product(shapes, range(1, setting.most_ps + 1)):
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
    monkeypatch.setattr(iterative, "BATCH", 64)
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
def test_nobody_beats_dike_by_more_than_a_tie(seed: int) -> None:
    request = _random_request(seed)
    comparison = compare(request)
    rows = {row.method: row for row in comparison.rows}
    assert rows.keys() == METHODS.keys()
    fastest = max(row.samples_per_s for row in comparison.rows)
    assert max(rows["iterative"].samples_per_s, rows["dike"].samples_per_s) == fastest
    setting = Setting.of(request)
    in_rules = _speed(setting, exhaust(setting, inside_rules=True))
    if request.cluster.across_racks_gbps is None:
        assert rows["dike"].samples_per_s >= max(in_rules, fastest) * (1 - TIE) * (1 - 1e-9)
    shares = [row.share for row in comparison.rows]
    assert shares == sorted(shares, reverse=True)


CLUSTERS = {path.stem: read_cluster(path) for path in sorted(EXAMPLES.glob("*.yaml"))}


@pytest.mark.slow
@pytest.mark.parametrize("synchronous", [False, True])
@pytest.mark.parametrize("cluster", [*CLUSTERS.values(), k80(10), k80(20)], ids=[*CLUSTERS, "ten", "twenty"])
def test_nobody_beats_dike_on_the_examples_and_on_machines_all_alike(cluster: Cluster, synchronous: bool) -> None:
    # A script that runs has one GPU a worker, and may be one plain task.
    model = profile(api=Api.GRAPH, synchronous=synchronous)
    rows = compare(PlanRequest(model, cluster, max_gpus_per_worker=1, plain=None)).rows
    dike = next(row for row in rows if row.method == "dike")
    assert dike.samples_per_s >= rows[0].samples_per_s * (1 - TIE)


def test_one_plain_task_is_compared_unless_parameter_servers_are_asked_for() -> None:
    request = PlanRequest(_model(), k80(1), max_gpus_per_worker=1, plain=None)
    rows = {row.method: row for row in compare(request, ["plain", "dike", "sar_basic"]).rows}
    assert (rows["plain"].workers, rows["plain"].ps, rows["plain"].machines) == (1, 0, 1)
    assert rows["plain"].samples_per_s <= rows["dike"].samples_per_s * (1 + TIE)
    asked = {row.method: row for row in compare(dataclasses.replace(request, plain=False), ["plain", "dike"]).rows}
    assert asked["plain"].reason == "Parameter servers are asked for, and one plain task has none."


def _places(plan: Plan) -> dict[str, list[str]]:
    return {
        role: [task.node for task in sorted(plan.tasks, key=lambda task: task.index) if task.role == role]
        for role in ("chief", "ps", "worker")
    }


def _model(**changes: object) -> ModelProfile:
    return profile(FOUR_VARIABLES, **{"api": Api.GRAPH, **changes})  # type: ignore[arg-type]


MIXED = Cluster((_node("a"), _node("cpu", gpus=0), _node("b")))


def test_sar_basic_deals_out_equal_slices_by_turns() -> None:
    plan = plan_with("sar_basic", PlanRequest(_model(), MIXED))
    assert (plan.option.worker.cpus, plan.option.worker.gpus) == (1.0, 1)
    # After the two ps it is b's turn; the machine without GPUs is passed over.
    assert _places(plan) == {"chief": [], "ps": ["a", "cpu"], "worker": ["b", "a"] * 4}


def test_sar_basic_gives_what_is_left_over_a_ps_of_its_own() -> None:
    plan = plan_with("sar_basic", PlanRequest(_model(), MIXED, max_workers=5))
    assert _places(plan) == {"chief": [], "ps": ["a", "cpu"], "worker": ["b", "a", "b", "a", "b"]}


def test_first_fit_fills_the_first_machine_first() -> None:
    plan = plan_with("first_fit", PlanRequest(_model(api=Api.KERAS), MIXED))
    # 8 CPUs of 1 a task: chief, two ps and four workers leave one.
    assert _places(plan) == {"chief": ["a"], "ps": ["a", "a"], "worker": ["a"] * 4 + ["b"] * 4}


def test_by_hand_there_are_as_many_workers_as_fit_beside_their_ps() -> None:
    # Two machines of 4 CPUs; a task takes 0.5. 16 slots: 12 workers need 3 ps; 13 would need 4.
    cluster = Cluster((_node("x", cpus=4, gpus=0), _node("y", cpus=4, gpus=0)))
    for method in ("sar_basic", "first_fit"):
        plan = plan_with(method, PlanRequest(_model(flops=1e6, sample_bytes=1000), cluster))
        assert (plan.option.workers, plan.option.ps, plan.option.worker.cpus) == (12, 3, 0.5)
    assert _places(plan)["ps"] == ["x"] * 3
    assert Counter(_places(plan)["worker"]) == {"x": 5, "y": 7}


def test_there_are_no_more_ps_than_variables() -> None:
    plan = plan_with("sar_basic", PlanRequest(profile([40 * MB, 30 * MB], api=Api.GRAPH), k80(5)))
    assert (plan.option.workers, plan.option.ps) == (20, 2)


@pytest.mark.parametrize("synchronous", [False, True])
def test_sar_tuned_has_the_best_counts_and_size_by_turns(synchronous: bool) -> None:
    setting = Setting.of(PlanRequest(_model(synchronous=synchronous), MIXED))
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
    plan = plan_with("sar_tuned", setting.request)
    assert plan.samples_per_s == pytest.approx(best)
    assert _places(plan)["ps"] == list(setting.names[: plan.option.ps])


def test_optimus_takes_the_fewest_servers_and_the_roomiest_first() -> None:
    # So slow a network that only one machine makes sense; the one with most GPUs comes last in the cluster.
    cluster = Cluster((_node("small", gpus=2, gbps=0.1), _node("large", gbps=0.1)))
    plan = plan_with("optimus", PlanRequest(_model(flops=1e8, synchronous=True), cluster))
    assert {task.node for task in plan.tasks} == {"large"}
    assert plan.option.workers * plan.option.worker.gpus == 4


@pytest.mark.parametrize("synchronous", [False, True])
def test_optimus_places_equal_counts_on_each_server(synchronous: bool) -> None:
    cluster = Cluster((*k80(3, network_gbps=25).nodes, _node("half", gpus=2), _node("cpu", gpus=0)))
    plan = plan_with("optimus", PlanRequest(profile(api=Api.GRAPH, synchronous=synchronous), cluster))
    places = _places(plan)
    servers = {task.node for task in plan.tasks}
    assert "cpu" not in servers
    for role in ("ps", "worker"):
        counts = [places[role].count(name) for name in servers]
        assert max(counts) - min(counts) <= 1
    # A machine fewer could not hold as many workers in equal parts.
    gpus = sorted((cluster.nodes[0].gpus,) * 3 + (2,), reverse=True)[: len(servers) - 1]
    room = min((most // plan.option.worker.gpus) * len(gpus) + place for place, most in enumerate(gpus))
    assert plan.option.workers > room


@pytest.mark.parametrize("method", METHODS)
def test_every_method_makes_a_whole_plan_within_the_users_limits(method: str) -> None:
    request = PlanRequest(_model(api=Api.KERAS), MIXED, max_workers=3, max_gpus_per_worker=1, plain=None)
    plan = plan_with(method, request)
    assert plan.method == method.removesuffix("_traffic")
    assert plan.option.workers <= 3
    assert plan.option.worker.gpus == 1
    assert Plan.loads(plan.dumps()) == plan
    taken: dict[str, list[float]] = {}
    for task in plan.tasks:
        here = taken.setdefault(task.node, [0.0, 0.0, 0.0])
        taken[task.node] = [a + b for a, b in zip(here, (task.cpus, task.mem_mb, task.gpus), strict=True)]
    for node in MIXED.nodes:
        cpus, mem_mb, gpus = taken.get(node.name, (0.0, 0.0, 0.0))
        assert cpus <= node.cpus
        assert mem_mb <= node.mem_bytes / 2**20
        assert gpus <= node.gpus


def test_the_gap_of_a_baseline_is_its_distance_from_the_best_plan() -> None:
    request = PlanRequest(profile(api=Api.GRAPH, synchronous=True), k80(5), rules=PAPER)
    best = make_plan(request).samples_per_s
    basic, first = plan_with("sar_basic", request), plan_with("first_fit", request)
    for plan in (basic, first):
        assert not plan.optimal
        assert plan.gap > 0
        assert plan.gap == pytest.approx(1 - plan.samples_per_s / best)
    # First fit piles the parameter servers up on one machine.
    assert first.samples_per_s < basic.samples_per_s < best
    assert plan_with("iterative", request).optimal


def test_traffic_alone_uses_all_gpus_whatever_the_rules_for_speed() -> None:
    request = PlanRequest(_model(), k80(3), rules=frozenset({"identical_workers", "cpu_gpu_ratio", "task_counts"}))
    plan = plan_with("dike_traffic", request)
    assert plan.option.workers * plan.option.worker.gpus == 12
    rows = {row.method: row for row in compare(dataclasses.replace(request, objective="traffic"), ["dike"]).rows}
    assert rows["dike"].workers == 1


def test_iterative_claims_nothing_of_options_it_does_not_see() -> None:
    request = PlanRequest(_model(), MIXED, rules=frozenset({"identical_workers"}))
    assert not PLANNERS["iterative"](request).optimal


def test_parameter_servers_together_are_faster_where_the_network_is_slow() -> None:
    # All tasks on one machine; several ps there take gradients in at the same time, which the third rule excludes.
    setting = Setting.of(PlanRequest(_model(synchronous=True, flops=1e8, sample_bytes=1000), k80(2, network_gbps=0.1)))
    choice = exhaust(setting)
    assert len({*choice.assignment.ps, *choice.assignment.workers}) == 1
    assert len(choice.assignment.ps) > 1
    assert _speed(setting, choice) > 1.05 * _speed(setting, exhaust(setting, inside_rules=True))


@pytest.mark.parametrize("seed", range(12))
def test_speeds_on_arrays_are_what_the_evaluation_says(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speeds, "CELLS", 30)
    setting = Setting.of(_random_request(seed, most_gpus=seed % 3))
    chance = np.random.default_rng(seed)
    shards = setting.scenario.shards(3)
    ps_on, workers_on = (chance.integers(0, len(setting.names), size) for size in (3, 7))
    every = np.arange(len(setting.names))
    local = np.bincount(ps_on, weights=shards.sizes, minlength=len(every))
    rows = np.array([np.bincount(workers_on[:count], minlength=len(every)) for count in range(1, 8)])
    for shape in setting.shapes:
        prefixes = Speeds(setting, shape).of_prefixes(shards, ps_on, workers_on)
        by_rows = Speeds(setting, shape).of_rows(shards, every, local, rows)
        for count in range(1, 8):
            on = setting.choice(shape, 3, On(ps_on, workers_on[:count], None), 1).assignment
            expected = evaluate(setting.scenario, shape, shards, on).samples_per_s
            assert prefixes[count - 1] == pytest.approx(expected, rel=1e-12)
            assert by_rows[count - 1] == pytest.approx(expected, rel=1e-12)


def test_what_is_too_large_for_iterative_is_a_row_with_a_reason() -> None:
    request = PlanRequest(profile(api=Api.GRAPH), k80(10))
    comparison = compare(request, ["sar_basic", "iterative", "first_fit"])
    assert [row.method for row in comparison.rows] == ["sar_basic", "first_fit", "iterative"]
    last = comparison.to_json()[-1]
    assert re.search(r"about 10\^11 placements, and 200,000,000 are the most", last["reason"])
    assert last["samples_per_s"] == 0.0
    with pytest.raises(BadInputError, match="about 10"):
        plan_with("iterative", request)


def test_too_many_ways_to_place_parameter_servers_alone_are_refused() -> None:
    # Hardly any way to place workers, but one for each partition of 20 parameter servers.
    setting = Setting.of(PlanRequest(profile([MB + index for index in range(20)], api=Api.GRAPH), k80(200, gpus=1)))
    with pytest.raises(BadInputError, match=r"about 10\^14 placements of the parameter servers alone"):
        exhaust(setting)


def test_too_many_placements_of_workers_are_refused_by_their_number() -> None:
    setting = Setting.of(PlanRequest(_model(), k80(30)))
    with pytest.raises(BadInputError, match=r"try \d{3},\d{3},\d{3} placements"):
        exhaust(setting)


@pytest.mark.parametrize(("counts", "ps"), [((5,), 4), ((1, 1, 2), 3), ((2, 3), 5)])
def test_layouts_are_counted_as_they_are_listed(counts: tuple[int, ...], ps: int) -> None:
    nodes = tuple(k80(count, name=f"kind{index}", gpus=index).nodes[0] for index, count in enumerate(counts))
    setting = Setting.of(PlanRequest(_model(), Cluster(nodes)))
    shards = [size * MB for size in range(ps, 0, -1)]
    kinds, sizes = setting.scenario.kinds, setting.scenario.sizes
    listed = shard_layouts(kinds, sizes, shards, ps_may_share=True)
    assert sum(map(len, listed.values())) == layout_count(counts, ps)
    for runs in listed:
        assert len(worker_rows(runs, [2] * len(counts))) == row_count(runs, [2] * len(counts))


def test_an_unknown_method_names_the_known_ones() -> None:
    request = PlanRequest(_model(), MIXED)
    for call in (lambda: plan_with("magic", request), lambda: compare(request, ["magic"])):
        with pytest.raises(BadInputError, match="no method 'magic'; there are dike, dike_traffic, plain, iterative"):
            call()


@pytest.mark.parametrize("method", METHODS)
def test_a_job_that_fits_nowhere_is_refused(method: str) -> None:
    cluster = machines(2, cpus=2, mem_gib=1)
    with pytest.raises(InfeasibleError):
        plan_with(method, PlanRequest(profile(), cluster, plain=None))


def test_a_comparison_without_any_plan_is_an_error() -> None:
    with pytest.raises(InfeasibleError, match="short"):
        compare(PlanRequest(profile(), machines(2, cpus=2, mem_gib=1)))
