"""One plain task: the fastest there is, and chosen only where nothing with parameter servers is faster."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import example, given

from dike.exceptions import BadInputError, InfeasibleError
from dike.profile import Api, ModelProfile
from framework.training.spec import check_can_run
from solver import Cluster, NodeClass, Plan, PlanRequest, make_plan, smallest_job
from solver.options import PAPER
from solver.plain import can_be_plain, fastest_plain
from solver.request import scenario_of
from solver.resources import CPU_STEP, WorkerShape
from solver.settings import PlanSettings
from solver.units import GIB, SPEED_TIE_SHARE
from tests.properties import examples
from tests.solver.solver_cases import MB, digits, k80, k80_node, profile
from tests.solver.test_plan import clusters, models


@examples(60)
@given(models, clusters)
def test_no_machine_and_no_number_of_cpus_is_faster(model: ModelProfile, machines: Cluster) -> None:
    scenario = scenario_of(PlanRequest(model, machines))
    found = fastest_plain(scenario)
    speeds = []
    for kind in scenario.kinds:
        for gpus in (0, 1) if kind.gpus else (0,):
            for cpus in {kind.cpus, *(CPU_STEP * count for count in range(1, int(kind.cpus / CPU_STEP) + 1))}:
                shape = WorkerShape(gpus, cpus)
                model_of = scenario.model(shape)
                fits = kind.room_for(scenario.sizes.plain(shape)) > 0 and (not gpus or model_of.fits_gpu(kind))
                if fits and can_be_plain(model, scenario.hardware):
                    compute_s, input_s = model_of.compute_s(kind), model_of.input_s
                    own_s = scenario.hardware.apis[model.api].plain_s
                    assert own_s is not None
                    work_s = max(compute_s, input_s) if gpus else compute_s + input_s
                    speeds.append(model.batch_size / (work_s + own_s / (1.0 if gpus else min(1.0, cpus))))
    if not speeds:
        assert found is None
        return
    assert found is not None
    assert max(speeds) * (1 - SPEED_TIE_SHARE) <= found.samples_per_s <= max(speeds) * (1 + 1e-9)
    kind = next(kind for kind in scenario.kinds if found.node in kind.names)
    assert kind.room_for(found.resources) > 0


@examples(40)
@given(models, clusters)
def test_a_plan_is_never_slower_than_one_plain_task(model: ModelProfile, machines: Cluster) -> None:
    request = PlanRequest(model, machines, strategies=frozenset({"one", "ps"}), time_limit_s=5.0)
    alone = fastest_plain(scenario_of(request))
    try:
        plan = make_plan(request)
    except InfeasibleError:
        assert alone is None
        return
    if alone is not None:
        assert plan.samples_per_s >= alone.samples_per_s * (1 - SPEED_TIE_SHARE)
    assert plan.is_plain or all(not task.is_plain for task in plan.tasks)
    assert Plan.loads(plan.dumps()) == plan


@examples(60)
@given(models, clusters)
def test_where_it_wins_less_is_searched_and_nothing_else_changes(model: ModelProfile, machines: Cluster) -> None:
    # Generous: plans that a busy machine has cut short differ.
    request = PlanRequest(model, machines, strategies=frozenset({"one", "ps"}), time_limit_s=60.0)
    try:
        several = make_plan(dataclasses.replace(request, strategies=frozenset({"ps"})))
    except InfeasibleError:
        return
    found = make_plan(request)
    if found.option.ps:
        assert (found.option, found.tasks, found.alternatives) == (several.option, several.tasks, several.alternatives)
        return
    assert several.samples_per_s <= found.samples_per_s / (1 - max(found.gap, 1e-6))
    assert found.options.solved <= several.options.solved
    assert found.alternatives[0].samples_per_s <= several.samples_per_s / (1 - max(several.gap, 1e-6))


UNUSABLE_GPU = Cluster(
    (
        NodeClass(
            name="n0",
            cpus=1.0,
            mem_bytes=GIB // 2,
            gpus=1,
            gpu_model="K80",
            disk_bytes=GIB,
            network_gbps=1.0,
            rack="r1",
        ),
        NodeClass(name="n1", cpus=1.0, mem_bytes=2 * GIB, disk_bytes=GIB, network_gbps=1.0),
    )
)
"""The paper's workers use GPUs where there are any, and here none fits beside one."""


