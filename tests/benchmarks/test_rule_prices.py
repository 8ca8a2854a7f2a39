"""What the rules cost, and plans outside them."""

from __future__ import annotations

import dataclasses

import pytest

from benchmarks.rule_prices import RulePrice, explore
from dike.exceptions import BadInputError
from solver import Cluster, NodeClass, PlanRequest, make_plan
from solver.choices import RULES
from solver.options import PAPER
from solver.units import GIB
from tests.solver.solver_cases import MB, digits, k80, machines, profile

VGG16_SIZES = [411 * MB, 67 * MB, 16 * MB] + [9 * MB] * 7 + [4 * MB] * 2 + [2 * MB]


def _price(prices: tuple[RulePrice, ...], rule: str) -> RulePrice:
    return next(price for price in prices if price.rule == rule)


@pytest.mark.slow
def test_on_a_slow_network_using_all_gpus_would_cost_much_of_the_speed() -> None:
    # Synchronous: asynchronous workers that wait for the network take nothing from the others.
    request = PlanRequest(profile(VGG16_SIZES, flops=31e9, synchronous=True), k80(network_gbps=1.0), time_limit_s=4.0)
    request = dataclasses.replace(request, rules=PAPER)
    found = explore(request)
    assert [price.rule for price in found.prices] == list(RULES)
    price = _price(found.prices, "all_gpus_used")
    assert price.cost is not None
    assert not price.applied
    assert price.proven
    strict = make_plan(PlanRequest(request.profile, request.cluster, rules=frozenset(RULES)))
    assert price.inside == pytest.approx(strict.samples_per_s)
    assert price.outside == pytest.approx(found.inside.samples_per_s)
    assert price.cost == pytest.approx(1 - strict.samples_per_s / found.inside.samples_per_s)
    assert price.cost > 0.3
    assert found.best.samples_per_s >= found.inside.samples_per_s


@pytest.mark.slow
def test_on_a_fast_network_using_all_gpus_costs_nothing() -> None:
    found = explore(PlanRequest(profile(), k80(2, network_gbps=100.0), time_limit_s=2.0, rules=PAPER))
    # Plans that are within 5% of the fastest may differ by that.
    assert _price(found.prices, "all_gpus_used").cost == pytest.approx(0.0, abs=0.06)


@pytest.mark.slow
def test_a_rule_that_excludes_a_better_plan_is_priced_and_that_plan_is_the_best() -> None:
    # A machine without GPUs could add its samples, but workers that are alike all need GPUs.
    plain = NodeClass(name="plain", cpus=32.0, mem_bytes=64 * GIB, network_gbps=100)
    gpu = NodeClass(name="gpu", cpus=8.0, mem_bytes=32 * GIB, gpus=1, gpu_model="K80", network_gbps=100)
    model = profile([4 * MB] * 4, flops=1e8)
    # Of so few that no machine needs the whole time limit to find them.
    found = explore(PlanRequest(model, Cluster((plain, gpu)), max_workers=4, rules=PAPER))
    price = _price(found.prices, "identical_workers")
    assert price.applied
    assert price.cost is not None
    assert price.cost > 0.05
    assert found.best_rules == PAPER - {"identical_workers"}
    assert found.best.samples_per_s == price.outside


@pytest.mark.slow
def test_for_traffic_traffic_is_compared() -> None:
    found = explore(PlanRequest(profile(), k80(2), objective="traffic", time_limit_s=4.0))
    price = _price(found.prices, "all_gpus_used")
    assert price.applied
    assert price.inside == found.inside.traffic_bytes
    assert price.outside is not None
    assert price.outside < found.inside.traffic_bytes
    assert price.cost == pytest.approx(found.inside.traffic_bytes / price.outside - 1)
    assert found.best.traffic_bytes == price.outside


@pytest.mark.slow
def test_a_rule_that_no_plan_can_keep_has_no_price() -> None:
    # Two workers of one GPU take 6.6 GiB; a ps and the chief fit beside one only.
    cluster = k80(1, gpus=2, mem_bytes=int(6.8 * GIB))
    found = explore(PlanRequest(profile(), cluster, time_limit_s=2.0, max_gpus_per_worker=1, rules=PAPER))
    price = _price(found.prices, "all_gpus_used")
    assert (price.inside, price.cost) == (None, None)
    assert price.outside == found.inside.samples_per_s
    assert price.reason.startswith("No plan keeps it")


def test_a_senseless_request_is_refused() -> None:
    with pytest.raises(BadInputError, match="is not an objective"):
        explore(PlanRequest(digits(), machines(1), objective="speed"))  # type: ignore[arg-type]
