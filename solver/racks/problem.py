"""The placement of one option across racks as data, and for synchronous steps as tables for one limit on all links.

With n workers and M bytes of shards, a rack with S bytes and a workers keeps its uplink busy for 2 max(S (n - a), a (M
- S)) / uplink seconds a step. 'No card and no uplink is busy longer than T' therefore excludes states of single
machines and of single racks, which the tables of `max_plus.py` support. The tables for asynchronous workers are in
`rates.py`.

A state counts the shards of each class. If the shards of a class are equal that is exact. Many unequal shards would
make too many classes; then all are one class, and two problems replace the true one. The optimistic one gives every ps
the best shard for its machine and every rack the best bytes, between its q smallest and its q largest shards, so it
allows whatever the true shards allow. The likely one has mean shards.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from solver.async_rates import Shared
from solver.nodes import NodeKind
from solver.placement.problem import (
    MAX_CASES,
    PlacementProblem,
    State,
    slowest_times,
    with_slowest,
    without_cases,
)
from solver.racks.max_plus import State as Tasks
from solver.racks.max_plus import Table
from solver.racks.tree import Best, RackTree
from solver.resources import TaskSizes
from solver.shards import Shards
from solver.step_time import StepModel

Floats = NDArray[np.float64]
Value = Literal["possible", "local", "most bytes", "fewest bytes"]
"""Value of a placement: none but being possible; local shards; the maximum bytes of its machines and racks within the
limits; the minimum, negative."""
MAX_STATES = 40_000
"""Maximum states of classes of equal shards; more are one class of unequal ones."""
MIN_DIVISOR = 1e-9
"""Replaces zero workers as a divisor of bytes."""


@dataclass(frozen=True)
class MachineType:
    """Identical machines: their possible states, and bytes/s of the network card, each way."""

    states: tuple[State, ...]
    card: float


@dataclass(frozen=True)
class StoredShard:
    """A shard, or none, on a machine.

    Attributes:
        bytes: its size; 0 for none.
        network_s: by number of workers, seconds that the network card is busy while every worker makes one step.
        steps_per_s: steps/s of one worker if nothing but itself limits it (asynchronous).
    """

    bytes: float
    network_s: tuple[float, ...]
    steps_per_s: float


@dataclass(frozen=True)
class MachineSetting:
    """A machine with or without the chief, with or without a ps: its possibilities for each number of workers.

    Attributes:
        shards: possible shards on it.
        work_s: one worker's step without transfers; 0 if no worker fits.
    """

    shards: tuple[StoredShard, ...]
    work_s: float

    @functools.cached_property
    def network_s(self) -> Floats:
        """By number of workers, seconds that the card is busy with the best shard."""
        return self._times.min(axis=0)

    @property
    def local_bytes(self) -> float:
        """Size of the first shard; if the setting is exact all are equal."""
        return self.shards[0].bytes

    @functools.cached_property
    def sizes(self) -> Floats:
        """Bytes of the shards, shards x 1."""
        return np.array([held.bytes for held in self.shards], dtype=np.float64)[:, None]

    @functools.cached_property
    def own_rates(self) -> Floats:
        """Steps/s of workers limited only by themselves, shards x numbers of workers; -inf for no room."""
        counts = np.arange(self._times.shape[1])
        rates = np.array([held.steps_per_s for held in self.shards])[:, None] * counts
        return np.where(np.isfinite(self._times), rates, -np.inf)

    def bytes_within(self, network_s: float) -> tuple[Floats, Floats]:
        """By number of workers, maximum and minimum bytes of a shard that keeps the card within the limit."""
        allowed = self._times <= network_s
        return np.where(allowed, self.sizes, -np.inf).max(axis=0), np.where(allowed, self.sizes, np.inf).min(axis=0)

    @functools.cached_property
    def _times(self) -> Floats:
        times = (held.network_s for held in self.shards)
        return np.array([*itertools.zip_longest(*times, fillvalue=math.inf)]).T


IDLE = MachineSetting((StoredShard(0, (0.0,), 0.0),), 0.0)
Settings = dict[tuple[int, ...], MachineSetting]
"""By the numbers of chiefs and of shards of each class."""


@dataclass(frozen=True)
class View:
    """A problem in which the shards of one class are interchangeable.

    Attributes:
        settings: by machine type.
        classes: bytes of the shards of each class, largest first.
        exact: whether the shards of each class are equal, so that this changes nothing.
    """

    settings: tuple[Settings, ...]
    classes: tuple[tuple[float, ...], ...]
    exact: bool

    def stored(self, counts: Sequence[NDArray[np.int64]]) -> tuple[Floats, Floats]:
        """Minimum and maximum bytes of these numbers of shards of each class."""
        least = most = np.zeros(1)
        for sizes, count in zip(self.classes, counts, strict=True):
            least = least + np.array([*itertools.accumulate(reversed(sizes), initial=0.0)])[count]
            most = most + np.array([*itertools.accumulate(sizes, initial=0.0)])[count]
        return least, most


@dataclass(frozen=True)
class RackProblem:
    """One option to place across racks.

    Attributes:
        tree: the machines; the states of their types are as in `placement_problem`.
        shards: bytes on each ps, largest first.
        uplink_bytes_per_s: speed of each rack's uplink, each way.
        cases: as in `PlacementProblem`.
        are_all_cases: as in `PlacementProblem`.
    """

    tree: RackTree[MachineType]
    model: StepModel
    shards: tuple[int, ...]
    workers: int
    needs_chief: bool
    load: float
    uplink_bytes_per_s: float
    cases: tuple[RackProblem, ...] = ()
    are_all_cases: bool = True

    @property
    def shard_types(self) -> tuple[int, ...]:
        """For each shard the index of its size, as in `State.shards`."""
        sizes = sorted(set(self.shards), reverse=True)
        return tuple(sizes.index(size) for size in self.shards)

    @property
    def works(self) -> list[float]:
        """Distinct times of a worker's own work on the machines, ascending."""
        return sorted({state.work_s for here in self.tree.machine_types for state in here.states if state.work_s})

    @functools.cached_property
    def shared(self) -> Shared:
        """Limits that asynchronous workers share."""
        return self.model.shared(self.load, self.uplink_bytes_per_s)

    def round_s(self, cycle_s: float, network_s: float) -> float:
        return self.model.round_s(cycle_s, network_s, self.load, self.workers)