@examples(60)
@given(models, clusters)
@example(profile([MB], synchronous=False, api=Api.GRAPH, slots=0, flops=1e9), UNUSABLE_GPU)
def test_what_the_papers_rules_would_reach_is_known_and_what_is_told_meanwhile_gets_better(
    model: ModelProfile, machines: Cluster
) -> None:
    request = PlanRequest(model, machines, strategies=frozenset({"ps"}), time_limit_s=5.0)
    told: list[float] = []
    try:
        found = make_plan(request, lambda progress: told.append(progress.plan.samples_per_s))
    except InfeasibleError:
        return
    assert told == sorted(set(told))
    try:
        inside = make_plan(dataclasses.replace(request, rules=PAPER))
    except InfeasibleError:
        return
    fastest = max(entry.samples_per_s for entry in (found, *found.alternatives))
    assert fastest >= inside.samples_per_s * (1 - SPEED_TIE_SHARE)


def test_what_the_others_would_reach_is_what_they_reach_when_they_are_asked_for() -> None:
    fast, slow = (
        NodeClass(name=model, count=2, cpus=cpus, mem_bytes=32 * GIB, gpus=2, gpu_model=model, network_gbps=gbps)
        for model, cpus, gbps in (("V100", 8, 25.0), ("K80", 4, 1.0))
    )
    model, cluster = profile([40 * MB] * 4, flops=2e8, api=Api.GRAPH), Cluster((fast, slow))
    found = make_plan(PlanSettings().request(model, cluster))
    several = make_plan(PlanSettings(strategy="ps").request(model, cluster))
    assert found.is_plain
    assert found.optimal
    assert found.alternatives[0].samples_per_s == several.samples_per_s


def test_a_loop_of_the_scripts_own_gets_the_fastest_machine_and_no_prediction() -> None:
    alone = dataclasses.replace(digits(), api=Api.LOOP, batch_size=0, why_alone="It has a loop of its own.")
    small, large = (
        NodeClass(name="small", cpus=2, mem_bytes=8 * GIB),
        NodeClass(name="large", cpus=8, mem_bytes=8 * GIB),
    )
    found = make_plan(PlanSettings().request(alone, Cluster((small, large))))
    assert [(task.node, task.is_plain) for task in found.tasks] == [("large", True)]
    assert (found.samples_per_s, found.step_time_s.total) == (0.0, 0.0)
    assert "It has a loop of its own." in found.why[0]
    assert Plan.loads(found.dumps()) == found
    with_gpu = make_plan(PlanSettings().request(alone, Cluster((*k80(1).nodes, large))))
    assert with_gpu.option.worker.gpus == 1
    several = make_plan(PlanSettings(gpus_per_task=3).request(alone, Cluster((*k80(1).nodes, large))))
    assert (several.option.worker.gpus, several.samples_per_s) == (3, 0.0)
    assert "It sees 3 GPUs." in several.why[0]
    check_can_run(several)
    assert make_plan(PlanSettings().request(alone, Cluster((large,)), min_workers=1)).strategy == "one"
    for several in ({"min_workers": 2}, {"plain": False}):
        with pytest.raises(BadInputError, match=r"It has a loop of its own\."):
            PlanSettings().request(alone, Cluster((large,)), **several)
    with pytest.raises(BadInputError, match="can only be one plain task"):
        PlanSettings(rules="none").request(alone, Cluster((large,)))


def test_a_loop_that_counts_its_own_steps_gets_no_more_workers_than_asked_for() -> None:
    counts = dataclasses.replace(digits(Api.GRAPH), counts_own_steps=True)
    cluster = Cluster((NodeClass(name="node", count=4, cpus=8, mem_bytes=32 * GIB, network_gbps=100.0),))
    found = make_plan(PlanSettings().request(counts, cluster))
    assert found.is_plain
    assert "counts its own steps" in found.why[0]
    two = make_plan(PlanSettings().request(counts, cluster, min_workers=2))
    assert two.option.workers == 2
    assert any("so 2 workers train 2 times as many" in sentence for sentence in two.why)
    one = PlanSettings(strategy="ps").request(counts, cluster, min_workers=1)
    assert (one.max_workers, one.notes) == (1, ())
    assert PlanSettings().request(counts, cluster, min_workers=2, max_workers=5).max_workers == 5


