"""How long a plan takes, from five nodes to sixteen thousand."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator

from framework.profiling import load_profile
from solver import Cluster, NodeClass, PlanRequest, make_plan

TITLE = "Planning time by size of the cluster"
SIZES = (5, 20, 100, 300, 1000, 16_000)
RUNS = 3
LARGEST_COUNT = 10**300
GIB = 2**30


def measure() -> Iterator[str]:
    """Lines of a Markdown table: nodes, options, what was proven, seconds (median of the runs)."""
    profile = load_profile("keras:ResNet50", batch_size=32)
    yield "Nodes of 8 CPUs, 4 K80 and 32 GiB at 10 Gb/s; ResNet50, batch 32 a worker; all options considered."
    yield ""
    yield "| nodes | workers | ps | options generated | considered | optimal | seconds |"
    yield "|---|---|---|---|---|---|---|"
    for size in SIZES:
        node = NodeClass(
            name="k80",
            count=size,
            cpus=8,
            mem_bytes=32 * GIB,
            gpus=4,
            gpu_model="K80",
            disk_bytes=500 * GIB,
            network_gbps=10,
        )
        request = PlanRequest(profile, Cluster((node,), within_node_gbps=64, across_racks_gbps=None))
        times_s = []
        for _ in range(RUNS):
            start = time.perf_counter()
            plan = make_plan(request)
            times_s.append(time.perf_counter() - start)
        yield (
            f"| {size:,} | {plan.option.workers:,} | {plan.option.ps:,} | {_count(plan.options.generated)} "
            f"| {plan.options.considered:,} | {'proven' if plan.optimal else f'gap {plan.gap:.1%}'} "
            f"| {statistics.median(times_s):.3f} |"
        )


def _count(number: int) -> str:
    if number >= LARGEST_COUNT:
        return "more than 10^300"
    return f"{number:,}" if number < 10**9 else f"{float(number):.1e}"
