"""Plans: their JSON, and that every one keeps every limit."""

from __future__ import annotations

import json
from collections import defaultdict
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dike.exceptions import BadInputError, InfeasibleError
from dike.profile import Api, ModelProfile
from solver import Cluster, NodeClass, Objective, Plan, PlanRequest, make_plan
from solver.options import PAPER
from solver.units import GIB, MIB
from tests.properties import examples
from tests.solver.solver_cases import MB, digits, k80, machines, profile

quick = examples(60)

clusters = st.lists(
    st.builds(
        lambda count, cpus, mem, gpus, disk, gbps, rack: {
            "count": count,
            "cpus": cpus,
            "mem_bytes": mem * GIB // 2,
            "gpus": gpus,
            "gpu_model": "K80" if gpus else None,
            "disk_bytes": disk * GIB,
            "network_gbps": gbps,
            "rack": rack,
        },
        st.integers(1, 6),
        st.floats(0.1, 32).map(lambda cpus: round(cpus, 3)),
        st.integers(1, 64),
        st.sampled_from([0, 0, 1, 4]),
        st.integers(1, 20),
        st.sampled_from([1.0, 10.0]),
        st.sampled_from(["r1", "r2"]),
    ),
    min_size=1,
    max_size=4,
).flatmap(
    lambda classes: st.sampled_from([None, 5.0]).map(
        lambda across: Cluster(
            tuple(NodeClass(name=f"n{i}", **values) for i, values in enumerate(classes)), across_racks_gbps=across
        )
    )
)
models = st.builds(
    lambda sizes, sync, api, slots: profile([s * MB for s in sizes], synchronous=sync, api=api, slots=slots, flops=1e9),
    st.lists(st.integers(1, 400), min_size=1, max_size=12),
    st.booleans(),
    st.sampled_from([api for api in Api if api is not Api.LOOP]),
    st.integers(0, 2),
)


@quick
@given(
    clusters,
    models,
    st.sampled_from([("throughput", None), ("throughput", PAPER), ("traffic", None)]),
    st.none() | st.integers(1, 8),
)
def test_every_plan_keeps_every_limit(
    cluster: Cluster, model: ModelProfile, goal: tuple[Objective, frozenset[str] | None], max_workers: int | None
) -> None:
    objective, rules = goal
    request = PlanRequest(model, cluster, objective=objective, max_workers=max_workers, time_limit_s=10, rules=rules)
    try:
        plan = make_plan(request)
    except InfeasibleError:
        # `test_planner.py` looks at the messages, `test_against_brute_force.py` at when they are right.
        return
    assert Plan.loads(plan.dumps()) == plan
    nodes = {name: node for node in cluster.nodes for name in node.node_names}
    used: dict[str, list[float]] = defaultdict(lambda: [0.0, 0, 0, 0])
    ps_per_node: dict[str, int] = defaultdict(int)
    for task in plan.tasks:
        for position, amount in enumerate((task.cpus, task.mem_mb, task.disk_mb, task.gpus)):
            used[task.node][position] += amount
        ps_per_node[task.node] += task.role == "ps"
    for name, (cpus, mem, disk, gpus) in used.items():
        node = nodes[name]
        assert cpus <= node.cpus + 1e-6
        assert mem <= node.mem_bytes / MIB
        assert disk <= node.disk_bytes / MIB
        assert gpus <= node.gpus
    is_whole = goal == ("throughput", None)
    assert is_whole or max(ps_per_node.values()) <= 1
    roles = [task.role for task in plan.tasks]
    assert roles.count("worker") == plan.option.workers
    assert roles.count("ps") == plan.option.ps
    assert roles.count("chief") == (1 if model.api.has_separate_chief else 0)
    if max_workers is not None:
        assert plan.option.workers <= max_workers
    assert plan.variables.keys() == {variable.name for variable in model.variables}
    assert set(plan.variables.values()) == set(range(plan.option.ps))
    workers = {(task.cpus, task.mem_mb, task.disk_mb, task.gpus) for task in plan.tasks if task.role == "worker"}
    assert is_whole or len(workers) == 1
    for task in plan.tasks:
        if task.role == "ps":
            held = sum(v.size_bytes for v in model.variables if plan.variables[v.name] == task.index)
            assert task.mem_mb * MIB >= (2 + model.optimizer_slots) * held
    counts = plan.options
    assert counts.generated - sum(counts.pruned.values()) == counts.considered
    samples = [model.batch_size * max(1, task.gpus) for task in plan.tasks if task.role == "worker"]
    if model.synchronous or len(set(samples)) == 1:
        assert plan.samples_per_s == pytest.approx(sum(samples) / plan.step_time_s.total)


