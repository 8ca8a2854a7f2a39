"""Rates of asynchronous workers: what the links leave them, against a general linear program."""

from __future__ import annotations

import dataclasses
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dike.profile import Api
from solver import Cluster, NodeClass
from solver.async_rates import LINK_SHARE, Machine, Rates, Shared, best_rates, link_range, total_rate
from solver.evaluation import Evaluation, evaluate
from solver.hardware import known_hardware
from solver.placement.naming import Assignment
from solver.resources import TaskSizes, WorkerShape
from solver.scenario import Scenario
from solver.units import BYTES_PER_S_PER_GBPS, GIB
from tests.properties import examples
from tests.solver import solver_brute_force as brute_force
from tests.solver.solver_cases import MB, profile

WITHIN_GBPS = 16.0
many = examples(300)

machines = st.lists(
    st.tuples(
        st.floats(0.0, 20.0),
        st.sampled_from([0, 0, 10, 20, 30, 60]),
        st.sampled_from([0.5, 1.0, 2.0, 10.0]),
        st.sampled_from(["left", "right"]),
        st.sampled_from([1, 1, 2, 4]),
    ),
    min_size=1,
    max_size=4,
).filter(lambda entries: any(entry[0] for entry in entries) and any(entry[1] for entry in entries))


@many
@given(machines, st.sampled_from([None, 0.3, 2.0]), st.sampled_from([3.0, math.inf]))
def test_rates_are_the_optimum_of_the_linear_program(
    entries: list[tuple[float, int, float, str, int]], uplink_gbps: float | None, most_steps: float
) -> None:
    nodes = [
        NodeClass(name=f"n{i}", cpus=1.0, mem_bytes=GIB, network_gbps=gbps, rack=rack)
        for i, (_, _, gbps, rack, _) in enumerate(entries)
    ]
    stored = [megabytes * MB for _, megabytes, _, _, _ in entries]
    sizes = TaskSizes.of(profile(), 1.0)
    shards = tuple(size for size in stored if size)
    job = brute_force.Job(profile(), sizes, WorkerShape(0, 1.0), 1, shards, WITHIN_GBPS, uplink_gbps)
    samples = [entry[4] for entry in entries]
    expected = brute_force.most_samples(job, nodes, stored, [entry[0] for entry in entries], samples, most_steps)
    found = _best(entries, uplink_gbps, most_steps)
    assert found.samples_per_s == pytest.approx(expected, rel=1e-7)
    assert found.steps_per_s <= most_steps
    assert found.utilisation <= 1 + 1e-9


def _best(entries: list[tuple[float, int, float, str, int]], uplink_gbps: float | None, most_steps: float) -> Rates:
    found = [
        Machine(rate, megabytes * MB, gbps * BYTES_PER_S_PER_GBPS, rack, samples)
        for rate, megabytes, gbps, rack, samples in entries
    ]
    total = sum(machine.stored for machine in found)
    uplink = math.inf if uplink_gbps is None else uplink_gbps * BYTES_PER_S_PER_GBPS
    return best_rates(found, Shared(total, WITHIN_GBPS * BYTES_PER_S_PER_GBPS, uplink, most_steps))


def test_machines_that_are_alike_may_be_counted_instead_of_repeated() -> None:
    shared = Shared(100, 1e9)
    apart = [Machine(1.0, 50, 60.0), Machine(1.0, 50, 60.0), *[Machine(0.7, 0, 100.0)] * 3]
    together = [Machine(1.0, 50, 60.0, count=2), Machine(0.7, 0, 100.0, count=3)]
    assert total_rate(apart, shared) == pytest.approx(total_rate(together, shared))
    assert dataclasses.astuple(best_rates(apart, shared)) == pytest.approx(
        dataclasses.astuple(best_rates(together, shared))
    )


def test_the_range_of_a_link_is_where_its_traffic_fits() -> None:
    for stored, steps_per_s, link in ((0, 5.0, 30.0), (20, 5.0, 150.0), (80, 2.0, 100.0), (50, 3.0, 150.0)):
        ends = link_range(stored, 100, steps_per_s, link / LINK_SHARE, own_rate=steps_per_s)
        assert ends is not None
        for share in range(101):
            rate = steps_per_s * share / 100
            fits = stored * (steps_per_s - rate) + (100 - stored) * rate <= link * (1 + 1e-12)
            assert fits == (ends[0] * (1 - 1e-12) <= rate <= ends[1] * (1 + 1e-12))
    assert link_range(50, 100, 3.1, 150.0 / LINK_SHARE) is None
    assert link_range(80, 100, 2.0, 100.0 / LINK_SHARE, own_rate=0.5) is None


def _worth(where: Assignment, slow_gbps: float, gbps: float = 10.0) -> Evaluation:
    nodes = tuple(
        NodeClass(name=name, cpus=8.0, mem_bytes=32 * GIB, network_gbps=speed)
        for name, speed in (("ps", gbps), ("near", gbps), ("slow", slow_gbps))
    )
    model = profile([100 * MB], api=Api.GRAPH, flops=1e7)
    scenario = Scenario.of(model, Cluster(nodes, within_node_gbps=WITHIN_GBPS), known_hardware())
    return evaluate(scenario, WorkerShape(0, 1.0), scenario.shards(1), where)


def test_a_worker_waits_for_the_card_of_the_slowest_machine_with_parameter_servers() -> None:
    # The same 0.1 Gb/s between them, whichever has the ps.
    here, there = Assignment(("ps",), ("slow",), None), Assignment(("slow",), ("ps",), None)
    assert _worth(there, 0.1).samples_per_s == pytest.approx(_worth(here, 0.1).samples_per_s)
    # On the same machine, no worker waits.
    beside = Assignment(("slow",), ("slow",), None)
    assert _worth(beside, 0.1).samples_per_s == pytest.approx(_worth(beside, 10.0).samples_per_s)


def test_a_slow_machine_slows_its_own_workers_only() -> None:
    fast = _worth(Assignment(("ps",), ("ps", "near"), None), 10.0)
    more = _worth(Assignment(("ps",), ("ps", "near", "slow"), None), 0.1)
    slow_alone = _worth(Assignment(("ps",), ("slow",), None), 0.1)
    assert more.samples_per_s == pytest.approx(fast.samples_per_s + slow_alone.samples_per_s)


def test_remote_workers_wait_for_the_link_and_the_one_beside_its_ps_does_not() -> None:
    beside = _worth(Assignment(("ps",), ("ps",), None), 4.0, 4.0)
    crowd = _worth(Assignment(("ps",), ("ps", *["near"] * 8, *["slow"] * 8), None), 4.0, 4.0)
    # The ps sends 100 MB for each step made elsewhere, which its CPU could do twice as often; 32 samples a step.
    assert crowd.samples_per_s == pytest.approx(beside.samples_per_s + 32 * LINK_SHARE * 4e9 / 8 / (100 * MB))
    assert crowd.step_time.network == pytest.approx(crowd.step_time.total)
    assert beside.step_time.network < beside.step_time.total
