"""The placement of one option as data: the possible states of a machine of each kind.

A state is the shard on the machine, if any, the separate chief or not, and the shape of its workers; workers are added,
as many as fit. Two parameter servers on one machine share its network card, so a machine gets at most one (the paper's
third rule). Shards of the same size are one shard type; a plan of equal shards has a single one.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from solver.async_rates import ROUNDING, Shared
from solver.capacity import Ints, Machines
from solver.nodes import NodeKind
from solver.resources import TaskResources, TaskSizes, WorkerShape
from solver.shards import Shards
from solver.step_time import StepModel

Load = tuple[tuple[int, ...], bool]
"""Load of a machine besides workers: indices of shard types, ascending, and whether it has the chief."""


@dataclass(frozen=True)
class ShardType:
    """Shards of the same size: bytes, and number of shards."""

    size_bytes: int
    count: int


@dataclass(frozen=True)
class State:
    """One state of one kind of machine.

    Attributes:
        shards: indices of the types of the shards on it, ascending, one for each shard; empty without any.
        network_s: by number of workers on it, from 0 to the maximum: seconds that its network card is busy while every
            worker makes one step (synchronous).
        work_s: one worker's step without transfers; 0 if no worker fits.
        steps_per_s: steps/s of one worker, alone on the network (asynchronous); 0 if none fits.
        local_bytes: shard bytes on it.
    """

    kind: int
    shards: tuple[int, ...]
    chief: bool
    shape: WorkerShape
    samples: int
    network_s: tuple[float, ...]
    work_s: float
    steps_per_s: float
    local_bytes: int

    def workers_within(self, work_limit_s: float, network_limit_s: float) -> tuple[int, int] | None:
        """Minimum and maximum workers with which the machine keeps both limits; None if there are none.

        With more workers a ps sends less and the workers receive more, so the numbers in between keep them too.
        """
        times = self.network_s if self.work_s <= work_limit_s else self.network_s[:1]
        fitting = [workers for workers, network_s in enumerate(times) if network_s <= network_limit_s]
        return (fitting[0], fitting[-1]) if fitting else None


@dataclass(frozen=True)
class PlacementProblem:
    """The option to place, and the possible states.

    Attributes:
        kinds: the machines, merged if they differ in nothing that matters to this option.
        model: the step-time model; of the first shape if workers may differ.
    """

    kinds: tuple[NodeKind, ...]
    model: StepModel
    shard_types: tuple[ShardType, ...]
    workers: int
    needs_chief: bool
    states: tuple[State, ...]
    load: float

    @property
    def shared(self) -> Shared:
        """Limits that asynchronous workers share, without uplinks."""
        return self.model.shared(self.load)


def shard_types(shards: Shards) -> tuple[ShardType, ...]:
    """The shards by size, largest first."""
    sizes = sorted(set(shards.sizes), reverse=True)
    return tuple(ShardType(size, shards.sizes.count(size)) for size in sizes)


def placement_problem(
    kinds: Sequence[NodeKind],
    models: Sequence[StepModel],
    sizes: TaskSizes,
    shards: Shards,
    workers: int,
) -> PlacementProblem:
    """The placement of workers that are identical on each machine and may differ between machines.

    `models`: step times for workers of each shape.
    """
    types = shard_types(shards)
    loads = _loads(sizes, types)
    room = _rooms(kinds, models, sizes, types, loads, workers)
    compute = np.array([by_gpu_model(kinds, model.compute_s) for model in models]).T
    compute[room.max(axis=2) <= 0] = 0.0
    merged: dict[tuple[bytes, float, bytes], list[int]] = {}
    for index, kind in enumerate(kinds):
        alike = room[index].tobytes(), kind.network_bytes_per_s, compute[index].tobytes()
        merged.setdefault(alike, []).append(index)
    groups: list[NodeKind] = []
    states: list[State] = []
    times: dict[tuple[float, int], list[float]] = {}
    most = max(0, int(room.max()))
    for number, members in enumerate(merged.values()):
        names = tuple(name for index in members for name in kinds[index].names)
        kind = dataclasses.replace(kinds[members[0]], names=names)
        groups.append(kind)
        for place, load in enumerate(loads):
            local = sum(types[shard].size_bytes for shard in load[0])
            if (kind.network_bytes_per_s, local) not in times:
                # Network times do not depend on the workers' shape.
                busy = [models[0].network_s(kind, local, count, workers) for count in range(most + 1)]
                times[kind.network_bytes_per_s, local] = busy
            beside = list(zip(models, room[members[0], :, place].tolist(), strict=True))
            busy = times[kind.network_bytes_per_s, local]
            states += [
                _state(number, kind, load, model, fits, local, busy) for model, fits in _choices(kind, beside, load)
            ]
    needs_chief = sizes.chief is not None
    busiest = models[0].load(shards)
    return PlacementProblem(tuple(groups), models[0], types, workers, needs_chief, tuple(states), busiest)


def slowest_times(
    kinds: Iterable[NodeKind], stored: Iterable[int], shards: Shards, most: int
) -> tuple[tuple[float, ...], bool]:
    """Seconds that the slowest ps machine may take to send its shards; none if it never matters.

    With equal cards a worker waits for its own: that receives from all others.

    `stored`: possible shard bytes on one of them. `most`: maximum number of times; beyond it some are left out, but not
    the longest.

    Returns:
        The times, and whether they are complete.
    """
    cards, held = {kind.network_bytes_per_s for kind in kinds}, {size for size in stored if size}
    if len(cards) < 2 or not held:
        return (), True
    times = {size / card for size in held for card in cards}
    # The machine with the largest shard takes no less.
    possible = sorted(time_s for time_s in times if time_s >= shards.sizes[0] / max(cards) * (1 - ROUNDING))
    unnoticed = [time_s for time_s in possible if time_s <= (shards.total - max(held)) / max(cards)]
    if len(unnoticed) == len(possible):
        return (), True
    found = (*unnoticed[-1:], *possible[len(unnoticed) :])
    if len(found) <= most:
        return found, True
    return tuple(found[round(place)] for place in np.linspace(0, len(found) - 1, most)), False


def with_slowest(problem: PlacementProblem, models: Sequence[StepModel], slowest_s: float) -> PlacementProblem:
    """Excludes machines that take longer to send their shards; workers on faster machines wait for that time."""
    model_of = {model.shape: model for model in models}
    states = []
    for state in problem.states:
        kind = problem.kinds[state.kind]
        if state.local_bytes / kind.network_bytes_per_s > slowest_s * (1 + ROUNDING):
            continue
        if state.steps_per_s:
            transfer_s = model_of[state.shape].transfer_s(kind, state.local_bytes, slowest_s)
            state = dataclasses.replace(state, steps_per_s=1 / (state.work_s + transfer_s))
        states.append(state)
    return dataclasses.replace(problem, states=tuple(states))


def hosts_workers(kind: NodeKind, model: StepModel) -> bool:
    """Whether workers can run on such machines: the GPUs' memory must hold the model."""
    if not model.shape.gpus:
        return True
    return kind.gpus >= model.shape.gpus and model.fits_gpu(kind)


