"""The search over every placement, against trying everything."""

from __future__ import annotations

import itertools
import time

import pytest
from hypothesis import given, settings

from dike.profile import Api, ModelProfile
from solver import NodeClass, PlanRequest
from solver.evaluation import evaluate
from solver.options import default_rules
from solver.options.rules import prune
from solver.options.space import raw_space
from solver.placement.naming import Assignment
from solver.request import scenario_of
from solver.resources import TaskResources, WorkerShape
from solver.scenario import Scenario
from solver.search import relaxation
from solver.search.relaxation import RelaxedSpace
from solver.units import GIB
from tests.solver.solver_cases import MB, profile
from tests.solver.solver_random import cluster_of, nodes, profiles

ROUNDING = 1e-6
MOST_WORKERS = 2
MOST_PS = 3


def _space(scenario: Scenario) -> RelaxedSpace:
    kinds, hardware, sizes = scenario.kinds, scenario.hardware, scenario.sizes
    raw = raw_space(kinds, MOST_WORKERS)
    return RelaxedSpace(scenario, prune(raw, default_rules("throughput"), kinds, hardware, sizes, 1)[-1].space)


def _fits(scenario: Scenario, tasks: dict[str, list[TaskResources]]) -> bool:
    nothing = TaskResources(1e-3, 0, 0)
    return all(scenario.kind_of[name].room_for(nothing, here) >= 0 for name, here in tasks.items())


def _best(scenario: Scenario, shapes: tuple[WorkerShape, ...]) -> float:
    """The fastest of all placements of up to `MOST_PS` ps and `MOST_WORKERS` workers, one size on each machine."""
    names = list(scenario.kind_of)
    best = 0.0
    chief = scenario.sizes.chief
    for ps in range(1, min(MOST_PS, max(1, len(scenario.profile.variables))) + 1):
        shards = scenario.shards(ps)
        for on in itertools.product(names, repeat=ps):
            for chief_on in names if chief is not None else [None]:
                held: dict[str, list[TaskResources]] = {}
                for name, size in zip(on, shards.sizes, strict=True):
                    held.setdefault(name, []).append(scenario.sizes.ps(size))
                if chief is not None and chief_on is not None:
                    held.setdefault(chief_on, []).append(chief)
                for split in itertools.product(range(MOST_WORKERS + 1), repeat=len(names)):
                    if not 0 < sum(split) <= MOST_WORKERS:
                        continue
                    busy = [name for name, here in zip(names, split, strict=True) if here]
                    for chosen in itertools.product(shapes, repeat=len(busy)):
                        tasks = {name: list(here) for name, here in held.items()}
                        workers: list[str] = []
                        of: list[WorkerShape] = []
                        for name, shape in zip(busy, chosen, strict=True):
                            number = split[names.index(name)]
                            tasks.setdefault(name, []).extend([scenario.sizes.worker(shape)] * number)
                            workers += [name] * number
                            of += [shape] * number
                        if not _fits(scenario, tasks) or not all(
                            _hosts(scenario, name, shape) for name, shape in zip(busy, chosen, strict=True)
                        ):
                            continue
                        assignment = Assignment(on, tuple(workers), chief_on, tuple(of))
                        best = max(best, evaluate(scenario, of[0], shards, assignment).samples_per_s)
    return best


def _hosts(scenario: Scenario, name: str, shape: WorkerShape) -> bool:
    kind = scenario.kind_of[name]
    if not shape.gpus:
        return not kind.gpus
    return kind.gpus >= shape.gpus and scenario.model(shape).fits_gpu(kind)


def _check(classes: list[NodeClass], model: ModelProfile) -> None:
    request = PlanRequest(model, cluster_of(classes), max_workers=MOST_WORKERS)
    scenario = scenario_of(request)
    space = _space(scenario)
    found, bound = space.best(0.0, time.monotonic() + 600)
    cpu_shapes = [WorkerShape(0, cpus) for cpus in (0.5, 1.75)] if space.cpu_workers else []
    best = _best(scenario, (*space.gpu_shapes, *cpu_shapes))
    assert bound >= best * (1 - ROUNDING)
    if best:
        assert found is not None
        assert found.samples_per_s <= bound * (1 + ROUNDING)


small = nodes.filter(lambda some: len(some) <= 2)


@settings(max_examples=25, deadline=None)
@given(classes=small, model=profiles)
def test_no_placement_is_faster_than_the_bound_and_the_plan_keeps_its_promise(
    classes: list[NodeClass], model: ModelProfile
) -> None:
    _check(classes, model)


@settings(max_examples=25, deadline=None)
@given(classes=small, model=profiles)
def test_the_bound_holds_for_numbers_of_ps_that_are_not_searched(classes: list[NodeClass], model: ModelProfile) -> None:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(relaxation, "MAX_ALL_PS", 0)
        _check(classes, model)


def test_more_ps_than_reduce_the_load_may_be_faster() -> None:
    """Three ps, of which the smallest is on the slow card: its bound was false."""
    common = {"name": "x", "count": 1, "gpus": 1, "mem_bytes": 16 * GIB, "disk_bytes": 50 * GIB}
    slow = NodeClass(cpus=3.5, gpu_model="V100", network_gbps=0.5, **common)
    fast = NodeClass(cpus=4.0, gpu_model="K80", network_gbps=10.0, **common)
    sizes = [size * MB for size in (55, 29, 22, 4)]
    model = profile(sizes, synchronous=False, api=Api.KERAS, flops=1e6, sample_bytes=6_000, slots=0)
    _check([fast, slow], model)
