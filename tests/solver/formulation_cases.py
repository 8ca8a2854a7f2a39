"""Instances for the formulations, and every placement of a small one."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

from solver.formulations.instance import (
    Costs,
    Instance,
    NodeCosts,
    RackCosts,
    UniformCosts,
    network_s,
    traffic_bytes,
    violation,
)
from solver.nodes import NodeKind
from solver.placement.naming import Assignment
from solver.resources import TaskResources
from solver.units import BYTES_PER_S_PER_GBPS

MB = 10**6
WORKER = TaskResources(1.0, 3072, 128, 1)


def kind(cpus: float, mem_gib: int, gpus: int, gbps: float, *names: str) -> NodeKind:
    """Machines of one kind."""
    return NodeKind(round(cpus * 1000), mem_gib * 1024, 100_000, gpus, None, gbps * BYTES_PER_S_PER_GBPS, None, names)


def ps(size_bytes: int) -> TaskResources:
    """A ps of the usual size: its shard three times over, and a process."""
    return TaskResources(1.0, 512 + 3 * size_bytes // 2**20, 64)


def instance(
    kinds: tuple[NodeKind, ...], workers: int, shards: tuple[int, ...], *, costs: Costs | None = None, **changes: object
) -> Instance:
    """An instance whose tasks have the usual sizes."""
    return Instance(
        kinds,
        WORKER,
        workers,
        shards,
        tuple(ps(size) for size in shards),
        costs=UniformCosts() if costs is None else costs,
        **changes,  # type: ignore[arg-type]
    )


def random_instance(seed: int, costs: str) -> Instance:
    """A small instance in which CPUs, GPUs or memory may bind.

    Args:
        seed: which.
        costs: "uniform", "racks" or "pairs".
    """
    draw = random.Random(f"{seed} {costs}")
    names = [f"n{index}" for index in range(draw.randint(2, 5))]
    sorts = [  # CPUs, GiB, GPUs, Gb/s
        (
            draw.choice([2.5, 3, 4, 8]),
            draw.choice([7, 10, 16]),
            draw.choice([0, 1, 2, 2, 4]),
            draw.choice([1.0, 2.5, 10.0]),
        )
        for _ in range(draw.randint(1, 2))
    ]
    sort_of = {name: draw.choice(sorts) for name in names}
    kinds = tuple(
        kind(*sort, *alike) for sort in dict.fromkeys(sorts) if (alike := [n for n in names if sort_of[n] == sort])
    )
    count = draw.randint(1, 3)
    if draw.random() < 0.5:
        shards = (draw.choice([20, 700]) * MB,) * count
    else:
        shards = tuple(sorted((draw.choice([20, 50, 400, 900]) * MB for _ in range(count)), reverse=True))
    return instance(
        kinds,
        draw.randint(1, 5),
        shards,
        chief=draw.choice([None, None, TaskResources(0.5, 2048, 64)]),
        ps_per_node=draw.choice([1, 1, 2, None]),
        costs=_costs(draw, names, costs),
    )


def _costs(draw: random.Random, names: list[str], costs: str) -> Costs:
    if costs == "uniform":
        return draw.choice([UniformCosts(), UniformCosts(0.4, 3.0)])
    if costs == "racks":
        return RackCosts({name: draw.choice(["left", "right", None]) for name in names}, 0.1, 1.0, draw.choice([2, 4]))
    pairs = {
        pair: draw.choice([0.3, 1.0, 2.0, 5.0]) for pair in itertools.combinations(names, 2) if draw.random() < 0.8
    }
    return NodeCosts(pairs, otherwise=1.5)


def placements(case: Instance) -> Iterator[Assignment]:
    """Every placement that fits; of those that only swap workers, or equal parameter servers, one."""
    names = [name for kind in case.kinds for name in kind.names]
    if case.equal_shards:
        ps_nodes: Iterator[tuple[str, ...]] = itertools.combinations_with_replacement(names, len(case.shards))
    else:
        ps_nodes = itertools.product(names, repeat=len(case.shards))
    for chosen in ps_nodes:
        for workers in itertools.combinations_with_replacement(names, case.workers):
            for chief in [None] if case.chief is None else names:
                assignment = Assignment(chosen, workers, chief)
                if violation(case, assignment) is None:
                    yield assignment


def best_values(case: Instance) -> dict[str, tuple[float, float]] | None:
    """By enumeration, for each objective (traffic, network time) of a best placement; None if nothing fits."""
    worth = [(traffic_bytes(case, found), network_s(case, found)) for found in placements(case)]
    if not worth:
        return None
    return {"traffic": min(worth), "network": min(worth, key=lambda pair: (round(pair[1], 9), pair[0]))}
