"""What-if changes and sweeps."""

from __future__ import annotations

import pytest

from dike.exceptions import BadInputError
from solver import Cluster, NodeClass, PlanRequest, make_plan
from solver.changes import apply_change
from solver.units import GIB
from solver.variants import plan_variants, sweep, what_if
from tests.solver.solver_cases import k80, profile

MIXED = Cluster((*k80(3).nodes, NodeClass(name="big", count=2, cpus=16, mem_bytes=64 * GIB)), across_racks_gbps=40)


@pytest.mark.parametrize(
    ("change", "counts"),
    [
        ("add 2 x k80", {"k80": 5, "big": 2}),
        ("Add 2 k80", {"k80": 5, "big": 2}),
        ("add 2 x gpu", {"k80": 5, "big": 2}),
        ("remove 1 x cpu", {"k80": 3, "big": 1}),
        ("remove 2 x big", {"k80": 3}),
    ],
)
def test_machines_come_and_go(change: str, counts: dict[str, int]) -> None:
    assert {node.name: node.count for node in apply_change(MIXED, change).nodes} == counts


def test_a_figure_is_set_for_all_machines_or_one_class() -> None:
    assert {node.network_gbps for node in apply_change(MIXED, "network_gbps=25").nodes} == {25.0}
    assert [node.network_gbps for node in apply_change(MIXED, "big.network_gbps = 25").nodes] == [10.0, 25.0]
    assert apply_change(MIXED, "k80.mem=48GiB").nodes[0].mem_bytes == 48 * GIB
    assert apply_change(MIXED, "big.gpu_model=V100").nodes[1].gpu_model == "V100"
    assert apply_change(MIXED, "across_racks_gbps=1").across_racks_gbps == 1.0


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ("buy more", "use 'add 2 x CLASS'"),
        ("add 2 x titan", "it has k80, big"),
        ("remove 4 x k80", "has 3 machines"),
        ("colour=red", "these can: count, cpus"),
        ("network_gbps=0", "more than 0"),
        ("network_gbps=nan", "more than 0"),
        ("k80.count=1.5", "a whole number"),
        ("k80.gpus=-1", "at least 0"),
        ("k80.mem=much", "32GiB"),
        ("k80.within_node_gbps=5", "applies to links"),
    ],
)
def test_a_change_that_makes_no_sense_is_one_sentence(change: str, says: str) -> None:
    with pytest.raises(BadInputError, match=says) as caught:
        apply_change(MIXED, change)
    assert "\n" not in str(caught.value)


def test_a_cluster_cannot_lose_its_last_machine() -> None:
    with pytest.raises(BadInputError, match="at least one node"):
        apply_change(k80(2), "remove 2 x k80")


def test_a_faster_network_never_makes_the_plan_slower() -> None:
    variants = plan_variants(sweep(PlanRequest(profile(), k80(3)), "network_gbps=1,10, 25"), make_plan)
    assert [variant.label for variant in variants] == ["network_gbps=1", "network_gbps=10", "network_gbps=25"]
    speeds = [variant.plan.samples_per_s for variant in variants if variant.plan is not None]
    assert len(speeds) == 3
    assert speeds[0] < speeds[1] <= speeds[2] * 1.01


def test_a_value_for_which_nothing_fits_has_a_reason() -> None:
    small, large = plan_variants(sweep(PlanRequest(profile(), k80(2)), "k80.mem=64MiB,32GiB"), make_plan)
    assert small.plan is None
    assert "short" in small.reason
    assert large.plan is not None
    assert large.to_json()["plan"]["option"]["workers"] == large.plan.option.workers


def test_batch_size_and_workers_can_be_swept() -> None:
    request = PlanRequest(profile(), k80(2))
    assert [r.profile.batch_size for r in sweep(request, "batch_size=8,16").values()] == [8, 16]
    assert [r.max_workers for r in sweep(request, "max_workers=1,2").values()] == [1, 2]


def test_what_if_keeps_the_cluster_as_it_is_beside_its_changes() -> None:
    request = PlanRequest(profile(), MIXED)
    asked = what_if(request, ["add 2 x gpu", "network_gbps=25, remove 1 x big"])
    assert asked["unchanged"] is request
    assert asked["add 2 x gpu"].cluster.node_count == 7
    both = asked["network_gbps=25, remove 1 x big"].cluster
    assert (both.node_count, both.nodes[0].network_gbps) == (4, 25.0)


@pytest.mark.parametrize(
    "text", ["network_gbps", "=1,2", "network_gbps=", "speed=1,2", "batch_size=0", "batch_size=x", "k80.mem=128"]
)
def test_a_sweep_that_makes_no_sense_is_refused(text: str) -> None:
    with pytest.raises(BadInputError):
        sweep(PlanRequest(profile(), k80(2)), text)
