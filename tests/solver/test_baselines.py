"""The methods that Dike is compared with: positions worked out by hand, and none beats Dike by more than a tie."""

from __future__ import annotations

import dataclasses
from collections import Counter
from pathlib import Path

import pytest

from dike.exceptions import BadInputError, InfeasibleError
from dike.profile import Api
from solver import Cluster, Plan, PlanRequest, make_plan
from solver.choices import METHODS
from solver.cluster_file import read_cluster
from solver.comparison import compare
from solver.methods import plan_with
from solver.options import PAPER
from solver.units import SIMPLE_TIE_SHARE, SPEED_TIE_SHARE
from tests.solver.solver_cases import MB, MIXED, four_variables, k80, k80_node, machines, places_by_role, profile

EXAMPLES = Path(__file__).parents[2] / "examples" / "clusters"


CLUSTERS = {path.stem: read_cluster(path) for path in sorted(EXAMPLES.glob("*.yaml"))}


@pytest.mark.slow
@pytest.mark.parametrize("synchronous", [False, True])
@pytest.mark.parametrize("cluster", [*CLUSTERS.values(), k80(10), k80(20)], ids=[*CLUSTERS, "ten", "twenty"])
def test_no_method_beats_dike_on_the_examples_and_on_equal_machines(cluster: Cluster, synchronous: bool) -> None:
    # A script that runs has one GPU a worker, and may be one plain task.
    model = profile(api=Api.GRAPH, synchronous=synchronous)
    rows = compare(PlanRequest(model, cluster, max_gpus_per_worker=1, strategies=frozenset({"one", "ps"}))).rows
    dike = next(row for row in rows if row.method == "dike")
    # A plan may be that much slower than the fastest if it is simpler.
    assert dike.samples_per_s >= rows[0].samples_per_s * (1 - SIMPLE_TIE_SHARE) * (1 - SPEED_TIE_SHARE)
    assert dike.workers + dike.ps <= rows[0].workers + rows[0].ps


def test_one_plain_task_is_compared_unless_parameter_servers_are_asked_for() -> None:
    request = PlanRequest(four_variables(), k80(1), max_gpus_per_worker=1, strategies=frozenset({"one", "ps"}))
    rows = {row.method: row for row in compare(request, ["one", "dike", "sar_basic"]).rows}
    assert (rows["one"].workers, rows["one"].ps, rows["one"].machines) == (1, 0, 1)
    assert rows["one"].samples_per_s <= rows["dike"].samples_per_s * (1 + SPEED_TIE_SHARE)
    asked = {
        row.method: row
        for row in compare(dataclasses.replace(request, strategies=frozenset({"ps"})), ["one", "dike"]).rows
    }
    assert asked["one"].reason == "The request asks for other tasks: ps."


def test_sar_basic_deals_out_equal_slices_by_turns() -> None:
    plan = plan_with("sar_basic", PlanRequest(four_variables(), MIXED))
    assert (plan.option.worker.cpus, plan.option.worker.gpus) == (1.0, 1)
    # After the two ps it is b's turn; the machine without GPUs is passed over.
    assert places_by_role(plan) == {"chief": [], "ps": ["a", "cpu"], "worker": ["b", "a"] * 4}


def test_sar_basic_gives_what_is_left_over_a_ps_of_its_own() -> None:
    plan = plan_with("sar_basic", PlanRequest(four_variables(), MIXED, max_workers=5))
    assert places_by_role(plan) == {"chief": [], "ps": ["a", "cpu"], "worker": ["b", "a", "b", "a", "b"]}


def test_first_fit_fills_the_first_machine_first() -> None:
    plan = plan_with("first_fit", PlanRequest(four_variables(api=Api.KERAS), MIXED))
    # 8 CPUs of 1 a task: chief, two ps and four workers leave one.
    assert places_by_role(plan) == {"chief": ["a"], "ps": ["a", "a"], "worker": ["a"] * 4 + ["b"] * 4}


