"""Free resources of the machines of a cluster, counted by class.

Machines of one kind with the same free resources are one row of a table, so finding machines with given free resources
compares a few hundred rows, for any number of machines. Rows of one GPU model are adjacent, so that a job examines
those of its own model only.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from solver.nodes import NodeKind
from solver.resources import Amounts

NOTHING: Amounts = (0, 0, 0, 0)
_INITIAL_ROWS = 16
_UNLIMITED = 2**62
_MAX_CPU_MILLIS, _MAX_MEM_MIB = 2**24 - 1, 2**30 - 1
"""Caps for the sort key of machines, in thousandths of a CPU and MiB; both fit one integer with GPUs."""


def plus(one: Amounts, other: Amounts, times: int = 1) -> Amounts:
    """`one + times x other`."""
    return (
        one[0] + times * other[0],
        one[1] + times * other[1],
        one[2] + times * other[2],
        one[3] + times * other[3],
    )


@dataclass
class _Block:
    """Adjacent rows for the machines of one GPU model."""

    start: int
    size: int
    unused: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.unused = list(reversed(range(self.start, self.start + self.size)))


class FreeCapacity:
    """Free resources of every machine.

    Machines are numbered from 0, kind by kind. A row's number refers to another class of machines once its last machine
    has left: do not keep row numbers across `reserve` and `release`.

    Attributes:
        kinds: the machines by their resources when empty.
        anywhere: mask with every kind usable.
    """

    def __init__(self, kinds: Sequence[NodeKind]) -> None:
        self.kinds = tuple(kinds)
        self.anywhere: NDArray[np.bool_] = np.ones(len(kinds), dtype=bool)
        self.names = [name for kind in kinds for name in kind.names]
        self.kind_of = [index for index, kind in enumerate(kinds) for _ in range(kind.count)]
        models = {(kind.gpus > 0, kind.gpu_model): None for kind in kinds}
        numbers = {model: number for number, model in enumerate(models)}
        self._block_of_kind = [numbers[kind.gpus > 0, kind.gpu_model] for kind in kinds]
        self._blocks = [_Block(number * _INITIAL_ROWS, _INITIAL_ROWS) for number in range(len(models))]
        rows = len(models) * _INITIAL_ROWS
        self._free: NDArray[np.int64] = np.zeros((4, rows), dtype=np.int64)
        self._kind: NDArray[np.intp] = np.zeros(rows, dtype=np.intp)
        self._count: NDArray[np.int64] = np.zeros(rows, dtype=np.int64)
        self._fullness: NDArray[np.int64] = np.zeros(rows, dtype=np.int64)
        self._rows: dict[tuple[int, Amounts], int] = {}
        self._keys: list[tuple[int, Amounts]] = [(0, NOTHING)] * rows
        self._members: list[dict[int, None]] = [{} for _ in range(rows)]
        self._row_of: list[int] = []
        self._spans: dict[bytes, list[tuple[int, int, bool]]] = {}
        for machine, index in enumerate(self.kind_of):
            key = index, kinds[index].amounts
            row = self._rows[key] if key in self._rows else self._add_row(key)
            self._members[row][machine] = None
            self._count[row] += 1
            self._row_of.append(row)

    @property
    def counts(self) -> NDArray[np.int64]:
        """Machines in each row; 0 in unused rows."""
        return self._count

    @property
    def row_kinds(self) -> NDArray[np.intp]:
        return self._kind

    def free_on(self, machine: int) -> Amounts:
        return self._keys[self._row_of[machine]][1]

    def machines(self, row: int, count: int, skip: int = 0) -> Iterator[int]:
        """Some machines of a row, always in the same order."""
        return islice(self._members[row], skip, skip + count)

    def classes(self) -> Iterator[tuple[int, Amounts, tuple[int, ...]]]:
        """Kind, free resources and machines of every non-empty class."""
        for (kind, free), members in zip(self._keys, self._members, strict=True):
            if members:
                yield kind, free, tuple(members)

    def holding(self, need: Amounts, usable: NDArray[np.bool_]) -> NDArray[np.intp]:
        """Rows whose machines hold `need`.

        Args:
            need: resources on one machine.
            usable: whether machines of a kind may be used, by kind.
        """
        found = []
        for start, end, every in self._spans_of(usable):
            fits = self._count[start:end] > 0
            if not every:
                fits &= usable[self._kind[start:end]]
            for free, amount in zip(self._free, need, strict=True):
                if amount:
                    fits &= free[start:end] >= amount
            found.append(fits.nonzero()[0] + start)
        if len(found) == 1:
            return found[0]
        return np.concatenate(found) if found else np.zeros(0, dtype=np.intp)

    def fullest_first(self, rows: NDArray[np.intp]) -> list[int]:
        """Sorts rows by free resources of their machines, least first: GPUs, then CPUs, then memory."""
        if len(rows) < 2:
            return rows.tolist()
        return rows[self._fullness[rows].argsort(kind="stable")].tolist()

    def capacity(self, need: Amounts, usable: NDArray[np.bool_], beside: Amounts = NOTHING) -> NDArray[np.int64]:
        """Number of tasks of that size that one machine of each row holds beside `beside`.

        Returns:
            By row; -1 where `beside` itself does not fit, else 0 for machines that are not usable.
        """
        holds = self._count > 0
        for free, amount in zip(self._free, beside, strict=True):
            if amount:
                holds &= free >= amount
        room = np.where(holds, 0, -1)
        for start, end, every in self._spans_of(usable):
            there = holds[start:end] if every else holds[start:end] & usable[self._kind[start:end]]
            most = np.full(end - start, _UNLIMITED)
            for free, amount, taken in zip(self._free, need, beside, strict=True):
                if amount:
                    np.minimum(most, (free[start:end] - taken) // amount, out=most)
            np.copyto(room[start:end], most, where=there)
        return room

    def total(self, usable: NDArray[np.bool_]) -> Amounts:
        """Sum of the free resources on machines of the usable kinds."""
        counted = self._count * usable[self._kind]
        cpus, memory, disk, gpus = (self._free @ counted).tolist()
        return cpus, memory, disk, gpus

    def reserve(self, machine: int, need: Amounts) -> None:
        """Reserves resources on a machine that has them."""
        self._move(machine, need, -1)

    def release(self, machine: int, need: Amounts) -> None:
        self._move(machine, need, 1)

    def _move(self, machine: int, need: Amounts, times: int) -> None:
        """Moves a machine to the row of its new free resources."""
        old = self._row_of[machine]
        kind, free = self._keys[old]
        key = kind, plus(free, need, times)
        new = self._rows.get(key)
        if new is None:
            new = self._add_row(key)
            # Growing a block may have renumbered the old row.
            old = self._row_of[machine]
        elif new == old:
            return
        del self._members[old][machine]
        self._count[old] -= 1
        self._members[new][machine] = None
        self._count[new] += 1
        self._row_of[machine] = new
        if not self._members[old]:
            del self._rows[self._keys[old]]
            self._blocks[self._block_of_kind[kind]].unused.append(old)

    def _add_row(self, key: tuple[int, Amounts]) -> int:
        number = self._block_of_kind[key[0]]
        if not self._blocks[number].unused:
            self._grow(number)
        row = self._blocks[number].unused.pop()
        self._rows[key] = row
        self._keys[row] = key
        self._kind[row] = key[0]
        self._free[:, row] = key[1]
        cpus, memory, _, gpus = key[1]
        self._fullness[row] = gpus << 54 | min(cpus, _MAX_CPU_MILLIS) << 30 | min(memory, _MAX_MEM_MIB)
        return row

    def _grow(self, number: int) -> None:
        """Doubles a block; the rows of the following blocks are renumbered."""
        block = self._blocks[number]
        end, more = block.start + block.size, block.size
        self._free = np.insert(self._free, [end] * more, 0, axis=1)
        self._kind = np.insert(self._kind, [end] * more, 0)
        self._count = np.insert(self._count, [end] * more, 0)
        self._fullness = np.insert(self._fullness, [end] * more, 0)
        self._keys[end:end] = [(0, NOTHING)] * more
        self._members[end:end] = [{} for _ in range(more)]
        self._rows = {key: row + more * (row >= end) for key, row in self._rows.items()}
        self._row_of = [row + more * (row >= end) for row in self._row_of]
        block.unused = list(reversed(range(end, end + more)))
        block.size += more
        for later in self._blocks[number + 1 :]:
            later.start += more
            later.unused = [row + more for row in later.unused]
        self._spans.clear()

    def _spans_of(self, usable: NDArray[np.bool_]) -> list[tuple[int, int, bool]]:
        """First row, end, and whether every kind in between is usable, of each block with usable kinds."""
        key = usable.tobytes()
        if key not in self._spans:
            kinds: list[list[bool]] = [[] for _ in self._blocks]
            for block, use in zip(self._block_of_kind, usable.tolist(), strict=True):
                kinds[block].append(use)
            self._spans[key] = [
                (block.start, block.start + block.size, all(of_block))
                for block, of_block in zip(self._blocks, kinds, strict=True)
                if any(of_block)
            ]
        return self._spans[key]
