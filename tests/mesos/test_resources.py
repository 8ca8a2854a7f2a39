"""Taking parts out of offers: never more than is there, always with the right role and reservation."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from framework.mesos.resources import ResourcePool


def scalar(name: str, value: float, **more: Any) -> dict[str, Any]:
    return {"name": name, "type": "SCALAR", "scalar": {"value": value}, "allocation_info": {"role": "*"}, **more}


def ports(*ranges: tuple[int, int]) -> dict[str, Any]:
    return {
        "name": "ports",
        "type": "RANGES",
        "ranges": {"range": [{"begin": begin, "end": end} for begin, end in ranges]},
    }


@pytest.mark.parametrize("mark", [{"role": "ml"}, {"reservations": [{"type": "STATIC", "role": "ml"}]}])
def test_reserved_pieces_go_first_and_keep_their_reservation(mark: dict[str, Any]) -> None:
    pool = ResourcePool([scalar("cpus", 2, role="*"), scalar("cpus", 1, **mark)])

    taken = pool.take_scalar("cpus", 1.5)

    assert [piece["scalar"]["value"] for piece in taken] == [1, 0.5]
    assert mark.items() <= taken[0].items()
    assert pool.scalar("cpus") == 1.5


def test_revocable_and_volume_resources_are_left_alone() -> None:
    volume = scalar("disk", 10, disk={"persistence": {"id": "v"}})
    mount = scalar("disk", 10, disk={"source": {"type": "MOUNT"}})
    pool = ResourcePool([scalar("cpus", 4, revocable={}), volume, mount])
    assert pool.scalar("cpus") == 0
    assert pool.scalar("disk") == 0


def test_too_much_is_refused_and_nothing_taken() -> None:
    pool = ResourcePool([scalar("mem", 100)])
    with pytest.raises(ValueError, match="101 mem wanted, 100 left"):
        pool.take_scalar("mem", 101)
    assert pool.scalar("mem") == 100


@given(
    offered=st.lists(st.integers(0, 8000), min_size=1, max_size=4),
    wanted=st.lists(st.integers(1, 4000), max_size=8),
)
def test_what_is_taken_and_what_is_left_add_up(offered: list[int], wanted: list[int]) -> None:
    pool = ResourcePool([scalar("cpus", thousandths / 1000) for thousandths in offered])
    taken = 0
    for thousandths in wanted:
        try:
            pieces = pool.take_scalar("cpus", thousandths / 1000)
        except ValueError:
            assert thousandths > sum(offered) - taken
            continue
        assert round(sum(piece["scalar"]["value"] for piece in pieces) * 1000) == thousandths
        taken += thousandths
    assert round(pool.scalar("cpus") * 1000) == sum(offered) - taken


def test_ports_are_taken_once_and_unlucky_ones_last() -> None:
    pool = ResourcePool([ports((5, 6), (8, 8))])
    chosen = [pool.take_port({5, 6}, random.Random(0))[0] for _ in range(3)]
    assert chosen[0] == 8
    assert sorted(chosen) == [5, 6, 8]
    with pytest.raises(ValueError, match="no port is left"):
        pool.take_port((), random.Random(0))


def test_named_ports_split_their_range() -> None:
    pool = ResourcePool([ports((1, 5))])
    (piece,) = pool.take_ports([2, 3])
    assert piece["ranges"] == {"range": [{"begin": 2, "end": 3}]}
    assert pool.ports() == [1, 4, 5]
    with pytest.raises(ValueError, match=r"ports \[3\] are not left"):
        pool.take_ports([3])