def rack_problem(
    kinds: Sequence[NodeKind],
    model: StepModel,
    sizes: TaskSizes,
    shards: Shards,
    workers: int,
    uplink_bytes_per_s: float,
) -> RackProblem:
    """Lists the states of every rack's machines.

    `kinds`: the machines, each kind in one rack. `uplink_bytes_per_s`: speed of each rack's uplink, each way.
    """
    by_rack: dict[str | None, list[NodeKind]] = {}
    for kind in kinds:
        by_rack.setdefault(kind.rack, []).append(kind)
    in_racks = [(rack, without_cases(members, (model,), sizes, shards, workers)) for rack, members in by_rack.items()]

    def of(problems: Iterable[tuple[str | None, PlacementProblem]]) -> RackProblem:
        return RackProblem(
            _tree(problems),
            model,
            shards.sizes,
            workers,
            sizes.chief is not None,
            model.load(shards),
            uplink_bytes_per_s,
        )

    if model.profile.synchronous:
        return of(in_racks)
    times, are_all = slowest_times(kinds, shards.sizes, shards, MAX_CASES)
    cases = tuple(of((rack, with_slowest(problem, (model,), each)) for rack, problem in in_racks) for each in times)
    return dataclasses.replace(of(in_racks), cases=cases, are_all_cases=are_all)


def _tree(problems: Iterable[tuple[str | None, PlacementProblem]]) -> RackTree[MachineType]:
    machines = []
    for rack, problem in problems:
        for index, kind in enumerate(problem.kinds):
            states = tuple(dataclasses.replace(state, kind=0) for state in problem.states if state.kind == index)
            if states:
                machines.append((rack, MachineType(states, kind.network_bytes_per_s), kind.names))
    return RackTree(machines)


def optimistic_view(problem: RackProblem) -> View:
    """Gives each place the best shard of its class; exact if the classes are few enough."""
    types = problem.shard_types
    states = math.prod(types.count(index) + 1 for index in set(types)) * (problem.workers + 1)
    class_of = types if states <= MAX_STATES or len(set(types)) == 1 else (0,) * len(types)
    of_type = dict(zip(types, class_of, strict=True))
    numbers = range(max(class_of) + 1)
    settings = []
    for possible in problem.tree.machine_types:
        alike: dict[tuple[int, ...], list[State]] = {}
        for state in possible.states:
            held = [of_type[index] for index in state.shards]
            alike.setdefault((int(state.chief), *map(held.count, numbers)), []).append(state)
        here = {key: _setting(some) for key, some in alike.items()}
        settings.append({(0,) * (len(numbers) + 1): IDLE, **here})
    classes = tuple(
        tuple(float(size) for size, other in zip(problem.shards, class_of, strict=True) if other == number)
        for number in numbers
    )
    return View(tuple(settings), classes, exact=class_of == types)


