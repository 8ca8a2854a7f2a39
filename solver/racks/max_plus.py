"""The (max,+) dynamic program over sets of machines: the best value of any set with given numbers of tasks on it.

A state is the numbers of chiefs, parameter servers and workers on a set of machines; a table has the greatest value of
each, -inf if it is impossible. Tables of disjoint sets combine to that of the union by (max,+) convolution:

    union[x] = max over y of first[y] + second[x - y]

which is exact for every objective that is a sum over machines, or over the nodes of a tree of machines. Three things
keep it small:

* Identical sets share one table: k of them take about 2 log2 k convolutions (doubling).
* Of a set with capacity u for the goal g, where all sets together have capacity U, only max(0, g - (U - u)) to min(g,
  u) matter.
* For fixed numbers of chiefs and parameter servers the value as a function of the workers is split into concave runs,
  each a few straight pieces; convolving with a straight piece of length L is a sliding maximum, log2 L steps of one
  array operation instead of L. One run per worker, the worst case, is the plain convolution.
"""

from __future__ import annotations

import functools
import heapq
import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from solver.placement.fastest import OutOfTimeError

Table = NDArray[np.float64]
"""Greatest value by state; -inf if impossible."""

ROUNDING = 1e-9
"""Slopes that differ by less than this share of the steepest are equal."""


State = tuple[int, ...]
"""Tasks on a set of machines, by kind of task; the last kind, workers, has the most tasks."""


def plus(first: State, second: State) -> State:
    return tuple(a + b for a, b in zip(first, second, strict=True))


def minus(first: State, second: State) -> State:
    return tuple(a - b for a, b in zip(first, second, strict=True))


def times(state: State, factor: int) -> State:
    return tuple(factor * count for count in state)


@dataclass(frozen=True)
class Run:
    """A concave segment of one row of a table.

    Attributes:
        pieces: (slope, length) of its straight pieces, steepest first.
    """

    first: State
    value: float
    pieces: tuple[tuple[float, int], ...]

    @property
    def length(self) -> int:
        return sum(length for _, length in self.pieces)


@dataclass(frozen=True)
class Part:
    """A set of machines.

    Attributes:
        low: the state at the table's origin.
        capacity: maximum number of each task.
        leaf: the caller's index; None for a union.
        halves: the two sets of a union; None for a leaf.
    """

    table: Table
    low: State
    capacity: State
    leaf: int | None = None
    halves: tuple[Part, Part] | None = None

    @property
    def high(self) -> State:
        return tuple(low + size - 1 for low, size in zip(self.low, self.table.shape, strict=True))

    def value(self, state: State) -> float:
        """The greatest value in a state; -inf if it is impossible or irrelevant."""
        index = minus(state, self.low)
        if any(i < 0 or i >= size for i, size in zip(index, self.table.shape, strict=True)):
            return -np.inf
        return float(self.table[index])

    @functools.cached_property
    def runs(self) -> tuple[Run, ...]:
        found: list[Run] = []
        for row in np.ndindex(self.table.shape[:-1]):
            found += _runs(self.table[row], plus(self.low, (*row, 0)))
        return tuple(found)


