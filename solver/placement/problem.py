"""The placement of one option as data: the states that a machine of each kind can be in.

A state is the shards on the machine, the separate chief or not, and what each worker there gets; workers come on top,
as many as fit. Two parameter servers on one machine share its network card, so a machine gets one at most (the paper's
third rule) unless that rule is switched off. Shards of the same size are one shard type; a plan of equal
shards has a single one.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dike.exceptions import BadInputError
from solver.async_rates import ROUNDING, Shared
from solver.capacity import Ints, Machines
from solver.nodes import NodeKind
from solver.resources import TaskResources, TaskSizes, WorkerShape
from solver.shards import Shards
from solver.step_time import StepModel

MAX_CASES = 40
"""Times of the slowest ps machine that are looked at."""
MAX_LOADS = 2_000
"""Sets of shards that one machine can have; programs with more take minutes."""


class TooManyStatesError(BadInputError):
    """Parameter servers may share machines in more ways than a program can hold."""


Load = tuple[tuple[int, ...], bool]
"""What a machine has besides workers: indices of shard types, ascending, and whether it has the chief."""


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
        shards: indices of the types of the shards on it, ascending, one for each shard; empty without any.
        chief: whether the separate chief is on it.
        shape: what each worker on it gets.
        samples: samples of one worker's step.
        network_s: by number of workers on it, from 0 to the most that fit: how long its network card is busy while
            every worker makes one step (synchronous).
        work_s: one worker's step without transfers; 0 where no worker fits.
        steps_per_s: steps one worker makes in a second, alone on the network (asynchronous); 0 where none fits.
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
        model: the step-time model; of the first shape where workers may differ.
        shard_types: sizes and numbers of the shards.
        workers: how many workers.
        needs_chief: whether there is a separate chief.
        states: every state in which a machine can be.
        load: of the busiest ps (`StepModel.load`).
        least_gpus: all workers together have at least so many GPUs.
        cases: asynchronous workers wait for the slowest ps machine (solver.async_rates). Where that can matter: the
            same problem, for each time that this machine may take; else none.
        are_all_cases: whether none was left out, as they were too many.
    """

    kinds: tuple[NodeKind, ...]
    model: StepModel
    shard_types: tuple[ShardType, ...]
    workers: int
    needs_chief: bool
    states: tuple[State, ...]
    load: float
    least_gpus: int = 0
    cases: tuple[PlacementProblem, ...] = ()
    are_all_cases: bool = True

    @property
    def shared(self) -> Shared:
        """What limits asynchronous workers together, uplinks left out."""
        return self.model.shared(self.load)


def shard_types(shards: Shards) -> tuple[ShardType, ...]:
    """The shards by size, largest first."""
    sizes = sorted(set(shards.sizes), reverse=True)
    return tuple(ShardType(size, shards.sizes.count(size)) for size in sizes)


def placement_problem(
    kinds: Sequence[NodeKind],
    model: StepModel,
    sizes: TaskSizes,
    shards: Shards,
    workers: int,
    *,
    ps_may_share: bool = False,
) -> PlacementProblem:
    """The placement of workers that are all alike.

    Args:
        kinds: the machines.
        model: step times for workers of the option's shape.
        sizes: resources of the roles.
        shards: what each ps holds.
        workers: how many workers.
        ps_may_share: whether a machine may have several parameter servers.

    Raises:
        TooManyStatesError: if parameter servers may share machines in too many ways.
    """
    return mixed_problem(kinds, (model,), sizes, shards, workers, ps_may_share=ps_may_share)


