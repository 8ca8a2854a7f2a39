"""Compares the solution times of the paper's integer program and the planner's formulations."""

from __future__ import annotations

import contextlib
import math
import statistics
import time
from collections.abc import Iterator, Sequence

from solver.formulations.instance import Formulation, Instance, Solution
from solver.placement.fastest import OutOfTimeError

from benchmarks.programs import FORMULATIONS
from solver.nodes import NodeKind
from solver.resources import TaskResources
from solver.units import BYTES_PER_S_PER_GBPS, MIB

TITLE = "The literal integer program against ours"
TIME_LIMIT_S = 60.0
TOTAL_BYTES = 85_200_000
RUNS = 5
"""Maximum runs of a median; repeated only while their sum is below a second."""
LITERAL_SIZES = (
    *((5, 5, 1), (5, 10, 3), (5, 20, 5)),
    *((10, 10, 1), (10, 20, 5), (10, 40, 10)),
    *((20, 20, 1), (50, 50, 1), (20, 40, 10)),
)
OUR_SIZES = ((100, 400, 100), (300, 1200, 300), (1000, 4000, 1000), (16_000, 64_000, 16_000))
PAPERS = ("literal", "literal, strengthened")
OURS = ("class counts", "unequal shards", "two-level racks", "node-to-node costs")
RELATIVE_TOLERANCE = 1e-6

Measured = tuple[Solution | None, float]
"""Solution and seconds; None and 0 for a refused instance."""


def measure() -> Iterator[str]:
    """Reports sizes at which the literal program can be run, and larger ones."""
    yield (
        f"Nodes of 8 CPUs, 4 GPUs and 32 GiB; {TOTAL_BYTES / 1e6:.1f} MB in equal shards, workers of 1 CPU and 1 GPU; "
        "any number of ps on a node, as in Eq. 1-6. Seconds to build and solve for the least Eq. 1 with proof, limit "
        f"{TIME_LIMIT_S:.0f} s, one thread of HiGHS, all formulations one after the other in one process. The last two "
        f"columns are ratios to {OURS[0]}. All that is proven agrees."
    )
    yield ""
    yield f"| nodes, workers, ps | {' | '.join((*PAPERS, *OURS))} | literal, ratio | strengthened, ratio |"
    yield "|---" * (len(PAPERS) + len(OURS) + 3) + "|"
    for size in LITERAL_SIZES:
        cells, timed = _row(size, (*PAPERS, *OURS))
        ratios = [_ratio(timed[name], timed[OURS[0]]) for name in PAPERS]
        yield f"{cells} {' | '.join(ratios)} |"
    yield ""
    yield "Where the literal program is not built any more:"
    yield ""
    yield f"| nodes, workers, ps | {' | '.join(OURS)} | rows of the literal program |"
    yield "|---" * (len(OURS) + 2) + "|"
    for size in OUR_SIZES:
        cells, _ = _row(size, OURS)
        yield f"{cells} {math.prod(size):.1e} |"


def _row(size: tuple[int, int, int], names: Sequence[str]) -> tuple[str, dict[str, Measured]]:
    """Returns the table row up to the formulations' cells, and the measurements."""
    case = _instance(*size)
    timed = {name: _timed(FORMULATIONS[name], case) for name in names}
    proven = [solution.traffic_bytes for solution, _ in timed.values() if solution is not None and solution.proven]
    if not proven or max(proven) > min(proven) * (1 + RELATIVE_TOLERANCE):
        raise AssertionError(f"formulations disagree on {size}: {proven}")
    title = ", ".join(f"{count:,}" for count in size)
    return f"| {title} | {' | '.join(_cell(*timed[name]) for name in names)} |", timed


def _instance(nodes: int, workers: int, ps: int) -> Instance:
    node = NodeKind(
        8000, 32 * 1024, 500 * 1024, 4, "K80", 10 * BYTES_PER_S_PER_GBPS, None, tuple(f"n{i}" for i in range(nodes))
    )
    shard = TOTAL_BYTES // ps
    server = TaskResources(1.0, 1024 + 3 * shard // MIB, 64)
    worker = TaskResources(1.0, 3 * 1024, 128, 1)
    return Instance((node,), worker, workers, (shard,) * ps, (server,) * ps, ps_per_node=None)


def _timed(formulation: Formulation, case: Instance) -> Measured:
    """Returns the solution and the seconds; the solution is None if refused or not found in time."""
    if formulation.refusal(case) is not None:
        return None, 0.0
    times_s: list[float] = []
    solution = None
    while len(times_s) < RUNS and sum(times_s) < 1:
        start = time.perf_counter()
        with contextlib.suppress(OutOfTimeError):
            solution = formulation.solve(case, TIME_LIMIT_S)
        times_s.append(time.perf_counter() - start)
    return solution, statistics.median(times_s)


def _ratio(slow: Measured, fast: Measured) -> str:
    proven = slow[0] is not None and slow[0].proven
    return f"{'' if proven else 'more than '}{slow[1] / fast[1]:,.0f}"


def _cell(solution: Solution | None, seconds: float) -> str:
    if not seconds:
        return "refused"
    if solution is None:
        return f"no answer in {seconds:.0f} s"
    if not solution.proven:
        return f"gap {1 - solution.bound / solution.traffic_bytes:.0%} after {seconds:.0f} s"
    return f"{seconds:.4f}" if seconds < 0.01 else f"{seconds:.3f}" if seconds < 1 else f"{seconds:.1f}"