@dataclass(frozen=True)
class Frame:
    """Goal of all machines together, and the deadline.

    Attributes:
        capacity: maximum number of each on all machines together.
    """

    goal: State
    capacity: State
    deadline: float | None = None

    def window(self, capacity: State) -> tuple[State, State] | None:
        """Minimum and maximum tasks on a set of that capacity; None if the goal is out of reach."""
        rest = minus(self.capacity, capacity)
        low = tuple(max(0, goal - other) for goal, other in zip(self.goal, rest, strict=True))
        high = tuple(map(min, self.goal, capacity))
        return None if any(least > most for least, most in zip(low, high, strict=True)) else (low, high)

    def leaf(self, index: int, table: Table, low: State) -> Part | None:
        """A set with a known table; None if the goal is out of reach."""
        capacity = table_capacity(table, low)
        window = self.window(capacity)
        if window is None:
            return None
        first = tuple(map(max, window[0], low))
        return Part(table[_box(first, window[1], low)], first, capacity, leaf=index)

    def union(self, parts: Sequence[tuple[Part, int]]) -> Part | None:
        """The union of disjoint sets, each with the number of such sets; None if the goal is out of reach."""
        queue: list[tuple[int, int, Part]] = []
        for order, (part, count) in enumerate(parts):
            many = self._repeated(part, count)
            if many is None:
                return None
            heapq.heappush(queue, (many.table.size, order, many))
        order = len(queue)
        while len(queue) > 1:
            first, second = heapq.heappop(queue)[2], heapq.heappop(queue)[2]
            both = self._pair(first, second)
            if both is None:
                return None
            order += 1
            heapq.heappush(queue, (both.table.size, order, both))
        return queue[0][2]

    def _repeated(self, part: Part, count: int) -> Part | None:
        if count == 1:
            return part
        half = self._repeated(part, count // 2)
        both = None if half is None else self._pair(half, half)
        return both if both is None or count % 2 == 0 else self._pair(both, part)

    def _pair(self, first: Part, second: Part) -> Part | None:
        capacity = plus(first.capacity, second.capacity)
        window = self.window(capacity)
        if window is None:
            return None
        low, high = window
        table = np.full([most - least + 1 for least, most in zip(low, high, strict=True)], -np.inf)
        if len(first.runs) * second.table.size < len(second.runs) * first.table.size:
            first, second = second, first
        for run in second.runs:
            if self.deadline is not None and time.monotonic() > self.deadline:
                raise OutOfTimeError
            _convolve(table, low, first, run)
        if not np.isfinite(table).any():
            return None
        return Part(table, low, capacity, halves=(first, second))


def table_capacity(table: Table, low: State) -> State:
    """Maximum of each task in any possible state of a table whose origin is `low`."""
    possible = np.isfinite(table)
    axes = range(table.ndim)
    most = (possible.any(axis=tuple(other for other in axes if other != axis)) for axis in axes)
    return plus(tuple(int(np.flatnonzero(counts)[-1]) for counts in most), low)


def trace(part: Part, state: State, visit: Callable[[int, State], None]) -> None:
    """Finds a best distribution of a state's tasks over the leaves.

    Args:
        part: the union.
        state: a possible state of it.
        visit: called once for each set of the union, with the leaf's index and its state.
    """
    pending = [(part, state)]
    while pending:
        part, state = pending.pop()
        if part.halves is None:
            assert part.leaf is not None
            visit(part.leaf, state)
            continue
        first, second = part.halves
        here = _best_split(first, second, state)
        pending += [(first, here), (second, minus(state, here))]


def _best_split(first: Part, second: Part, state: State) -> State:
    """The part of the state on `first` for which both together have the greatest value."""
    low = tuple(map(max, first.low, minus(state, second.high)))
    high = tuple(map(min, first.high, minus(state, second.low)))
    ours, theirs = _box(low, high, first.low), _box(minus(state, high), minus(state, low), second.low)
    values = first.table[ours] + np.flip(second.table[theirs])
    return plus(tuple(map(int, np.unravel_index(int(values.argmax()), values.shape))), low)


def _runs(row: NDArray[np.float64], origin: State) -> list[Run]:
    """Concave runs of one row, neighbours sharing their end."""
    possible = np.flatnonzero(np.isfinite(row))
    if not len(possible):
        return []
    found = []
    for stretch in np.split(possible, np.flatnonzero(np.diff(possible) > 1) + 1):
        first, last = int(stretch[0]), int(stretch[-1])
        slopes = np.diff(row[first : last + 1])
        turns = np.diff(slopes)
        tolerance = ROUNDING * max(1e-300, float(np.abs(slopes).max(initial=0.0)))
        begin = first
        pieces: list[tuple[float, int]] = []
        points = [0, *(np.flatnonzero(np.abs(turns) > tolerance) + 1).tolist(), last - first]
        for start, end in itertools.pairwise(points):
            if start and turns[start - 1] > tolerance:
                found.append(Run((*origin[:-1], origin[-1] + begin), float(row[begin]), tuple(pieces)))
                begin, pieces = first + start, []
            if end > start:
                pieces.append((float(row[first + end] - row[first + start]) / (end - start), end - start))
        found.append(Run((*origin[:-1], origin[-1] + begin), float(row[begin]), tuple(pieces)))
    return found


def _convolve(table: Table, low: State, part: Part, run: Run) -> None:
    """Raises the table, whose origin is `low`, to the values of the part with one run of its partner."""
    high = tuple(least + size - 1 for least, size in zip(low, table.shape, strict=True))
    first = tuple(map(max, part.low, minus(low, run.first)))
    last = tuple(map(min, part.high, minus(high, run.first)))
    # Workers may still be added along the run.
    start = max(part.low[-1], low[-1] - run.first[-1] - run.length)
    end = min(part.high[-1] + run.length, high[-1] - run.first[-1])
    if start > end or any(least > most for least, most in zip(first[:-1], last[:-1], strict=True)):
        return
    source = part.table[_box((*first[:-1], start), (*last[:-1], end), part.low)]
    values = np.full((*source.shape[:-1], end - start + 1), -np.inf)
    np.add(source, run.value, out=values[..., : source.shape[-1]])
    for slope, length in run.pieces:
        _slide(values, slope, length)
    begin = max(start, low[-1] - run.first[-1])
    target = table[_box((*first[:-1], begin), (*last[:-1], end), minus(low, run.first))]
    np.maximum(target, values[..., begin - start :], out=target)


def _box(first: State, last: State, origin: State) -> tuple[slice, ...]:
    """Indices of the states from `first` to `last` in a table with that origin."""
    return tuple(slice(a - o, b - o + 1) for a, b, o in zip(first, last, origin, strict=True))


def _slide(values: Table, slope: float, length: int) -> None:
    """Replaces values[x] by the maximum over 0 <= t <= length of values[x - t] + slope t."""
    covered = 0
    while covered < length:
        step = min(covered + 1, length - covered)
        if step >= values.shape[-1]:
            return
        shifted = values[..., :-step] + slope * step
        np.maximum(values[..., step:], shifted, out=values[..., step:])
        covered += step
