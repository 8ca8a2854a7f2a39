"""Compares the solution times of the paper's integer program with the planner's program over classes of machines."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from dike.profile import Api, ModelProfile
from solver import Cluster, NodeClass, milp
from solver.hardware import known_hardware
from solver.placement.class_counts import OutOfTimeError, proven_counts
from solver.placement.problem import placement_problem
from solver.resources import WorkerShape
from solver.scenario import Scenario
from solver.shards import Shards
from solver.traffic import weighted_traffic
from solver.units import GIB

TITLE = "The literal integer program against ours"
TIME_LIMIT_S = 60.0
TOTAL_BYTES = 85_200_000
RUNS = 5
"""Maximum runs of a median; repeated only while their sum is below a second."""
MAX_ROWS = 500_000
"""Rows above which the literal program is not built."""
LITERAL_SIZES = (
    *((5, 5, 1), (5, 10, 3), (5, 20, 5)),
    *((10, 10, 1), (10, 20, 5), (10, 40, 10)),
    *((20, 20, 1), (50, 50, 1), (20, 40, 10)),
)
OUR_SIZES = ((100, 400, 100), (300, 1200, 300), (1000, 4000, 1000), (16_000, 64_000, 16_000))
SHAPE = WorkerShape(1, 1.0)
RELATIVE_TOLERANCE = 1e-6


@dataclass(frozen=True)
class Instance:
    """Identical machines, and a job with equal shards."""

    machines: int
    workers: int
    ps: int

    @property
    def scenario(self) -> Scenario:
        profile = ModelProfile(
            name="equal",
            api=Api.GRAPH,
            parameters=TOTAL_BYTES // 4,
            parameter_bytes=TOTAL_BYTES,
            variables=(),
            flops_forward_per_sample=1e9,
            flops_step_per_sample=3e9,
            longest_path_flops=1e9,
            batch_size=32,
            sample_bytes=1000,
            optimizer="SGD",
            optimizer_slots=0,
        )
        node = NodeClass(
            name="node", count=self.machines, cpus=8, mem_bytes=32 * GIB, gpus=4, gpu_model="K80", disk_bytes=100 * GIB
        )
        return Scenario.of(profile, Cluster((node,)), known_hardware())

    @property
    def shards(self) -> Shards:
        return Shards((TOTAL_BYTES // self.ps,) * self.ps, {})

    def traffic(self, local_bytes: float) -> float:
        return weighted_traffic(self.shards.total, self.workers, local_bytes)


@dataclass(frozen=True)
class Solved:
    """Result of a program: weighted bytes of Eq. 1, None without a solution; and whether it is proven."""

    traffic_bytes: float | None
    proven: bool


Solve = Callable[[Instance], Solved | None]
"""A program; None if it refuses the instance."""


def class_counts(instance: Instance) -> Solved:
    """The planner's program (solver.placement.class_counts)."""
    scenario, shards = instance.scenario, instance.shards
    problem = placement_problem(scenario.kinds, [scenario.model(SHAPE)], scenario.sizes, shards, instance.workers)
    deadline = time.monotonic() + TIME_LIMIT_S
    try:
        counts = proven_counts(problem, lambda state: state.local_bytes / shards.total, deadline=deadline)
    except OutOfTimeError:
        return Solved(None, proven=False)
    assert counts is not None, "every instance fits"
    local = sum(group.state.local_bytes * group.workers * group.machines for group in counts.groups)
    return Solved(instance.traffic(local), proven=True)