def hosting(kinds: Sequence[NodeKind], model: StepModel) -> NDArray[np.bool_]:
    """`hosts_workers` for each kind."""
    if not model.shape.gpus:
        return np.ones(len(kinds), dtype=bool)
    gpus = np.array([kind.gpus for kind in kinds])
    fits: NDArray[np.bool_] = by_gpu_model(kinds, model.fits_gpu) & (gpus >= model.shape.gpus)
    return fits


def by_gpu_model(kinds: Sequence[NodeKind], value: Callable[[NodeKind], float]) -> NDArray[Any]:
    """A value for each kind that depends only on its GPU model."""
    values = {model: value(kind) for model, kind in {kind.gpu_model: kind for kind in kinds}.items()}
    return np.array([values[kind.gpu_model] for kind in kinds])


def _state(
    number: int, kind: NodeKind, load: Load, model: StepModel, room: int, local: int, busy: Sequence[float]
) -> State:
    work = model.work_s(kind) if room else 0.0
    return State(
        kind=number,
        shards=load[0],
        chief=load[1],
        shape=model.shape,
        samples=model.samples_per_step,
        network_s=tuple(busy[: room + 1]),
        work_s=work,
        steps_per_s=1 / (work + model.transfer_s(kind, local)) if room else 0.0,
        local_bytes=local,
    )


def _choices(kind: NodeKind, beside: Sequence[tuple[StepModel, int]], load: Load) -> Iterator[tuple[StepModel, int]]:
    """The useful workers beside that load: none that are slower, with as many GPUs, and fit no more often."""
    hosting = [(model, room) for model, room in beside if room > 0]
    if not hosting and beside[0][1] == 0 and load != ((), False):
        yield beside[0]
    fastest: dict[int, float] = {}
    for model, room in sorted(hosting, key=lambda item: (-item[1], item[0].work_s(kind))):
        gpus, work = model.shape.gpus, model.work_s(kind)
        if work < fastest.get(gpus, math.inf):
            fastest[gpus] = work
            yield model, room


def _rooms(
    kinds: Sequence[NodeKind],
    models: Sequence[StepModel],
    sizes: TaskSizes,
    types: Sequence[ShardType],
    loads: Sequence[Load],
    workers: int,
) -> Ints:
    """Number of workers of each shape that fit on each kind beside each load; -1 if the load does not fit."""
    helpers = [_tasks(load, sizes, types) for load in loads]
    room = Machines(kinds).capacity([sizes.worker(model.shape) for model in models], helpers)
    hosts = np.array([hosting(kinds, model) for model in models]).T
    least: Ints = np.minimum(room, np.where(hosts, workers, 0)[:, :, None])
    return least


def _tasks(load: Load, sizes: TaskSizes, types: Sequence[ShardType]) -> list[TaskResources]:
    shards, with_chief = load
    tasks = [sizes.ps(types[shard].size_bytes) for shard in shards]
    if with_chief and sizes.chief is not None:
        tasks.append(sizes.chief)
    return tasks


def _loads(sizes: TaskSizes, types: Sequence[ShardType]) -> list[Load]:
    """Every load that a machine may have: no shard or one, with and without the chief."""
    sets: list[tuple[int, ...]] = [(), *((shard,) for shard in range(len(types)))]
    return [(shards, chief) for shards in sets for chief in ((False, True) if sizes.chief is not None else (False,))]
