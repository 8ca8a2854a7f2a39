"""What is free on the machines of a cluster, counted by class.

Machines of one kind with the same resources free are one row of a table. A question such as 'which machines hold this'
is a comparison of a few hundred rows, however many machines there are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from solver.nodes import NodeKind
from solver.resources import TaskResources

Amounts = tuple[int, int, int, int]
"""Thousandths of a CPU, MiB of memory, MiB of disk, GPUs."""
NOTHING: Amounts = (0, 0, 0, 0)
_FIRST_ROWS = 64
_UNLIMITED = 2**62


def amounts(task: TaskResources) -> Amounts:
    """A task's resources."""
    return task.cpu_millis, task.mem_mb, task.disk_mb, task.gpus


def capacity(kind: NodeKind) -> Amounts:
    """Resources of one empty machine."""
    return kind.cpu_millis, kind.mem_mb, kind.disk_mb, kind.gpus


def plus(one: Amounts, other: Amounts, times: int = 1) -> Amounts:
    """`one + times x other`."""
    return (
        one[0] + times * other[0],
        one[1] + times * other[1],
        one[2] + times * other[2],
        one[3] + times * other[3],
    )


class FreeCapacity:
    """Free resources of every machine.

    Machines are numbered from 0, kind by kind. Rows are numbered too, but a row's number means another class of
    machines once the last machine has left it: keep none across `take` and `give`.

    Attributes:
        kinds: the machines by what they have when empty.
        anywhere: every kind is usable.
        names: name of each machine.
        kind_of: index of each machine's kind.
    """

    def __init__(self, kinds: Sequence[NodeKind]) -> None:
        self.kinds = tuple(kinds)
        self.anywhere: NDArray[np.bool_] = np.ones(len(kinds), dtype=bool)
        self.names = [name for kind in kinds for name in kind.names]
        self.kind_of = [index for index, kind in enumerate(kinds) for _ in range(kind.count)]
        self._free: NDArray[np.int64] = np.zeros((4, _FIRST_ROWS), dtype=np.int64)
        self._kind: NDArray[np.intp] = np.zeros(_FIRST_ROWS, dtype=np.intp)
        self._count: NDArray[np.int64] = np.zeros(_FIRST_ROWS, dtype=np.int64)
        self._rows: dict[tuple[int, Amounts], int] = {}
        self._keys: list[tuple[int, Amounts]] = []
        self._members: list[dict[int, None]] = []
        self._unused: list[int] = []
        self._row_of: list[int] = []
        for machine, index in enumerate(self.kind_of):
            row = self._row((index, capacity(kinds[index])))
            self._members[row][machine] = None
            self._count[row] += 1
            self._row_of.append(row)

    @property
    def counts(self) -> NDArray[np.int64]:
        """Machines in each row."""
        return self._count[: len(self._keys)]

    @property
    def row_kinds(self) -> NDArray[np.intp]:
        """Kind of each row's machines."""
        return self._kind[: len(self._keys)]

    def free_on(self, machine: int) -> Amounts:
        """What is free on one machine."""
        return self._keys[self._row_of[machine]][1]

    def machines(self, row: int, count: int, skip: int = 0) -> Iterator[int]:
        """Some machines of a row, always in the same order."""
        return islice(self._members[row], skip, skip + count)

    def classes(self) -> Iterator[tuple[int, Amounts, tuple[int, ...]]]:
        """Kind, free resources and machines of every class that has any."""
        for (kind, free), members in zip(self._keys, self._members, strict=True):
            if members:
                yield kind, free, tuple(members)

    def holding(self, need: Amounts, usable: NDArray[np.bool_]) -> NDArray[np.intp]:
        """Rows whose machines hold `need`.

        Args:
            need: resources on one machine.
            usable: whether machines of a kind may be taken, by kind.
        """
        rows = len(self._keys)
        fits = (self._count[:rows] > 0) & usable[self._kind[:rows]]
        for free, amount in zip(self._free, need, strict=True):
            if amount:
                fits &= free[:rows] >= amount
        return fits.nonzero()[0]

    def fullest_first(self, rows: NDArray[np.intp]) -> list[int]:
        """Rows in the order of what their machines have left, least first: GPUs, then CPUs, then memory."""
        if len(rows) < 2:
            return rows.tolist()
        cpus, memory, _, gpus = self._free[:, rows]
        return rows[np.lexsort((self._kind[rows], memory, cpus, gpus))].tolist()

    def rooms(self, need: Amounts, usable: NDArray[np.bool_], beside: Amounts = NOTHING) -> NDArray[np.int64]:
        """How many tasks of that size one machine of each row holds beside `beside`.

        Returns:
            By row; -1 where `beside` itself does not fit, else 0 for machines that must not be used.
        """
        rows = len(self._keys)
        left = self._free[:, :rows]
        fits = self._count[:rows] > 0
        if beside != NOTHING:
            left = left - np.array(beside, dtype=np.int64)[:, None]
            fits &= left.min(axis=0) >= 0
        room = np.where(fits, _UNLIMITED, -1)
        for resource, amount in enumerate(need):
            if amount:
                np.minimum(room, left[resource] // amount, out=room, where=fits)
        room[~usable[self._kind[:rows]] & fits] = 0
        return room

    def total(self, usable: NDArray[np.bool_]) -> Amounts:
        """Sum of what is free on machines of the usable kinds."""
        rows = len(self._keys)
        counted = self._count[:rows] * usable[self._kind[:rows]]
        cpus, memory, disk, gpus = (int(value) for value in self._free[:, :rows] @ counted)
        return cpus, memory, disk, gpus

    def take(self, machine: int, need: Amounts) -> None:
        """Reserves resources on a machine that has them."""
        self._move(machine, plus(self.free_on(machine), need, -1))

    def give(self, machine: int, need: Amounts) -> None:
        """Gives reserved resources back."""
        self._move(machine, plus(self.free_on(machine), need))

    def _move(self, machine: int, free: Amounts) -> None:
        old = self._row_of[machine]
        kind = self._keys[old][0]
        new = self._row((kind, free))
        if new == old:
            return
        del self._members[old][machine]
        self._count[old] -= 1
        self._members[new][machine] = None
        self._count[new] += 1
        self._row_of[machine] = new
        if not self._members[old]:
            del self._rows[self._keys[old]]
            self._unused.append(old)

    def _row(self, key: tuple[int, Amounts]) -> int:
        row = self._rows.get(key)
        if row is not None:
            return row
        if self._unused:
            row = self._unused.pop()
            self._keys[row] = key
        else:
            row = len(self._keys)
            if row == len(self._count):
                self._grow()
            self._keys.append(key)
            self._members.append({})
        self._rows[key] = row
        self._kind[row] = key[0]
        self._free[:, row] = key[1]
        return row

    def _grow(self) -> None:
        size = len(self._count)
        self._free = np.concatenate([self._free, np.zeros_like(self._free)], axis=1)
        self._kind = np.concatenate([self._kind, np.zeros(size, dtype=np.intp)])
        self._count = np.concatenate([self._count, np.zeros(size, dtype=np.int64)])