def test_by_hand_there_are_as_many_workers_as_fit_beside_their_ps() -> None:
    # Two machines of 4 CPUs; a task takes 0.5. 16 slots: 12 workers need 3 ps; 13 would need 4.
    cluster = Cluster((k80_node("x", cpus=4, gpus=0), k80_node("y", cpus=4, gpus=0)))
    for method in ("sar_basic", "first_fit"):
        plan = plan_with(method, PlanRequest(four_variables(flops=1e6, sample_bytes=1000), cluster))
        assert (plan.option.workers, plan.option.ps, plan.option.worker.cpus) == (12, 3, 0.5)
    assert places_by_role(plan)["ps"] == ["x"] * 3
    assert Counter(places_by_role(plan)["worker"]) == {"x": 5, "y": 7}


def test_there_are_no_more_ps_than_variables() -> None:
    plan = plan_with("sar_basic", PlanRequest(profile([40 * MB, 30 * MB], api=Api.GRAPH), k80(5)))
    assert (plan.option.workers, plan.option.ps) == (20, 2)


def test_optimus_takes_the_fewest_servers_and_the_roomiest_first() -> None:
    # So slow a network that only one machine makes sense; the one with most GPUs comes last in the cluster.
    cluster = Cluster((k80_node("small", gpus=2, gbps=0.1), k80_node("large", gbps=0.1)))
    plan = plan_with("optimus", PlanRequest(four_variables(flops=1e8, synchronous=True), cluster))
    assert {task.node for task in plan.tasks} == {"large"}
    assert plan.option.workers * plan.option.worker.gpus == 4


@pytest.mark.parametrize("synchronous", [False, True])
def test_optimus_places_equal_counts_on_each_server(synchronous: bool) -> None:
    cluster = Cluster((*k80(3, network_gbps=25).nodes, k80_node("half", gpus=2), k80_node("cpu", gpus=0)))
    plan = plan_with("optimus", PlanRequest(profile(api=Api.GRAPH, synchronous=synchronous), cluster))
    places = places_by_role(plan)
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
    model = dataclasses.replace(four_variables(api=Api.KERAS), why_not_split="")
    every = frozenset({"one", "allreduce", "ps"})
    request = PlanRequest(model, MIXED, max_workers=3, max_gpus_per_worker=1, strategies=every)
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
    found = make_plan(request)
    best = max(entry.samples_per_s for entry in (found, *found.alternatives))
    basic, first = plan_with("sar_basic", request), plan_with("first_fit", request)
    for plan in (basic, first):
        assert not plan.optimal
        assert plan.gap > 0
        assert plan.gap == pytest.approx(1 - plan.samples_per_s / best)
    # First fit piles the parameter servers up on one machine.
    assert first.samples_per_s < basic.samples_per_s < best


def test_traffic_alone_uses_all_gpus_whatever_the_rules_for_speed() -> None:
    request = PlanRequest(four_variables(), k80(3), rules=PAPER)
    plan = plan_with("dike_traffic", request)
    assert plan.option.workers * plan.option.worker.gpus == 12
    rows = {row.method: row for row in compare(dataclasses.replace(request, objective="traffic"), ["dike"]).rows}
    assert rows["dike"].workers == 1


def test_an_unknown_method_names_the_known_ones() -> None:
    request = PlanRequest(four_variables(), MIXED)
    for call in (lambda: plan_with("magic", request), lambda: compare(request, ["magic"])):
        with pytest.raises(BadInputError, match="no method 'magic'; there are dike, dike_traffic, one, allreduce"):
            call()


@pytest.mark.parametrize("method", METHODS)
def test_a_job_that_fits_nowhere_is_refused(method: str) -> None:
    cluster = machines(2, cpus=2, mem_gib=1)
    model = dataclasses.replace(profile(), why_not_split="")
    with pytest.raises(InfeasibleError):
        plan_with(method, PlanRequest(model, cluster, strategies=frozenset({"one", "allreduce", "ps"})))


def test_a_comparison_without_any_plan_is_an_error() -> None:
    with pytest.raises(InfeasibleError, match="short"):
        compare(PlanRequest(profile(), machines(2, cpus=2, mem_gib=1)))
