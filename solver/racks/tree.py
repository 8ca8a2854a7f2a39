"""Machines in racks, as the two-level tree over which the (max,+) tables of `solver.racks.max_plus` are combined."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from solver.racks.max_plus import Frame, Part, State, Table, plus, table_capacity, times, trace

Key = TypeVar("Key", bound=Hashable)

RackValue = Callable[[Table, Sequence[NDArray[np.int64]]], Table]
"""Computes a rack's values from those of its machines and the number of tasks of each kind on them."""


@dataclass(frozen=True)
class RackType:
    """Identical racks.

    Attributes:
        machines: (machine type, number of machines) of each rack.
        racks: for each rack, for each entry of `machines`, the machines' names.
    """

    machines: tuple[tuple[int, int], ...]
    racks: tuple[tuple[tuple[str, ...], ...], ...]


@dataclass(frozen=True)
class Load:
    """Tasks of one machine."""

    node: str
    machine_type: int
    rack: int
    state: State


@dataclass(frozen=True)
class Best:
    """The best value of the goal.

    Attributes:
        racks: the union of all racks.
        inside: by rack type, the union of a rack's machines.
    """

    value: float
    racks: Part
    inside: tuple[Part, ...]
    goal: State


class RackTree(Generic[Key]):
    """Machines by type, in racks by type.

    Args:
        machines: (rack, key of identical machines, names); racks and machines in any order.
    """

    def __init__(self, machines: Iterable[tuple[Hashable, Key, Sequence[str]]]) -> None:
        types: dict[Key, int] = {}
        racks: dict[Hashable, dict[int, list[str]]] = {}
        for rack, key, names in machines:
            machine_type = types.setdefault(key, len(types))
            racks.setdefault(rack, {}).setdefault(machine_type, []).extend(names)
        alike: dict[tuple[tuple[int, int], ...], list[tuple[tuple[str, ...], ...]]] = {}
        for held in racks.values():
            entries = sorted(held.items())
            content = tuple((machine_type, len(names)) for machine_type, names in entries)
            alike.setdefault(content, []).append(tuple(tuple(names) for _, names in entries))
        self.machine_types: tuple[Key, ...] = tuple(types)
        self.rack_types = tuple(RackType(content, tuple(names)) for content, names in alike.items())

    def best(
        self, tables: Sequence[Table], rack_value: RackValue, goal: State, deadline: float | None = None
    ) -> Best | None:
        """The greatest value of the goal on all machines; None if it is impossible.

        `tables`: by machine type, the values of its states from no tasks on. `rack_value`: computes a rack's values
        from those of its machines; must be non-decreasing in these.
        """
        nothing = (0,) * len(goal)
        frame = self._frame(tables, goal, deadline)
        inside = []
        for rack_type in self.rack_types:
            leaves = [(frame.leaf(index, tables[index], nothing), count) for index, count in rack_type.machines]
            machines = [(leaf, count) for leaf, count in leaves if leaf is not None]
            part = frame.union(machines) if len(machines) == len(leaves) else None
            if part is None:
                return None
            inside.append(part)
        values = [_with_rack(part, rack_value) for part in inside]
        if not all(np.isfinite(table).any() for table in values):
            return None
        capacity = nothing
        for part, table, rack_type in zip(inside, values, self.rack_types, strict=True):
            capacity = plus(capacity, times(table_capacity(table, part.low), len(rack_type.racks)))
        outer = Frame(goal, capacity, deadline)
        racks = []
        for index, (part, table, rack_type) in enumerate(zip(inside, values, self.rack_types, strict=True)):
            leaf = outer.leaf(index, table, part.low)
            if leaf is None:
                return None
            racks.append((leaf, len(rack_type.racks)))
        everything = outer.union(racks)
        value = -np.inf if everything is None else everything.value(goal)
        if everything is None or value == -np.inf:
            return None
        return Best(value, everything, tuple(inside), goal)

    def loads(self, best: Best) -> tuple[Load, ...]:
        """The machines in use in a placement of that value, rack by rack."""
        racks: list[tuple[int, State]] = []
        trace(best.racks, best.goal, lambda index, state: racks.append((index, state)))
        # Full racks first, so that the names do not depend on how the tables were combined.
        racks.sort(key=lambda found: (found[0], tuple(-count for count in found[1])))
        taken = [0] * len(self.rack_types)
        loads: list[Load] = []
        for number, (index, state) in enumerate(racks):
            names = self.rack_types[index].racks[taken[index]]
            taken[index] += 1
            loads += self._loads_in(best.inside[index], state, number, self.rack_types[index], names)
        return tuple(loads)

    def _loads_in(
        self, part: Part, state: State, rack: int, rack_type: RackType, names: Sequence[Sequence[str]]
    ) -> list[Load]:
        free = {index: iter(here) for (index, _), here in zip(rack_type.machines, names, strict=True)}
        machines: list[tuple[int, State]] = []
        trace(part, state, lambda index, held: machines.append((index, held)))
        machines.sort(key=lambda found: (found[0], tuple(-count for count in found[1])))
        return [Load(next(free[index]), index, rack, held) for index, held in machines if any(held)]

    def _frame(self, tables: Sequence[Table], goal: State, deadline: float | None) -> Frame:
        nothing = (0,) * len(goal)
        capacity = nothing
        for rack_type in self.rack_types:
            for index, count in rack_type.machines:
                capacity = plus(capacity, times(table_capacity(tables[index], nothing), count * len(rack_type.racks)))
        return Frame(goal, capacity, deadline)


def _with_rack(part: Part, rack_value: RackValue) -> Table:
    counts = (np.arange(size) + low for low, size in zip(part.low, part.table.shape, strict=True))
    return rack_value(part.table, np.ix_(*counts))