def likely_view(problem: RackProblem) -> View:
    """Gives each ps the shard closest to the mean, where the largest would fit as well."""
    mean = sum(problem.shards) / len(problem.shards)
    types = dict(zip(problem.shard_types, problem.shards, strict=True))
    nearest = min(types, key=lambda index: abs(types[index] - mean))
    settings = []
    for possible in problem.tree.machine_types:
        here: Settings = {(0, 0): IDLE}
        for chief in (False, True):
            loads = {state.shards: state for state in possible.states if state.chief == chief}
            if () in loads:
                here[int(chief), 0] = _setting([loads.pop(())])
            if len(loads) == len(types):
                room = min(len(state.network_s) for state in loads.values())
                like_mean = dataclasses.replace(loads[nearest,], network_s=loads[nearest,].network_s[:room])
                here[int(chief), 1] = _setting([like_mean], mean)
        settings.append(here)
    return View(tuple(settings), ((mean,) * len(problem.shards),), exact=False)


def _setting(states: Sequence[State], size: float | None = None) -> MachineSetting:
    """The best of some states, with shards of `size` bytes if given."""
    shards = tuple(
        StoredShard(state.local_bytes if size is None else size, state.network_s, state.steps_per_s) for state in states
    )
    return MachineSetting(shards, max(state.work_s for state in states))


def uplink_s(problem: RackProblem, view: View, counts: Sequence[NDArray[np.int64]]) -> Floats:
    """Minimum seconds that the uplink of a rack with these tasks is busy while every worker makes one step.

    `counts`: numbers of chiefs, of shards of each class, and of workers.
    """
    total, workers = float(sum(problem.shards)), counts[-1]
    least, most = view.stored(counts[1:-1])
    # Outgoing bytes grow with the bytes in the rack, incoming bytes fall; they are equal at workers / n of all.
    stored = np.clip(workers * (total / problem.workers), least, most)
    busiest = np.maximum(stored * (problem.workers - workers), workers * (total - stored))
    seconds: Floats = 2 * busiest / problem.uplink_bytes_per_s
    return seconds


def network_times(problem: RackProblem, view: View) -> list[float]:
    """All distinct busy times of cards and uplinks, ascending."""
    times = [setting.network_s for here in view.settings for setting in here.values()]
    for rack_type in problem.tree.rack_types:
        room = sum(
            count * (max(len(setting.network_s) for setting in view.settings[index].values()) - 1)
            for index, count in rack_type.machines
        )
        held = sum(count for index, count in rack_type.machines if any(any(key[1:]) for key in view.settings[index]))
        most = [0, *(min(held, len(sizes)) for sizes in view.classes), min(room, problem.workers)]
        times.append(uplink_s(problem, view, np.ix_(*(np.arange(count + 1) for count in most))).ravel())
    found: list[float] = np.unique(np.concatenate(times)).tolist()
    return found[:-1] if found[-1] == math.inf else found


def best_within(
    problem: RackProblem, view: View, work_s: float, network_s: float, value: Value, deadline: float | None
) -> Best | None:
    """The most valuable placement in which nothing takes longer; None if there is none."""
    tables = [_machine_table(problem, settings, work_s, network_s, value) for settings in view.settings]
    total, crossing = float(sum(problem.shards)), network_s * problem.uplink_bytes_per_s / 2

    def in_rack(machines: Table, counts: Sequence[NDArray[np.int64]]) -> Table:
        workers, held = counts[-1], machines
        least, most = view.stored(counts[1:-1])
        if value == "most bytes":
            held = np.minimum(held, np.minimum(most, crossing / np.maximum(problem.workers - workers, MIN_DIVISOR)))
        elif value == "fewest bytes":
            held = np.minimum(held, -np.maximum(least, total - crossing / np.maximum(workers, MIN_DIVISOR)))
        return np.where(uplink_s(problem, view, counts) <= network_s, held, -np.inf)

    goal: Tasks = (int(problem.needs_chief), *map(len, view.classes), problem.workers)
    return problem.tree.best(tables, in_rack, goal, deadline)


def _machine_table(problem: RackProblem, settings: Settings, work_s: float, network_s: float, value: Value) -> Table:
    most = max(len(setting.network_s) for setting in settings.values())
    shape = [max(counts) + 1 for counts in zip(*settings, strict=True)]
    table: Table = np.full((*shape, most), -np.inf)
    for state, setting in settings.items():
        allowed = setting.network_s <= network_s
        if setting.work_s > work_s:
            allowed[1:] = False
        worth = _worth(problem, setting, network_s, value)
        table[state][: len(allowed)] = np.where(allowed, worth, -np.inf)
    return table


def _worth(problem: RackProblem, setting: MachineSetting, network_s: float, value: Value) -> Floats:
    if value in ("most bytes", "fewest bytes"):
        most, fewest = setting.bytes_within(network_s)
        return most if value == "most bytes" else -fewest
    each = setting.local_bytes / problem.shards[0] if value == "local" else 0.0
    return each * np.arange(len(setting.network_s), dtype=np.float64)
