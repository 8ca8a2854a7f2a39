"""The placement of one option as data: the states that a machine of each kind can be in.

A state is one shard or none, and the separate chief or not; workers come on top, as many as fit. Two parameter servers
on one machine share its network card, so a machine gets one at most (the paper's third rule). Shards of the same size
are one shard type; with a single type this is solver FACTS' form D, with several it is form B (unequal shards) with its
rows for single machines folded into counts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from solver.nodes import NodeKind
from solver.resources import TaskResources, TaskSizes
from solver.shards import Shards
from solver.step_time import StepModel


@dataclass(frozen=True)
class ShardType:
    """Shards of the same size: how many bytes, how many shards."""

    size_bytes: int
    count: int


@dataclass(frozen=True)
class State:
    """One state of one kind of machine.

    Attributes:
        kind: index of the kind.
        shard: index of the shard type on it; None for no ps.
        chief: whether the separate chief is on it.
        network_s: by number of workers on it, from 0 to the most that fit: how long its network card is busy while
            every worker makes one step.
        work_s: one worker's step without transfers; 0 where no worker fits.
        steps_per_s: steps one worker makes in a second when only it limits itself (asynchronous); 0 where none fits.
        local_bytes: shard bytes on it.
    """

    kind: int
    shard: int | None
    chief: bool
    network_s: tuple[float, ...]
    work_s: float
    steps_per_s: float
    local_bytes: int

    def workers_within(self, work_limit_s: float, network_limit_s: float) -> tuple[int, int] | None:
        """Fewest and most workers with which the machine keeps both limits; None if no number does.

        With more workers a ps sends less and the workers receive more, so the numbers in between keep them too.
        """
        times = self.network_s if self.work_s <= work_limit_s else self.network_s[:1]
        fitting = [workers for workers, network_s in enumerate(times) if network_s <= network_limit_s]
        return (fitting[0], fitting[-1]) if fitting else None


@dataclass(frozen=True)
class PlacementProblem:
    """What has to be placed, and the states to choose from.

    Attributes:
        kinds: the machines, those alike merged where they differ in nothing that matters to this option.
        model: the step-time model.
        shard_types: sizes and numbers of the shards.
        workers: how many workers.
        needs_chief: whether there is a separate chief.
        states: every state in which a machine can be.
    """

    kinds: tuple[NodeKind, ...]
    model: StepModel
    shard_types: tuple[ShardType, ...]
    workers: int
    needs_chief: bool
    states: tuple[State, ...]

    @property
    def largest_shard(self) -> int:
        return self.shard_types[0].size_bytes


def shard_types(shards: Shards) -> tuple[ShardType, ...]:
    """The shards by size, largest first."""
    sizes = sorted(set(shards.sizes), reverse=True)
    return tuple(ShardType(size, shards.sizes.count(size)) for size in sizes)


def placement_problem(
    kinds: Sequence[NodeKind], model: StepModel, sizes: TaskSizes, shards: Shards, workers: int
) -> PlacementProblem:
    """Lists the states that are possible.

    Args:
        kinds: the machines.
        model: step times for workers of the option's shape.
        sizes: resources of the roles.
        shards: what each ps holds.
        workers: how many workers.
    """
    types = shard_types(shards)
    chief = sizes.chief
    loads = [
        (shard_index, with_chief)
        for shard_index in (None, *range(len(types)))
        for with_chief in ((False, True) if chief is not None else (False,))
    ]
    merged: dict[tuple[tuple[int, ...], float, float], list[NodeKind]] = {}
    for kind in kinds:
        rooms = tuple(_room(kind, model, sizes, types, load, workers) for load in loads)
        alike = (rooms, kind.network_bytes_per_s, model.compute_s(kind) if max(rooms) > 0 else 0.0)
        merged.setdefault(alike, []).append(kind)
    states = []
    groups: list[NodeKind] = []
    for index, ((rooms, _, _), members) in enumerate(merged.items()):
        kind = dataclasses.replace(members[0], names=tuple(name for member in members for name in member.names))
        groups.append(kind)
        for (shard_index, with_chief), room in zip(loads, rooms, strict=True):
            if room > 0 or (room == 0 and (with_chief or shard_index is not None)):
                local = 0 if shard_index is None else types[shard_index].size_bytes
                times = tuple(model.network_s(kind, local, count, workers) for count in range(room + 1))
                work = model.work_s(kind) if room else 0.0
                rate = 1 / (work + model.transfer_s(kind, local)) if room else 0.0
                states.append(State(index, shard_index, with_chief, times, work, rate, local))
    return PlacementProblem(tuple(groups), model, types, workers, chief is not None, tuple(states))


def _room(
    kind: NodeKind,
    model: StepModel,
    sizes: TaskSizes,
    types: Sequence[ShardType],
    load: tuple[int | None, bool],
    workers: int,
) -> int:
    """How many workers fit on such a machine beside the shard and the chief; -1 if those do not fit."""
    shard_index, with_chief = load
    taken: list[TaskResources] = [] if shard_index is None else [sizes.ps(types[shard_index].size_bytes)]
    if with_chief and sizes.chief is not None:
        taken.append(sizes.chief)
    room = kind.room_for(sizes.worker(model.shape), taken)
    return min(room, workers if hosts_workers(kind, model) else 0)


def hosts_workers(kind: NodeKind, model: StepModel) -> bool:
    """Whether workers can run there at all: the GPUs' memory must hold the model."""
    if not model.shape.gpus:
        return True
    return kind.gpus >= model.shape.gpus and model.fits_gpu(kind)
