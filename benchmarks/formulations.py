"""The paper's integer program against ours: the same optimum, how many times faster."""

from __future__ import annotations

import time
from collections.abc import Iterator

from solver.formulations import FORMULATIONS, Formulation, Instance, Solution
from solver.nodes import NodeKind
from solver.placement.fastest import OutOfTimeError
from solver.resources import TaskResources
from solver.units import BYTES_PER_S_PER_GBPS, MIB

TITLE = "The literal integer program against ours"
LIMIT_S = 60.0
TOTAL_BYTES = 85_200_000
LITERAL_SIZES = ((5, 5, 1), (5, 10, 3), (10, 10, 1), (5, 20, 5), (20, 20, 1), (10, 20, 5), (50, 50, 1))
OUR_SIZES = ((10, 40, 10), (20, 80, 20), (100, 400, 100), (300, 1200, 300), (16_000, 64_000, 16_000))
OURS = ("class counts", "unequal shards", "two-level racks", "node-to-node costs")
CLOSE = 1e-6


def measure() -> Iterator[str]:
    """Lines of two Markdown tables: where the literal program still ends, and where only ours do."""
    yield (
        f"Nodes of 8 CPUs, 4 GPUs and 32 GiB; {TOTAL_BYTES / 1e6:.1f} MB in equal shards, workers of 1 CPU and 1 GPU; "
        f"any number of ps on a node, as in Eq. 1-6. Least Eq. 1 with proof; seconds for building and solving, limit "
        f"{LIMIT_S:.0f} s, one thread of HiGHS, all formulations one after the other. Each ratio is the literal "
        "program's time over class counts'."
    )
    yield ""
    yield f"| nodes, workers, ps | literal | strengthened | {' | '.join(OURS)} | literal / ours | strengthened / ours |"
    yield "|---" * (len(OURS) + 5) + "|"
    for size in LITERAL_SIZES:
        case = _instance(*size)
        timed = {name: _timed(FORMULATIONS[name], case) for name in ("literal", "literal, strengthened", *OURS)}
        _same_optimum([solution for solution, _ in timed.values()])
        literal, strengthened, ours = (timed[name][1] for name in ("literal", "literal, strengthened", OURS[0]))
        cells = [_cell(*measured) for measured in timed.values()]
        yield f"| {', '.join(map(str, size))} | {' | '.join(cells)} | {literal / ours:,.0f} | {strengthened / ours:,.0f} |"
    yield ""
    yield "Larger ones, which the literal program does not prove within the limit, or is not built for:"
    yield ""
    yield f"| nodes, workers, ps | {' | '.join(OURS)} | literal program |"
    yield "|---" * (len(OURS) + 2) + "|"
    for size in OUR_SIZES:
        case = _instance(*size)
        timed = {name: _timed(FORMULATIONS[name], case) for name in OURS}
        _same_optimum([solution for solution, _ in timed.values()])
        cells = [_cell(*measured) for measured in timed.values()]
        rows = f"{2 * size[0] * size[1] * size[2]:.0e}".replace("e+0", "e").replace("e+", "e")
        why = FORMULATIONS["literal"].refusal(case)
        yield f"| {size[0]:,}, {size[1]:,}, {size[2]:,} | {' | '.join(cells)} | {why or f'about {rows} rows'} |"


def _instance(nodes: int, workers: int, ps: int) -> Instance:
    node = NodeKind(
        8000, 32 * 1024, 500 * 1024, 4, "K80", 10 * BYTES_PER_S_PER_GBPS, None, tuple(f"n{i}" for i in range(nodes))
    )
    shard = TOTAL_BYTES // ps
    server = TaskResources(1.0, 1024 + 3 * shard // MIB, 64)
    worker = TaskResources(1.0, 3 * 1024, 128, 1)
    return Instance((node,), worker, workers, (shard,) * ps, (server,) * ps, ps_per_node=None)


def _timed(formulation: Formulation, case: Instance) -> tuple[Solution | None, float]:
    """The solution, None where there is none in time or the instance is refused, and the seconds."""
    start = time.perf_counter()
    solution = None
    if formulation.refusal(case) is None:
        try:
            solution = formulation.solve(case, LIMIT_S)
        except OutOfTimeError:
            pass
    return solution, time.perf_counter() - start


def _same_optimum(solutions: list[Solution | None]) -> None:
    proven = [solution.traffic_bytes for solution in solutions if solution is not None and solution.proven]
    if not proven or max(proven) > min(proven) * (1 + CLOSE):
        raise AssertionError(f"formulations disagree: {proven}")


def _cell(solution: Solution | None, seconds: float) -> str:
    if solution is None:
        return "refused" if seconds < 1 else f"no answer in {seconds:.0f} s"
    if not solution.proven:
        return f"gap {1 - solution.bound / solution.traffic_bytes:.0%} after {seconds:.0f} s"
    return f"{seconds:.4f}" if seconds < 0.01 else f"{seconds:.3f}" if seconds < 1 else f"{seconds:.1f}"
