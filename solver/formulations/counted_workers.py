"""Eq. 2, 5 and 6 of the paper 'Dike' with workers counted on each machine instead of named, as they are identical.

    sum_j R_jr P_ij + W_r n_i <= B_ir      for every machine i and resource r      Eq. 2
    sum_i P_ij = 1                         for every ps j                          Eq. 6
    sum_i n_i = n                                                                  Eq. 5

P_ij is 0 or 1, n_i whole. If a machine may have at most one ps, parameter servers of one type share their variables,
and their number replaces the 1 in Eq. 6.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from solver import milp
from solver.formulations import programs
from solver.formulations.instance import Instance
from solver.formulations.programs import ShardGroup
from solver.placement.naming import Assignment


@dataclass(frozen=True)
class CountedWorkers:
    """A program with these variables and rows, to be extended.

    Attributes:
        types: parameter servers that share variables.
        ps: for each type, machine -> P_ij.
        beside: for each type, machine -> workers that fit beside such a ps; -1 where it does not fit.
        workers: machine -> n_i.
        room: machine -> workers that fit.
        chief: machine -> whether the separate chief is there; empty without one.
    """

    builder: milp.MilpBuilder
    types: tuple[ShardGroup, ...]
    ps: tuple[dict[str, int], ...]
    beside: tuple[dict[str, int], ...]
    workers: dict[str, int]
    room: dict[str, int]
    chief: dict[str, int]

    @classmethod
    def of(cls, instance: Instance) -> CountedWorkers:
        builder = milp.MilpBuilder()
        types = binary_types(instance)
        room = programs.capacity(instance)
        beside = tuple(programs.capacity(instance, [shard.task]) for shard in types)
        ps = tuple({name: builder.integer(int(count >= 0)) for name, count in fits.items()} for fits in beside)
        workers = {name: builder.integer(count) for name, count in room.items()}
        chief = {} if instance.chief is None else {name: builder.integer(1) for name in room}
        for shard, here in zip(types, ps, strict=True):
            builder.equation(list(here.values()), len(shard.members))
        builder.equation(list(workers.values()), instance.workers)
        if chief:
            builder.equation(list(chief.values()), 1)
        for name, kind in programs.nodes(instance):
            tasks = [([here[name]], shard.task) for shard, here in zip(types, ps, strict=True)]
            tasks.append(([workers[name]], instance.worker))
            if instance.chief is not None:
                tasks.append(([chief[name]], instance.chief))
            builder.extend(programs.resource_rows(kind, tasks))
            if instance.ps_per_node is not None:
                builder.row({here[name]: 1.0 for here in ps}, upper=instance.ps_per_node)
        return cls(builder, types, ps, beside, workers, room, chief)

    def assignment(self, values: Sequence[int]) -> Assignment:
        node_of = {
            member: node
            for shard, variables in zip(self.types, self.ps, strict=True)
            for member, node in zip(shard.members, programs.expanded(values, variables), strict=True)
        }
        return Assignment(
            ps=tuple(node_of[index] for index in range(len(node_of))),
            workers=tuple(programs.expanded(values, self.workers)),
            chief=programs.expanded(values, self.chief)[0] if self.chief else None,
        )


def binary_types(instance: Instance) -> tuple[ShardGroup, ...]:
    """The parameter servers by type if no machine can hold two of one type; else each by itself."""
    if instance.ps_per_node == 1:
        return programs.shard_types(instance)
    return tuple(
        ShardGroup(size, task, (index,))
        for index, (size, task) in enumerate(zip(instance.shards, instance.ps, strict=True))
    )
