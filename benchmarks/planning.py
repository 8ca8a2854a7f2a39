"""Measures planning times for 5 to 16,000 machines: all alike, of three kinds, and all different."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from framework.project.profiling import load_profile
from solver import Cluster, NodeClass, Plan, PlanRequest, make_plan
from solver.drawing.figure_files import new_figure, save_figure
from solver.units import GIB

TITLE = "Planning time by size of the cluster"
SIZES = (5, 20, 100, 300, 1000, 4000, 16_000)
RUNS = 3
LARGEST_COUNT = 10**300
PLOT = Path(__file__).parent / "results" / "planning.svg"
COLOURS = {"homogeneous": "#5b8fd6", "heterogeneous": "#e8a33d", "fragmented": "#7ab37a"}


@dataclass(frozen=True)
class _Point:
    family: str
    size: int
    plan: Plan
    seconds: float


def measure() -> Iterator[str]:
    """Reports the times, and draws a plot beside the results."""
    profile = load_profile("keras:ResNet50", batch_size=32)
    yield "ResNet50, batch 32 a worker, 10 Gb/s, all options considered; seconds of `make_plan`, the median of"
    yield f"{RUNS} runs in one process. *Homogeneous*: 8 CPUs, 4 K80, 32 GiB. *Heterogeneous*: of five machines three"
    yield "are such, one has 2 GPUs, one none. *Fragmented*: what is free of such machines when other jobs hold a"
    yield "random part of each: no two need be alike."
    yield ""
    yield "| cluster | machines | workers | ps | options generated | considered | optimal | seconds |"
    yield "|---|---|---|---|---|---|---|---|"
    points = []
    for family in COLOURS:
        for size in SIZES:
            request = PlanRequest(profile, Cluster(_machines(family, size)))
            times_s = []
            for _ in range(RUNS):
                start = time.perf_counter()
                plan = make_plan(request)
                times_s.append(time.perf_counter() - start)
            point = _Point(family, size, plan, statistics.median(times_s))
            points.append(point)
            yield (
                f"| {family} | {size:,} | {plan.option.workers:,} | {plan.option.ps:,} "
                f"| {_count(plan.options.generated)} | {_count(plan.options.considered)} "
                f"| {'proven' if plan.optimal else f'gap {plan.gap:.1%}'} | {point.seconds:.3f} |"
            )
    _draw(points)
    slowest = max(point.seconds for point in points if point.size == 300)
    yield ""
    yield "The paper names up to 23 minutes for 300 machines, on a machine of its own; the slowest 300 here took"
    yield f"{slowest:.2f} s."
    yield ""
    yield f"![seconds against machines]({PLOT.name})"


def _machines(family: str, size: int) -> tuple[NodeClass, ...]:
    if family == "homogeneous":
        return (_node("k80", size, 8, 32, 4),)
    if family == "heterogeneous":
        few = size // 5
        return (_node("k80", size - 2 * few, 8, 32, 4), _node("half", few, 8, 32, 2), _node("cpu", few, 8, 32, 0))
    chance = np.random.default_rng(size)
    return tuple(
        _node(f"m{index}", 1, quarters / 4, halves / 2, gpus)
        for index, (quarters, halves, gpus) in enumerate(chance.integers((4, 8, 0), (33, 65, 5), (size, 3)).tolist())
    )


def _node(name: str, count: int, cpus: float, mem_gib: float, gpus: int) -> NodeClass:
    return NodeClass(
        name=name,
        count=count,
        cpus=cpus,
        mem_bytes=int(mem_gib * GIB),
        gpus=gpus,
        gpu_model="K80",
        disk_bytes=500 * GIB,
        network_gbps=10,
    )


def _draw(points: list[_Point]) -> None:
    figure = new_figure(7.0, 4.2)
    axes = figure.add_subplot()
    for family, colour in COLOURS.items():
        here = [point for point in points if point.family == family]
        axes.plot([point.size for point in here], [point.seconds for point in here], "o-", color=colour, label=family)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("machines")
    axes.set_ylabel("seconds")
    axes.set_title("From profile and cluster to a plan and its gap", fontsize=11)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    save_figure(figure, PLOT)


def _count(number: int) -> str:
    if number >= LARGEST_COUNT:
        return "more than 10^300"
    return f"{number:,}" if number < 10**9 else f"{float(number):.1e}"
