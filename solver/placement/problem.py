"""The placement of one option as data: which configurations a machine of each kind can be in.

A configuration is one shard or none, a number of workers, and the separate chief or not (solver FACTS 3, form D). Two
parameter servers on one machine share its network card, so a machine gets one at most (the paper's third rule). Shards
of the same size are one shard type; with a single type this is form D as it stands, with several it is form B (unequal
shards) with its rows for single machines folded into counts.
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
class Column:
    """One configuration of one kind of machine.

    Attributes:
        kind: index of the kind.
        shard: index of the shard type on it; None for no ps.
        workers: workers on it.
        chief: whether the separate chief is on it.
        network_s: time its network card is busy while every worker makes one step.
        work_s: one worker's step without transfers; 0 without workers.
        steps_per_s: steps all its workers make in a second when only they themselves limit them (asynchronous).
        local_bytes: shard bytes times workers: what they exchange without the network.
    """

    kind: int
    shard: int | None
    workers: int
    chief: bool
    network_s: float
    work_s: float
    steps_per_s: float
    local_bytes: int


@dataclass(frozen=True)
class PlacementProblem:
    """What has to be placed, and the columns to do it with.

    Attributes:
        kinds: the machines, those alike merged where they differ in nothing that matters to this option.
        model: the step-time model.
        shard_types: sizes and numbers of the shards.
        workers: how many workers.
        needs_chief: whether there is a separate chief.
        columns: every configuration that fits.
    """

    kinds: tuple[NodeKind, ...]
    model: StepModel
    shard_types: tuple[ShardType, ...]
    workers: int
    needs_chief: bool
    columns: tuple[Column, ...]

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
    """Lists the configurations that fit.

    Args:
        kinds: the machines.
        model: step times for workers of the option's shape.
        sizes: resources of the roles.
        shards: what each ps holds.
        workers: how many workers.
    """
    types = shard_types(shards)
    chief = sizes.chief
    states = [
        (shard_index, with_chief)
        for shard_index in (None, *range(len(types)))
        for with_chief in ((False, True) if chief is not None else (False,))
    ]
    merged: dict[tuple[object, ...], list[NodeKind]] = {}
    for kind in kinds:
        rooms = tuple(_room(kind, model, sizes, types, state, workers) for state in states)
        alike = (rooms, kind.network_bytes_per_s, model.compute_s(kind) if max(rooms) > 0 else 0.0)
        merged.setdefault(alike, []).append(kind)
    columns: list[Column] = []
    groups: list[NodeKind] = []
    for index, members in enumerate(merged.values()):
        kind = dataclasses.replace(members[0], names=tuple(name for member in members for name in member.names))
        groups.append(kind)
        for shard_index, with_chief in states:
            local = 0 if shard_index is None else types[shard_index].size_bytes
            room = _room(kind, model, sizes, types, (shard_index, with_chief), workers)
            for count in range(room + 1):
                if count or with_chief or shard_index is not None:
                    columns.append(_column(model, kind, index, shard_index, local, count, with_chief, workers))
    return PlacementProblem(tuple(groups), model, types, workers, chief is not None, tuple(columns))


def _room(
    kind: NodeKind,
    model: StepModel,
    sizes: TaskSizes,
    types: Sequence[ShardType],
    state: tuple[int | None, bool],
    workers: int,
) -> int:
    """How many workers fit on such a machine beside the shard and the chief; -1 if those do not fit."""
    shard_index, with_chief = state
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


def _column(
    model: StepModel,
    kind: NodeKind,
    index: int,
    shard_index: int | None,
    local: int,
    count: int,
    with_chief: bool,
    all_workers: int,
) -> Column:
    work = model.work_s(kind) if count else 0.0
    cycle = work + model.transfer_s(kind, local)
    return Column(
        kind=index,
        shard=shard_index,
        workers=count,
        chief=with_chief,
        network_s=model.network_s(kind, local, count, all_workers),
        work_s=work,
        steps_per_s=count / cycle if count else 0.0,
        local_bytes=local * count,
    )
