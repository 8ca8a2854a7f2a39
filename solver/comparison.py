"""Compares all methods on one job."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dike.exceptions import BadInputError, InfeasibleError
from solver.methods import PLANNERS, Planner, check_methods
from solver.request import PlanRequest, check_request


@dataclass(frozen=True)
class Row:
    """Result of one method; without a plan it has a reason and zeros.

    Attributes:
        reason: why it has no plan; empty with a plan.
        kinds: of workers that differ: their number, CPUs and GPUs, most GPUs first.
        machines: number of machines with a task.
        share: of the best speed of all methods.
        optimal: whether it is proven that no plan inside the rules is better.
        gap: maximum distance from the best speed, as a share of it; 1 if the method gives no bound.
    """

    method: str
    reason: str = ""
    workers: int = 0
    kinds: tuple[tuple[int, float, int], ...] = ()
    ps: int = 0
    cpus: float = 0.0
    gpus: int = 0
    machines: int = 0
    samples_per_s: float = 0.0
    share: float = 0.0
    traffic_bytes: float = 0.0
    seconds: float = 0.0
    optimal: bool = False
    gap: float = 1.0


@dataclass(frozen=True)
class Comparison:
    """The methods, fastest plan first, those without a plan last."""

    rows: tuple[Row, ...]

    @classmethod
    def of(cls, rows: Sequence[Row]) -> Comparison:
        """Sorts the rows and computes their shares of the best speed."""
        best = max((row.samples_per_s for row in rows), default=0.0) or 1.0
        shared = [dataclasses.replace(row, share=row.samples_per_s / best) for row in rows]
        # Rows that differ by rounding only keep their order.
        return cls(tuple(sorted(shared, key=lambda row: -round(row.share, 9))))

    def to_json(self) -> list[dict[str, Any]]:
        return [dataclasses.asdict(row) for row in self.rows]


SLOW_METHODS = ("dike", "dike_traffic")


def compare(
    request: PlanRequest,
    methods: Sequence[str] | None = None,
    on_row: Callable[[Row], None] | None = None,
    planners: Mapping[str, Planner] = PLANNERS,
) -> Comparison:
    """Plans by each method; `on_row` receives each row as soon as it is known, without its share.

    Raises:
        BadInputError: if a method is unknown or the request invalid.
        InfeasibleError: if none of them finds a placement.
    """
    names = tuple(planners) if methods is None else tuple(methods)
    check_methods(names, planners)
    check_request(request)
    rows = []
    # Slow methods come last, so that under a short time limit the quick ones finish.
    for name in sorted(names, key=lambda name: name in SLOW_METHODS):
        rows.append(_row(name, planners[name], request))
        if on_row is not None:
            on_row(rows[-1])
    if all(row.reason for row in rows):
        reasons = {row.method: row.reason for row in rows}
        raise InfeasibleError(reasons[names[0]] if names else "No method was given; name at least one.")
    return Comparison.of(rows)


def _row(method: str, planner: Planner, request: PlanRequest) -> Row:
    started = time.monotonic()
    try:
        plan = planner(request)
    except BadInputError as error:
        return Row(method, str(error), seconds=time.monotonic() - started)
    option = plan.option
    return Row(
        method=method,
        workers=option.workers,
        kinds=tuple((count, task.cpus, task.gpus) for task, count in plan.worker_kinds),
        ps=option.ps,
        cpus=option.worker.cpus,
        gpus=option.worker.gpus,
        machines=len({task.node for task in plan.tasks}),
        samples_per_s=plan.samples_per_s,
        traffic_bytes=plan.traffic_bytes,
        seconds=time.monotonic() - started,
        optimal=plan.optimal,
        gap=plan.gap,
    )
