"""Distributes variables over parameter servers.

The ps with most bytes determines the time of a step's network and update; each variable on a ps is one more request per
worker and step, to pull and to push it. There are three methods:

`optimus`
    The parameter assignment algorithm of Optimus (EuroSys 2018, section 5.3), which balances both. The variables are
    sorted by size, largest first. One above the average load (all bytes over all ps) is split. One below 1% of the
    average goes to the ps with fewest requests. Any other is a best fit: it goes to the ps whose remaining capacity
    (the average less its bytes) is the smallest that still holds it, and if none does to the ps with least bytes.
    Cases that the paper leaves open:

    * Split, as in the authors' program: a variable fills the emptiest ps up to the average, then the next; its last
      part is a best fit. Bytes are whole, so a part may end within an element, and the average is rounded up on just
      enough ps that there is room for every part.
    * Whole: a variable above the average goes to an empty ps, and the average becomes that of the other variables over
      the other ps. By the average of all, best fit would fill some of these and leave others empty.
    * Ties: of equally large variables the first by name; of ps with equally few requests the one with least bytes,
      then the first.

`greedy`
    Largest first, each to the ps with least bytes ('longest processing time first', Graham 1969): the largest shard is
    at most 4/3 - 1/(3 ps) times the least possible.

`round_robin`
    In rotation over the ps, in the order of the profile. TensorFlow's `ParameterServerStrategy` and
    `replica_device_setter` do so in the order of creation; profiles that Dike reads list the largest first. (MXNet
    instead splits arrays of 10^6 elements and more evenly over all ps and hashes the keys of the others.)
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from typing import get_args

from dike.exceptions import BadInputError
from dike.profile import ModelProfile, VariableSpec
from solver.choices import Sharding

DEFAULT_SHARDING: Sharding = "greedy"
MIN_SHRINKAGE = 0.01
"""Minimum reduction of the largest shard, as a share, for which a further ps is useful."""
SMALL_VARIABLE_DIVISOR = 100
"""A variable is small for `optimus` below the average load divided by this."""


@dataclass(frozen=True)
class Shards:
    """Variables distributed over parameter servers.

    Attributes:
        sizes: bytes on each ps, largest first.
        variables: variable -> index of the ps with all of it.
        parts: split variable -> ps index -> bytes of it there.
    """

    sizes: tuple[int, ...]
    variables: dict[str, int]
    parts: Mapping[str, Mapping[int, int]] = field(default_factory=dict)

    @property
    def total(self) -> int:
        return sum(self.sizes)

    @cached_property
    def requests(self) -> tuple[int, ...]:
        """Requests per worker and step to each ps: variables, and parts of some, on it; one if only sizes are known."""
        if not self.variables and not self.parts:
            return (1,) * len(self.sizes)
        counts = Counter([*self.variables.values(), *chain.from_iterable(self.parts.values())])
        return tuple(counts[index] for index in range(len(self.sizes)))

    @property
    def byte_imbalance(self) -> float:
        """Largest over mean bytes of a ps; 1 if all are equal."""
        return _imbalance(self.sizes)

    @property
    def request_imbalance(self) -> float:
        """Largest over mean requests of a ps; 1 if all are equal."""
        return _imbalance(self.requests)


_Part = tuple[VariableSpec, int, int]
"""A variable, a ps and the bytes of the variable there."""


def shard(profile: ModelProfile, ps_count: int, method: Sharding = DEFAULT_SHARDING, *, split: bool = False) -> Shards:
    """Distributes the variables.

    Args:
        profile: the model; without variables all its bytes are one shard.
        ps_count: number of parameter servers; at most the number of variables unless they are split.
        method: see the module.
        split: let `optimus` split variables. No plan does: Keras 3 cannot train split ones.

    Raises:
        BadInputError: if the method is unknown or cannot split, or there are too few or too many ps.
    """
    _check(profile, ps_count, method, split)
    if not profile.variables:
        return Shards((profile.parameter_bytes,), {})
    if method == "optimus":
        distributed = _optimus(profile.variables, ps_count, split)
    elif method == "greedy":
        distributed = _greedy(profile.variables, ps_count)
    else:
        distributed = _round_robin(profile.variables, ps_count)
    return _shards(distributed, ps_count)


def useful_ps_count(profile: ModelProfile, limit: int, method: Sharding = DEFAULT_SHARDING) -> int:
    """Largest number of parameter servers, up to `limit`, whose largest shard is smaller than that of all lower
    numbers.

    Smaller means by at least the share `MIN_SHRINKAGE`; once the largest variable is the largest shard there is none.

    Raises:
        BadInputError: if the method is unknown.
    """
    largest_variable = max((variable.size_bytes for variable in profile.variables), default=profile.parameter_bytes)
    total = smallest = shard(profile, 1, method).total
    best = 1
    for count in range(2, min(limit, len(profile.variables)) + 1):
        wanted = int(smallest * (1 - MIN_SHRINKAGE))
        if wanted < largest_variable:
            break
        # The largest shard is no smaller than the mean.
        if wanted * count >= total and (largest := shard(profile, count, method).sizes[0]) <= wanted:
            best, smallest = count, largest
    return best


def _check(profile: ModelProfile, ps_count: int, method: str, split: bool) -> None:
    known = get_args(Sharding)
    if method not in known:
        raise BadInputError(f"'{method}' is not a sharding method; use {', '.join(known[:-1])} or {known[-1]}.")
    if split and method != "optimus":
        raise BadInputError(f"'{method}' cannot split variables; use optimus.")
    if ps_count < 1:
        raise BadInputError(f"The number of parameter servers is {ps_count}; it must be at least 1.")
    most = max(1, profile.variable_bytes if split else len(profile.variables))
    if ps_count > most:
        what = "bytes to split" if split else "variables to distribute"
        raise BadInputError(f"{ps_count} parameter servers are too many for '{profile.name}'; its {what} allow {most}.")


def _optimus(variables: Iterable[VariableSpec], ps_count: int, split: bool) -> Iterator[_Part]:
    ordered = _largest_first(variables)
    total, sharing = _to_share([variable.size_bytes for variable in ordered], ps_count, split)
    average, rest = divmod(total, sharing)
    room = _Room([average + (ps < rest) for ps in range(ps_count)])
    not_small = sum(variable.size_bytes * SMALL_VARIABLE_DIVISOR * sharing >= total for variable in ordered)
    requests, held = [0] * ps_count, [0] * ps_count
    for variable in ordered[:not_small]:
        for ps, size in room.fill(variable.size_bytes, split=split and variable.size_bytes > average):
            requests[ps] += 1
            held[ps] += size
            yield variable, ps, size
    least = list(zip(requests, held, range(ps_count), strict=True))
    heapq.heapify(least)
    for variable in ordered[not_small:]:
        count, load, ps = least[0]
        heapq.heapreplace(least, (count + 1, load + variable.size_bytes, ps))
        yield variable, ps, variable.size_bytes


def _to_share(sizes: Sequence[int], ps_count: int, split: bool) -> tuple[int, int]:
    """Bytes to balance and number of ps: all, or the rest beside whole variables above its average."""
    total = sum(sizes)
    if not split:
        for size in sizes[: ps_count - 1]:
            if size * ps_count <= total:
                break
            total -= size
            ps_count -= 1
    return total, ps_count


class _Room:
    """Remaining bytes of each ps up to its share; negative above it."""

    def __init__(self, capacities: Sequence[int]) -> None:
        self._free = sorted((capacity, ps) for ps, capacity in enumerate(capacities))

    def fill(self, size: int, *, split: bool) -> Iterator[tuple[int, int]]:
        """Uses the smallest room that holds `size` or, if none does, the largest.

        If `split`, it fills the room and continues with the rest; there must be room for all of it.

        Yields:
            A ps and its bytes.
        """
        while True:
            free, ps = self._free.pop(bisect_left(self._free, (min(size, self._free[-1][0]), -1)))
            taken = min(size, free) if split else size
            insort(self._free, (free - taken, ps))
            yield ps, taken
            size -= taken
            if not size:
                return


def _greedy(variables: Iterable[VariableSpec], ps_count: int) -> Iterator[_Part]:
    loads = [(0, ps) for ps in range(ps_count)]
    for variable in _largest_first(variables):
        load, ps = loads[0]
        heapq.heapreplace(loads, (load + variable.size_bytes, ps))
        yield variable, ps, variable.size_bytes


def _round_robin(variables: Iterable[VariableSpec], ps_count: int) -> Iterator[_Part]:
    for index, variable in enumerate(variables):
        yield variable, index % ps_count, variable.size_bytes


def _largest_first(variables: Iterable[VariableSpec]) -> list[VariableSpec]:
    return sorted(variables, key=lambda variable: (-variable.size_bytes, variable.name))


def _shards(distributed: Iterable[_Part], ps_count: int) -> Shards:
    """Numbers the parameter servers by size, largest first."""
    held = [0] * ps_count
    variables: dict[str, int] = {}
    parts: dict[str, dict[int, int]] = {}
    for variable, ps, size in distributed:
        held[ps] += size
        if size == variable.size_bytes:
            variables[variable.name] = ps
        else:
            parts.setdefault(variable.name, {})[ps] = size
    by_size = sorted(range(ps_count), key=lambda ps: (-held[ps], ps))
    rank = {ps: position for position, ps in enumerate(by_size)}
    return Shards(
        tuple(held[ps] for ps in by_size),
        {name: rank[ps] for name, ps in variables.items()},
        {name: {rank[ps]: size for ps, size in sizes.items()} for name, sizes in parts.items()},
    )


def _imbalance(loads: Sequence[int]) -> float:
    total = sum(loads)
    return max(loads) * len(loads) / total if total else 1.0
