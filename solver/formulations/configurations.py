"""Configurations of machines, and the program that counts machines in each.

A configuration is the load of a machine besides workers: a multiset of shards, and the chief or not. Machines on which
the same configurations leave the same room form a class. With classes c, configurations g of them, integers y_g
(machines in that configuration) and w_g (workers on all of these together):

    maximise    sum_g value_g w_g
    subject to  sum_{g of class c} y_g         <= machines of class c      for every class        Eq. 2
                sum_g (shards of type t in g) y_g = shards of type t       for every type         Eq. 6
                sum_{g with the chief} y_g      = 1                        if there is one
                sum_g w_g                       = n                                               Eq. 5
                fewest_g y_g <= w_g <= most_g y_g                          for every g

It is exact: any placement gives such counts; conversely, spreading the workers w_g evenly gives each machine between
fewest_g and most_g, and the objective does not depend on which machine gets them. This is the pattern formulation of
cutting-stock problems (Gilmore and Gomory, 1961). Its size depends on the configurations, not on the machines.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from solver import milp
from solver.formulations import programs
from solver.formulations.instance import Instance
from solver.formulations.programs import ShardGroup
from solver.nodes import NodeKind
from solver.placement.naming import Assignment

MAX_CONFIGURATIONS = 20_000
"""Maximum configurations of a small program."""
TOO_MANY = f"machines can hold the shards in more than {MAX_CONFIGURATIONS:,} ways"

Load = tuple[tuple[int, ...], bool, int]
"""Shard types on a machine, whether the chief is on it, and maximum workers beside them."""


@dataclass(frozen=True)
class Configuration:
    """Load of a machine of one class besides workers.

    Attributes:
        machines: index of the class.
        shards: indices of the shard types, ascending, one for each ps.
        most: maximum workers that fit beside these.
        stored_bytes: size of the shards.
    """

    machines: int
    shards: tuple[int, ...]
    chief: bool
    most: int
    stored_bytes: int


@dataclass(frozen=True)
class MachineClass:
    """Machines with the same configurations.

    Attributes:
        network_bytes_per_s: speed of a network card; of any of them if speeds do not matter.
    """

    names: tuple[str, ...]
    network_bytes_per_s: float


@dataclass(frozen=True)
class Configurations:
    """All possible loads of the machines of an instance.

    Attributes:
        entries: the configurations, class by class.
    """

    instance: Instance
    types: tuple[ShardGroup, ...]
    classes: tuple[MachineClass, ...]
    entries: tuple[Configuration, ...]

    @classmethod
    def of(cls, instance: Instance, *, by_card: bool = False) -> Configurations | None:
        """Lists the configurations; None if there are more than `MAX_CONFIGURATIONS`."""
        types = programs.shard_types(instance)
        merged: dict[tuple[tuple[Load, ...], float], list[NodeKind]] = {}
        count = 0
        for kind in instance.kinds:
            loads = _loads(instance, kind, types)
            if loads is None:
                return None
            members = merged.setdefault((loads, kind.network_bytes_per_s if by_card else 0.0), [])
            count += 0 if members else len(loads)
            members.append(kind)
            if count > MAX_CONFIGURATIONS:
                return None
        return cls(
            instance,
            types,
            tuple(
                MachineClass(tuple(name for kind in members for name in kind.names), members[0].network_bytes_per_s)
                for members in merged.values()
            ),
            tuple(
                Configuration(index, shards, chief, most, sum(types[shard].size_bytes for shard in shards))
                for index, (loads, _) in enumerate(merged)
                for shards, chief, most in loads
            ),
        )

    def solve(
        self,
        value: Callable[[Configuration], float],
        limits: Sequence[tuple[int, int] | None],
        deadline: float | None,
    ) -> tuple[Assignment | None, milp.MilpResult]:
        """Solves the program.

        Args:
            value: value of a worker in a configuration.
            limits: minimum and maximum workers on a machine in each configuration; None if it is not allowed.
            deadline: on `time.monotonic`'s clock; None for none.

        Returns:
            The placement, or None if it is proven that there is none, and the solver's result.
        """
        allowed = [(entry, *limit) for entry, limit in zip(self.entries, limits, strict=True) if limit is not None]
        builder = milp.MilpBuilder()
        machines = [builder.integer(self._most_machines(entry)) for entry, _, _ in allowed]
        workers = [
            builder.integer(min(self.instance.workers, most * self._most_machines(entry)), value(entry))
            for entry, _, most in allowed
        ]
        for (_, fewest, most), some, near in zip(allowed, machines, workers, strict=True):
            builder.row({near: 1.0, some: -float(most)}, upper=0.0)
            if fewest:
                builder.row({near: 1.0, some: -float(fewest)}, lower=0.0)
        by_class: dict[int, list[int]] = {}
        by_type: list[dict[int, float]] = [{} for _ in self.types]
        for (entry, _, _), some in zip(allowed, machines, strict=True):
            by_class.setdefault(entry.machines, []).append(some)
            for shard in entry.shards:
                by_type[shard][some] = by_type[shard].get(some, 0.0) + 1.0
        for index, here in by_class.items():
            builder.row(dict.fromkeys(here, 1.0), upper=len(self.classes[index].names))
        for shard_type, held in zip(self.types, by_type, strict=True):
            builder.row(held, lower=len(shard_type.members), upper=len(shard_type.members))
        builder.equation(workers, self.instance.workers)
        if self.instance.chief is not None:
            builder.equation([some for (entry, _, _), some in zip(allowed, machines, strict=True) if entry.chief], 1)
        result = programs.run(builder.build(), deadline)
        if result.values is None:
            return None, result
        counts = [
            (entry, result.values[some], result.values[near])
            for (entry, _, _), some, near in zip(allowed, machines, workers, strict=True)
        ]
        return self._assignment(counts), result

    def _most_machines(self, entry: Configuration) -> int:
        by_shards = (len(self.types[shard].members) // entry.shards.count(shard) for shard in set(entry.shards))
        return min([len(self.classes[entry.machines].names), *by_shards, *([1] if entry.chief else [])])

    def _assignment(self, counts: Sequence[tuple[Configuration, int, int]]) -> Assignment:
        free = [iter(alike.names) for alike in self.classes]
        waiting = [iter(shard.members) for shard in self.types]
        ps: dict[int, str] = {}
        workers: list[str] = []
        chief: str | None = None
        for entry, machines, near in counts:
            for index in range(machines):
                node = next(free[entry.machines])
                ps.update((next(waiting[shard]), node) for shard in entry.shards)
                workers += [node] * (near // machines + (index < near % machines))
                chief = node if entry.chief else chief
        return Assignment(tuple(node for _, node in sorted(ps.items())), tuple(workers), chief)


def _loads(instance: Instance, kind: NodeKind, types: Sequence[ShardGroup]) -> tuple[Load, ...] | None:
    found: list[Load] = []
    for load in _multisets(instance, kind, types):
        tasks = [types[shard].task for shard in load]
        found.append((load, False, programs.room(instance, kind, tasks)))
        if instance.chief is not None and (most := programs.room(instance, kind, [*tasks, instance.chief])) >= 0:
            found.append((load, True, most))
        if len(found) > MAX_CONFIGURATIONS:
            return None
    return tuple(found)


def _multisets(instance: Instance, kind: NodeKind, types: Sequence[ShardGroup]) -> Iterator[tuple[int, ...]]:
    """Shard types that fit on such a machine together, ascending."""
    pending: list[tuple[int, ...]] = [()]
    while pending:
        load = pending.pop()
        yield load
        if len(load) == instance.ps_per_node:
            continue
        for shard in range(load[-1] if load else 0, len(types)):
            more = (*load, shard)
            fits = kind.room_for(instance.worker, [types[index].task for index in more]) >= 0
            if fits and more.count(shard) <= len(types[shard].members):
                pending.append(more)