def mixed_problem(
    kinds: Sequence[NodeKind],
    models: Sequence[StepModel],
    sizes: TaskSizes,
    shards: Shards,
    workers: int,
    *,
    ps_may_share: bool = False,
    least_gpus: int = 0,
) -> PlacementProblem:
    """The placement of workers that are alike on each machine and may differ between machines.

    Args:
        kinds: the machines.
        models: step times for workers of each shape.
        sizes: resources of the roles.
        shards: what each ps holds.
        workers: how many workers.
        ps_may_share: whether a machine may have several parameter servers.
        least_gpus: all workers together have at least so many GPUs.

    Raises:
        TooManyStatesError: if parameter servers may share machines in too many ways.
    """
    found = without_cases(kinds, models, sizes, shards, workers, ps_may_share=ps_may_share, least_gpus=least_gpus)
    if models[0].profile.synchronous:
        return found
    stored = {state.local_bytes for state in found.states}
    times, are_all = slowest_times(found.kinds, stored, shards, MAX_CASES)
    cases = tuple(with_slowest(found, models, each) for each in times)
    return dataclasses.replace(found, cases=cases, are_all_cases=are_all)


def without_cases(
    kinds: Sequence[NodeKind],
    models: Sequence[StepModel],
    sizes: TaskSizes,
    shards: Shards,
    workers: int,
    *,
    ps_may_share: bool = False,
    least_gpus: int = 0,
) -> PlacementProblem:
    """`mixed_problem` as if nobody waited for the slowest ps machine."""
    types = shard_types(shards)
    loads = _loads(kinds, sizes, types, ps_may_share=ps_may_share)
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
                # The network takes all workers alike, whatever their shape.
                busy = [models[0].network_s(kind, local, count, workers) for count in range(most + 1)]
                times[kind.network_bytes_per_s, local] = busy
            beside = list(zip(models, room[members[0], :, place].tolist(), strict=True))
            busy = times[kind.network_bytes_per_s, local]
            states += [
                _state(number, kind, load, model, fits, local, busy) for model, fits in _choices(kind, beside, load)
            ]
    needs_chief = sizes.chief is not None
    busiest = models[0].load(shards)
    return PlacementProblem(tuple(groups), models[0], types, workers, needs_chief, tuple(states), busiest, least_gpus)


def slowest_times(
    kinds: Iterable[NodeKind], stored: Iterable[int], shards: Shards, most: int
) -> tuple[tuple[float, ...], bool]:
    """Seconds that the slowest ps machine may take to send what it holds; none where nobody waits for it.

    Where cards are alike a worker waits for its own: that takes in what all others send.

    Args:
        kinds: the machines.
        stored: bytes that one of them may hold.
        shards: what each ps holds.
        most: of more times than that some are left out, not the longest.

    Returns:
        The times, and whether these are all.
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
    """No machine takes longer to send what it holds, and the workers of all that are faster wait so long."""
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
    """Whether workers can run there at all: the GPUs' memory must hold the model."""
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
    """A value for each kind that only its GPUs' model decides on."""
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
    """The workers worth having beside that load: none that are slower, with as many GPUs, and fit no more often."""
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
    """How many workers of each shape fit on each kind beside each load; -1 if the load does not fit."""
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


def _loads(
    kinds: Sequence[NodeKind], sizes: TaskSizes, types: Sequence[ShardType], *, ps_may_share: bool
) -> list[Load]:
    """Every set of shards that a machine may have, with and without the chief."""
    sets = [(), *((shard,) for shard in range(len(types)))]
    if ps_may_share:
        sets = _shard_sets(kinds, sizes, types)
    return [(shards, chief) for shards in sets for chief in ((False, True) if sizes.chief is not None else (False,))]


def _shard_sets(kinds: Sequence[NodeKind], sizes: TaskSizes, types: Sequence[ShardType]) -> list[tuple[int, ...]]:
    """Every set of shards that fits on some machine, by the number of shards."""
    nothing = sizes.ps(0)
    found: list[tuple[int, ...]] = [()]
    for shards in found:  # It grows meanwhile: each set is tried with one shard more.
        for shard in range(shards[-1] if shards else 0, len(types)):
            larger = (*shards, shard)
            load = _tasks((larger, False), sizes, types)
            if larger.count(shard) <= types[shard].count and any(kind.room_for(nothing, load) >= 0 for kind in kinds):
                found.append(larger)
        if len(found) > MAX_LOADS:
            raise TooManyStatesError(
                f"Without the rule task_counts, {sum(entry.count for entry in types)} parameter servers of "
                f"{len(types)} sizes can share machines in more than {MAX_LOADS:,} ways; keep task_counts."
            )
    return found