def test_the_json_has_the_promised_keys() -> None:
    data = json.loads(make_plan(PlanRequest(profile(), k80())).dumps())
    promised = {
        "profile",
        "options",
        "option",
        "tasks",
        "variables",
        "step_time_s",
        "samples_per_s",
        "traffic_bytes",
        "optimal",
        "gap",
        "solve_time_s",
        "alternatives",
    }
    assert promised <= data.keys()
    assert {"generated", "pruned", "considered"} <= data["options"].keys()
    assert set(data["options"]["pruned"]) == {"cpu_gpu_ratio", "task_counts"}
    assert {"workers", "ps", "worker"} <= data["option"].keys()
    assert set(data["tasks"][0]) == {"role", "index", "node", "cpus", "mem_mb", "disk_mb", "gpus", "is_plain"}
    assert {"compute", "network", "total"} <= data["step_time_s"].keys()
    assert data["optimal"] is True
    assert data["gap"] == 0


def _remove(*keys: str | int) -> Any:
    def change(data: Any) -> None:
        for key in keys[:-1]:
            data = data[key]
        del data[keys[-1]]

    return change


def _put(value: object, *keys: str | int) -> Any:
    def change(data: Any) -> None:
        for key in keys[:-1]:
            data = data[key]
        data[keys[-1]] = value

    return change


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "says"),
    [
        (_remove("tasks"), "'tasks' is missing"),
        (_remove("option", "worker"), "'worker' is missing"),
        (_remove("tasks", 0), "lists numbers"),
        (_remove("tasks", 0, "node"), "node"),
        (_put("many", "option", "workers"), "'workers' must be a whole number"),
        (_put(-1.0, "tasks", 0, "cpus"), "'cpus' must be a number of at least 0"),
        (_put("king", "tasks", 0, "role"), "ps tasks"),
        (_put(99, "variables", "v0/kernel"), "ps 99, which does not exist"),
        (_put(1, "surprise"), "surprise"),
        (_put(None, "step_time_s"), "not a plan"),
        (_put("yes", "optimal"), "'optimal' must be true or false"),
        (_put({}, "profile"), "not a model profile"),
    ],
)
def test_a_broken_plan_is_refused(change: Any, says: str) -> None:
    data = make_plan(PlanRequest(profile(), k80())).to_json()
    Plan.from_json(data)
    data = json.loads(json.dumps(data))
    change(data)
    with pytest.raises(BadInputError, match=says) as caught:
        Plan.from_json(data)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["", "{", "[]", "3", "null", '"plan"'])
def test_text_that_is_no_plan(text: str) -> None:
    with pytest.raises(BadInputError):
        Plan.loads(text)


def test_a_digits_cnn_fits_a_small_agent() -> None:
    plan = make_plan(PlanRequest(digits(), machines(1), rules=PAPER))
    assert (plan.option.workers, plan.option.ps) == (2, 1)
    assert plan.option.chief is not None


@pytest.mark.parametrize("api", [Api.KERAS, Api.GRAPH])
def test_two_small_agents_get_a_worker_each(api: Api) -> None:
    plan = make_plan(PlanRequest(digits(api), machines(2), max_workers=2))
    assert (plan.option.workers, plan.option.ps) == (2, 1)
    assert {task.node for task in plan.tasks if task.role == "worker"} == {"m0", "m1"}
