"""Which size a job changes to, from what is known of it and of others; nothing runs here."""

from __future__ import annotations

import pytest

from framework.elastic.decision import Situation, Size, decide, evenness
from framework.elastic.demand import Demand, FrameworkUse, RoomMade

NOW = Size(2, 1)
SIZES = [Size(workers, 1) for workers in (1, 3, 4)]
WORKER = {"cpus": 1.0, "mem": 1024.0, "gpus": 0.0}
REST = {"cpus": 0.5, "mem": 1024.0, "gpus": 0.0}
TOTAL = {"cpus": 8.0, "mem": 16384.0, "gpus": 0.0}


def linear(size: Size) -> float:
    return 100.0 * size.workers


def situation(**changes: object) -> Situation:
    values: dict[str, object] = {"now": NOW, "sizes": SIZES, "samples_left": 20_000.0, "cost_s": 10.0, **changes}
    return Situation(**values)  # type: ignore[arg-type]


def other(name: str, cpus: float = 0.0, *, wants: bool = True) -> FrameworkUse:
    return FrameworkUse(name, f"framework {name}", {"cpus": cpus}, wants)


def test_a_job_grows_to_where_it_is_fastest() -> None:
    choice = decide(situation(), linear)
    assert choice is not None
    assert choice.size == Size(4, 1)
    assert "saves 50 s" in choice.reason


@pytest.mark.parametrize(("cost_s", "changes"), [(49.0, True), (50.0, False)])
def test_the_saving_must_exceed_the_cost(cost_s: float, changes: bool) -> None:
    assert (decide(situation(cost_s=cost_s), linear) is not None) is changes


def test_a_job_that_is_nearly_done_stays() -> None:
    assert decide(situation(samples_left=100.0), linear) is None


def test_a_gain_within_the_error_is_none() -> None:
    assert decide(situation(samples_left=1e9), lambda size: 100.0 + size.workers) is None


def test_of_sizes_that_are_alike_the_smallest_is_taken() -> None:
    speeds = {2: 100.0, 3: 199.0, 4: 200.0}
    choice = decide(situation(sizes=[Size(3, 1), Size(4, 1)]), lambda size: speeds[size.workers])
    assert choice is not None
    assert choice.size == Size(3, 1)


def test_a_job_shrinks_where_fewer_workers_are_faster() -> None:
    choice = decide(situation(), lambda size: 100.0 / size.workers)
    assert choice is not None
    assert choice.size == Size(1, 1)


def test_a_change_is_not_taken_back() -> None:
    """Whatever the speeds: after a change, the same knowledge asks for no other one."""
    for speed in (linear, lambda size: 100.0 / size.workers, lambda size: 100.0 - (size.workers - 3) ** 2):
        first = decide(situation(sizes=[Size(w, 1) for w in (1, 3, 4)]), speed)
        if first is not None:
            sizes = [Size(w, 1) for w in (1, 2, 3, 4) if w != first.size.workers]
            assert decide(situation(now=first.size, sizes=sizes), speed) is None


def test_a_job_gives_way_to_who_waits_however_little_is_left() -> None:
    choice = decide(situation(now=Size(4, 1), samples_left=0.0, fair_workers=1, waiting=("search",)), linear)
    assert choice is not None
    assert choice.size == Size(1, 1)
    assert "search waits" in choice.reason


def test_a_job_within_its_share_keeps_it() -> None:
    assert decide(situation(fair_workers=2, waiting=("search",)), linear) is None


def test_the_least_size_is_kept_even_above_the_share() -> None:
    assert decide(situation(sizes=[Size(3, 1), Size(4, 1)], fair_workers=0, waiting=("search",)), linear) is None


def test_a_job_grows_no_further_than_its_share_while_others_want_more() -> None:
    choice = decide(situation(fair_workers=3), linear)
    assert choice is not None
    assert choice.size == Size(3, 1)


def test_workers_that_divide_the_step_evenly_are_worth_more() -> None:
    assert [evenness(4, Size(workers, 1)) for workers in (1, 2, 4)] == [1.0, 1.0, 1.0]
    assert evenness(4, Size(3, 1)) == pytest.approx(2 / 3)
    assert evenness(None, Size(3, 1)) == 1.0


def test_a_fair_share_is_that_of_the_scarcest_resource() -> None:
    demand = Demand(TOTAL, [other("a")])
    assert demand.fair_workers(2, WORKER, REST) == 3  # of 4 CPUs, half a CPU is the others'
    assert demand.fair_workers(1, {**WORKER, "mem": 4096.0}, REST) == 1


def test_jobs_of_one_framework_have_one_share_among_them() -> None:
    """Four jobs of four workers hold a cluster of 16 CPUs, and another framework waits."""
    total, worker = {"cpus": 16.0, "mem": 65536.0, "gpus": 0.0}, {"cpus": 1.0, "mem": 1024.0, "gpus": 0.0}
    waits = other("a")

    def fair(workers: int, ours: float) -> int | None:
        demand = Demand.among(total, [FrameworkUse("us", "service", {"cpus": ours}, wants=True), waits], "us")
        return demand.fair_workers(workers, worker, {})

    assert fair(4, 16.0) == 2
    assert fair(2, 8.0) == 2, "each has given its part up"
    assert fair(1, 6.0) == 3, "what is missing of the share is for whoever wants it"
    assert fair(4, 0.0) == 8, "the master does not know of its tasks yet"
    room = RoomMade(patience_s=30.0)
    ours = Demand.among(total, [FrameworkUse("us", "service", {"cpus": 16.0}, wants=True), waits], "us")
    assert room.still_useful(ours, 0.0).fair_workers(4, worker, {}) == 2


def test_who_holds_something_counts_and_who_wants_nothing_does_not_ask() -> None:
    assert Demand(TOTAL, [other("a", cpus=2.0, wants=False)]).fair_workers(2, WORKER, REST) is None
    two = Demand(TOTAL, [other("a", cpus=2.0, wants=False), other("b")])
    assert two.fair_workers(2, WORKER, REST) == 2
    assert [one.id for one in two.waiting] == ["b"]


def test_who_cannot_use_the_room_made_for_it_is_not_given_way_to_again() -> None:
    room = RoomMade(patience_s=30.0)
    demand = Demand(TOTAL, [other("a"), other("b")])
    room.made_for(["a"], 0.0)
    assert [one.id for one in room.still_useful(demand, 29.0).others] == ["a", "b"]
    assert [one.id for one in room.still_useful(demand, 30.0).others] == ["b"]
    room.lost()
    assert [one.id for one in room.still_useful(demand, 30.0).others] == ["a", "b"]
    room.made_for(["a"], 0.0)
    assert [one.id for one in room.still_useful(demand, 30.0).others] == ["b"]
    got_some = Demand(TOTAL, [other("a", cpus=1.0)])
    assert len(room.still_useful(got_some, 31.0).others) == 1
    assert [one.id for one in room.still_useful(demand, 32.0).others] == ["a", "b"]