def literal(instance: Instance, *, strengthened: bool = False) -> Solved | None:
    """The integer program of the paper 'Dike' (section 3.3, Eq. 1-6) as printed, corrected.

    For machines i, parameter servers j and workers k, with P_ij, W_ik and Conn_jk all 0 or 1:

        minimise    sum_j sum_k Mem_j (Conn_jk Cost_in + (1 - Conn_jk) Cost_out)                    Eq. 1
        subject to  sum_j R_jr P_ij + sum_k W_r W_ik <= B_ir          for every i and resource r    Eq. 2
                    P_ij, W_ik, Conn_jk in {0, 1}                                                   Eq. 3, 4
                    sum_i W_ik = 1                                    for every k                   Eq. 5
                    sum_i P_ij = 1                                    for every j                   Eq. 6
                    Conn_jk + P_ij - W_ik <= 1                        for every i, j, k             added

    The added rows allow Conn_jk = 1 only if ps j and worker k share a machine; without them, as printed, Conn = 1 is
    optimal everywhere. Further rows keep the third rule: one ps on a machine at most.

    `strengthened` adds one row for each ps, which limits its connected workers to those that fit beside it:

        sum_k Conn_jk <= sum_i cap_ij P_ij.
    """
    if instance.machines * instance.ps * instance.workers > MAX_ROWS:
        return None
    scenario, shards = instance.scenario, instance.shards
    (kind,) = scenario.kinds
    server, worker = scenario.sizes.ps(shards.sizes[0]), scenario.sizes.worker(SHAPE)
    builder = milp.MilpBuilder()
    nodes, ps_range, worker_range = range(instance.machines), range(instance.ps), range(instance.workers)
    ps = [[builder.integer(1) for _ in nodes] for _ in ps_range]
    workers = [[builder.integer(1) for _ in nodes] for _ in worker_range]
    connected = [[builder.integer(1, 1.0) for _ in worker_range] for _ in ps_range]
    for task in (*ps, *workers):
        builder.equation(task, 1)
    for i in nodes:
        for have, of_ps, of_worker in zip(kind.amounts, server.amounts, worker.amounts, strict=True):
            needs = dict.fromkeys((task[i] for task in ps), float(of_ps))
            builder.row(needs | dict.fromkeys((task[i] for task in workers), float(of_worker)), upper=have)
        builder.row({task[i]: 1.0 for task in ps}, upper=1)
        for j in ps_range:
            for k in worker_range:
                builder.row({connected[j][k]: 1.0, ps[j][i]: 1.0, workers[k][i]: -1.0}, upper=1.0)
    if strengthened:
        for shared in connected:
            builder.row(dict.fromkeys(shared, 1.0), upper=kind.room_for(worker, [server]))
    result = milp.solve(builder.build(), TIME_LIMIT_S)
    if result.values is None:
        return Solved(None, proven=False)
    pairs = sum(result.values[pair] for shared in connected for pair in shared)
    return Solved(instance.traffic(pairs * shards.sizes[0]), result.proven)


def _strengthened(instance: Instance) -> Solved | None:
    return literal(instance, strengthened=True)


PROGRAMS: dict[str, Solve] = {
    "literal": literal,
    "literal, strengthened": _strengthened,
    "class counts": class_counts,
}


def measure() -> Iterator[str]:
    """Reports sizes at which the literal program can be run, and larger ones."""
    yield (
        f"Nodes of 8 CPUs, 4 GPUs and 32 GiB; {TOTAL_BYTES / 1e6:.1f} MB in equal shards, workers of 1 CPU and 1 GPU, "
        "one ps on a node at most. Seconds to build and solve for the least Eq. 1 with proof, limit "
        f"{TIME_LIMIT_S:.0f} s, one thread of HiGHS, one after the other in one process. The last two columns are "
        "ratios to class counts. All that is proven agrees."
    )
    yield ""
    yield f"| nodes, workers, ps | {' | '.join(PROGRAMS)} | literal, ratio | strengthened, ratio |"
    yield "|---" * (len(PROGRAMS) + 3) + "|"
    for size in LITERAL_SIZES:
        timed = {name: _timed(solve, Instance(*size)) for name, solve in PROGRAMS.items()}
        _check(size, [solved for solved, _ in timed.values()])
        ours = timed["class counts"][1]
        ratios = [_ratio(timed[name], ours) for name in ("literal", "literal, strengthened")]
        yield f"| {_text(size)} | {' | '.join(_cell(*one) for one in timed.values())} | {' | '.join(ratios)} |"
    yield ""
    yield "Where the literal program is not built any more:"
    yield ""
    yield "| nodes, workers, ps | class counts | rows of the literal program |"
    yield "|---|---|---|"
    for size in OUR_SIZES:
        machines, workers, ps = size
        yield f"| {_text(size)} | {_cell(*_timed(class_counts, Instance(*size)))} | {machines * workers * ps:.1e} |"


def _timed(solve: Solve, instance: Instance) -> tuple[Solved | None, float]:
    """The result, and the median of the seconds."""
    seconds: list[float] = []
    while not seconds or (len(seconds) < RUNS and sum(seconds) < 1):
        started = time.perf_counter()
        solved = solve(instance)
        seconds.append(time.perf_counter() - started)
    return solved, statistics.median(seconds)


def _check(size: tuple[int, int, int], results: list[Solved | None]) -> None:
    proven = [one.traffic_bytes for one in results if one is not None and one.proven and one.traffic_bytes is not None]
    if max(proven) > min(proven) * (1 + RELATIVE_TOLERANCE):
        raise AssertionError(f"the programs disagree on {size}: {proven}")


def _text(size: tuple[int, int, int]) -> str:
    return ", ".join(f"{number:,}" for number in size)


def _ratio(slow: tuple[Solved | None, float], ours_s: float) -> str:
    solved, seconds = slow
    return f"{'' if solved is not None and solved.proven else 'more than '}{seconds / ours_s:,.0f}"


def _cell(solved: Solved | None, seconds: float) -> str:
    if solved is None:
        return "not built"
    if not solved.proven:
        return f"not proven in {TIME_LIMIT_S:.0f} s"
    return f"{seconds:.4f}" if seconds < 0.01 else f"{seconds:.3f}" if seconds < 1 else f"{seconds:.1f}"
