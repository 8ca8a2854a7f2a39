"""What other frameworks hold and want, and the fair share of a job beside them."""

from __future__ import annotations

from framework.scheduler.demand import Demand, FrameworkUsage
from framework.training.elastic.autoscaler import ShrinkHistory

WORKER = {"cpus": 1.0, "mem": 1024.0, "gpus": 0.0}
REST = {"cpus": 0.5, "mem": 1024.0, "gpus": 0.0}
TOTAL = {"cpus": 8.0, "mem": 16384.0, "gpus": 0.0}


def other(name: str, cpus: float = 0.0, *, is_requesting: bool = True) -> FrameworkUsage:
    return FrameworkUsage(name, f"framework {name}", {"cpus": cpus}, is_requesting)


def test_a_fair_share_is_that_of_the_scarcest_resource() -> None:
    demand = Demand(TOTAL, [other("a")])
    assert demand.max_fair_workers(2, WORKER, REST) == 3  # of 4 CPUs, half a CPU is the others'
    assert demand.max_fair_workers(1, {**WORKER, "mem": 4096.0}, REST) == 1


def test_jobs_of_one_framework_have_one_share_among_them() -> None:
    """Four jobs of four workers hold a cluster of 16 CPUs, and another framework waits."""
    total, worker = {"cpus": 16.0, "mem": 65536.0, "gpus": 0.0}, {"cpus": 1.0, "mem": 1024.0, "gpus": 0.0}
    waits = other("a")

    def fair(workers: int, ours: float) -> int | None:
        demand = Demand.among(total, [FrameworkUsage("us", "service", {"cpus": ours}, is_requesting=True), waits], "us")
        return demand.max_fair_workers(workers, worker, {})

    assert fair(4, 16.0) == 2
    assert fair(2, 8.0) == 2, "each has given its part up"
    assert fair(1, 6.0) == 3, "the unused part of the share is free for any job"
    assert fair(4, 0.0) == 8, "the master does not know of its tasks yet"
    room = ShrinkHistory(patience_s=30.0)
    ours = Demand.among(total, [FrameworkUsage("us", "service", {"cpus": 16.0}, is_requesting=True), waits], "us")
    assert room.relevant_demand(ours, 0.0).max_fair_workers(4, worker, {}) == 2


def test_who_holds_something_counts_and_who_wants_nothing_does_not_ask() -> None:
    assert Demand(TOTAL, [other("a", cpus=2.0, is_requesting=False)]).max_fair_workers(2, WORKER, REST) is None
    two = Demand(TOTAL, [other("a", cpus=2.0, is_requesting=False), other("b")])
    assert two.max_fair_workers(2, WORKER, REST) == 2
    assert [one.id for one in two.waiting] == ["b"]


def test_who_cannot_use_the_room_made_for_it_gets_none_again() -> None:
    room = ShrinkHistory(patience_s=30.0)
    demand = Demand(TOTAL, [other("a"), other("b")])
    room.record(["a"], 0.0)
    assert [one.id for one in room.relevant_demand(demand, 29.0).others] == ["a", "b"]
    assert [one.id for one in room.relevant_demand(demand, 30.0).others] == ["b"]
    room.clear()
    assert [one.id for one in room.relevant_demand(demand, 30.0).others] == ["a", "b"]
    room.record(["a"], 0.0)
    assert [one.id for one in room.relevant_demand(demand, 30.0).others] == ["b"]
    got_some = Demand(TOTAL, [other("a", cpus=1.0)])
    assert len(room.relevant_demand(got_some, 31.0).others) == 1
    assert [one.id for one in room.relevant_demand(demand, 32.0).others] == ["a", "b"]
