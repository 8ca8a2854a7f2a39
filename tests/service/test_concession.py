"""Which elastic jobs give up which tasks, so that another one fits."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from framework.service.concession import Place, Room, Shrinkable, who_gives_up, with_tasks
from framework.service.records import TaskRecord


def shrinkable(job_id: str, share: float, cpus: Mapping[str, float], most: int = 9) -> Shrinkable:
    """A job with tasks on agents; names of tasks are agents' names and a letter."""
    tasks = [
        TaskRecord(f"{job_id}-{where}", job_id, where[:2], where[:2], "", "worker", "running", {"cpus": amount})
        for where, amount in cpus.items()
    ]
    return Shrinkable(job_id, share, tasks, most)


def needing(count: int, cpus: float) -> Callable[[Room], frozenset[str]]:
    """A job of so many tasks of so many CPUs each."""

    def fits(room: Room) -> frozenset[str]:
        places = [agent for agent, free in room.items() for _ in range(int(free["cpus"] // cpus))]
        return frozenset(places[:count]) if len(places) >= count else frozenset()

    return fits


def given_up(place: Place) -> list[str]:
    return sorted(itertools.chain.from_iterable(place.gives_up.values()))


RICH = shrinkable("rich", 0.6, {"S0a": 1.0, "S0b": 1.0, "S1a": 1.0}, most=2)
FAR = shrinkable("far", 0.9, {"S2a": 1.0})
POOR = shrinkable("poor", 0.2, {"S0a": 2.0, "S1a": 2.0})


@pytest.mark.parametrize(
    ("jobs", "free", "waits", "asked"),
    [
        # The one with the larger share, though the other could do with fewer tasks; and no more than it takes.
        ([POOR, RICH], {"S0": 0.0, "S1": 0.0}, needing(1, 2.0), ["rich-S0a", "rich-S0b"]),
        ([POOR, RICH], {"S0": 1.0, "S1": 0.0}, needing(1, 2.0), ["rich-S0a"]),
        ([RICH], {"S0": 0.0, "S1": 1.0}, needing(1, 2.0), ["rich-S1a"]),
        # Not more than it can do without, and the other instead if that is too little.
        ([RICH], {"S0": 0.0, "S1": 0.0}, needing(3, 1.0), []),
        ([POOR, RICH], {"S0": 0.0, "S1": 0.0}, needing(2, 2.0), ["poor-S0a", "rich-S0a", "rich-S0b"]),
        # Whose tasks are where they do not help is left alone.
        ([POOR, FAR], {"S0": 0.0, "S1": 0.0, "S2": 0.0}, needing(1, 2.0), ["poor-S0a"]),
        ([POOR, RICH], {"S0": 0.0, "S1": 0.0}, needing(1, 9.0), []),
        ([shrinkable("firm", 0.9, {"S0a": 4.0}, most=0)], {"S0": 0.0}, needing(1, 4.0), []),
    ],
)  # fmt: skip
def test_who_gives_up_what(
    jobs: Sequence[Shrinkable], free: Mapping[str, float], waits: Callable[[Room], frozenset[str]], asked: list[str]
) -> None:
    place = who_gives_up(jobs, {agent: {"cpus": cpus} for agent, cpus in free.items()}, waits)
    assert given_up(place) == asked
    assert bool(place.agents) is bool(asked)
    assert {task.rpartition("-")[2][:2] for task in given_up(place)} <= place.agents


jobs_strategy = st.lists(
    st.tuples(
        st.floats(0.0, 1.0),
        st.dictionaries(st.sampled_from(["S0a", "S0b", "S1a", "S1b", "S2a"]), st.sampled_from([0.5, 1.0, 2.0])),
        st.integers(0, 4),
    ),
    max_size=3,
)


@given(jobs=jobs_strategy, free=st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=3, max_size=3), data=st.data())
def test_what_is_given_up_is_enough_and_none_of_it_is_too_much(
    jobs: list[tuple[float, dict[str, float], int]], free: list[float], data: st.DataObject
) -> None:
    able = [shrinkable(f"job{number}", *job) for number, job in enumerate(jobs)]
    room = {f"S{number}": {"cpus": cpus} for number, cpus in enumerate(free)}
    fits = needing(data.draw(st.integers(1, 3)), data.draw(st.sampled_from([1.0, 2.0, 3.0])))
    if fits(room):
        return
    place = who_gives_up(able, room, fits)
    tasks = {task.task_id: task for job in able for task in job.tasks}
    asked = [tasks[task_id] for task_id in given_up(place)]
    if not place.agents:
        assert not asked
        assert any(job.most < len(job.tasks) for job in able) or not fits(with_tasks(room, tasks.values()))
        return
    assert fits(with_tasks(room, asked)) == place.agents
    assert all(len(place.gives_up.get(job.job_id, ())) <= job.most for job in able)
    for task in asked:
        assert not fits(with_tasks(room, [other for other in asked if other is not task]))