def test_a_script_that_waits_for_its_servers_gets_some() -> None:
    waits = dataclasses.replace(digits(), needs_servers=True)
    cluster = Cluster((NodeClass(name="here", cpus=2, mem_bytes=8 * GIB),))
    assert make_plan(PlanSettings().request(waits, cluster)).option.ps > 0
    assert Plan.loads(make_plan(PlanSettings().request(waits, cluster)).dumps()).profile.needs_servers


def test_it_wins_on_one_machine_and_says_what_the_others_would_reach() -> None:
    cluster = Cluster((NodeClass(name="here", cpus=2, mem_bytes=8 * GIB),))
    found = make_plan(PlanSettings().request(digits(Api.GRAPH), cluster))
    assert (found.option.workers, found.option.ps, found.variables) == (1, 0, {})
    assert found.optimal
    assert "as python runs it" in found.why[0]
    assert "--strategy ps" in found.why[0]
    assert found.alternatives
    assert all(other.relative < 1 for other in found.alternatives)
    distributed = make_plan(PlanSettings(strategy="ps").request(digits(Api.GRAPH), cluster))
    assert distributed.option.ps == 1
    assert not any("plain task" in sentence for sentence in distributed.why)


@pytest.mark.parametrize("changes", [{}, {"rules": "all"}, {"objective": "traffic"}])
def test_a_script_whose_computation_is_known_uses_several_gpus_as_several_workers(changes: dict[str, Any]) -> None:
    settings = PlanSettings(gpus_per_task=4, **changes)
    plan = make_plan(settings.request(profile([100 * MB], flops=2e10, api=Api.KERAS), k80(2)))
    assert max(task.gpus for task in plan.tasks) == 1
    (note,) = (said for said in plan.why if said.startswith("--gpus-per-task is for training loops"))
    assert "--strategy allreduce" in note


def test_many_gpus_win_against_it() -> None:
    plan = make_plan(PlanSettings().request(profile([100 * MB], flops=8e9, api=Api.GRAPH), k80()))
    assert plan.option.ps > 0
    assert any("One plain task without parameter servers would reach" in sentence for sentence in plan.why)


@pytest.mark.parametrize(
    "changes", [{"objective": "traffic"}, {"rules": "all"}], ids=["the paper's objective", "the paper's rules"]
)
def test_the_papers_own_options_have_parameter_servers(changes: dict[str, str]) -> None:
    cluster = Cluster((NodeClass(name="here", cpus=2, mem_bytes=8 * GIB),))
    settings = dataclasses.replace(PlanSettings(), **changes)  # type: ignore[arg-type]
    assert not make_plan(settings.request(digits(), cluster)).is_plain


@pytest.mark.parametrize("changes", [{"synchronous": True}, {"api": Api.COORDINATOR}])
def test_a_script_that_asks_for_a_cluster_gets_one(changes: dict[str, object]) -> None:
    cluster = Cluster((NodeClass(name="here", cpus=2, mem_bytes=8 * GIB),))
    model = dataclasses.replace(digits(), **changes)  # type: ignore[arg-type]
    assert not make_plan(PlanSettings().request(model, cluster)).is_plain
    with pytest.raises(InfeasibleError, match="trains on a cluster only"):
        make_plan(PlanRequest(model, cluster, strategies=frozenset({"one"})))


def test_what_it_lacks_is_named() -> None:
    cluster = Cluster((NodeClass(name="here", cpus=2, mem_bytes=GIB // 4),))
    with pytest.raises(InfeasibleError, match=r"The job's only task needs .* \('here'\)"):
        make_plan(PlanRequest(digits(), cluster, strategies=frozenset({"one"})))


def test_the_smallest_job_is_one_task_where_that_is_enough() -> None:
    cluster = Cluster((NodeClass(name="here", cpus=2, mem_bytes=8 * GIB),))
    assert [name for name, _ in smallest_job(PlanSettings().request(digits(), cluster))] == ["task"]
    roles = [name for name, _ in smallest_job(PlanSettings(strategy="ps").request(digits(), cluster))]
    assert "parameter server" in roles


def test_an_agent_without_free_cpus_is_not_used() -> None:
    """An agent may offer what is left beside its CPUs, such as ports."""
    full = k80_node("full", cpus=0.0, gpus=0)
    assert fastest_plain(scenario_of(PlanRequest(digits(), Cluster((full,))))) is None
    found = fastest_plain(scenario_of(PlanRequest(digits(), Cluster((full, k80_node("free", gpus=0))))))
    assert found is not None
    assert found.node == "free"
