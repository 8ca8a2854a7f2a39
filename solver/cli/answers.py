"""Runs the `plan` command: makes the plans within the time limit, prints and draws them.

Modules needed for some questions only are imported there, so that a simple plan starts quickly.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from solver.choices import METHODS, Order
from solver.cli.output import Format, console, print_json
from solver.cli.progress import PlanningStatus
from solver.cli.tables import print_plan, print_profile
from solver.cluster import Cluster
from solver.deadline import PLANNER_TIME_SHARE, Observer, TimeOverError, call_with_timeout, plan_with_timeout
from solver.plan import Plan
from solver.planner import make_plan
from solver.request import PlanRequest

if TYPE_CHECKING:
    from solver.comparison import Comparison, Row
    from solver.jobs import PlanJob

Result = TypeVar("Result")


@dataclass(frozen=True)
class Answers:
    """Options of the command.

    Attributes:
        time_limit_s: maximum planning time; None for the planner's own limit.
    """

    method: str
    time_limit_s: float | None
    picture: Path | None
    output_format: Format

    def plan(self, request: PlanRequest) -> None:
        made = self._make_plan(request)
        if self.picture is not None:
            # matplotlib takes a while to load, and most runs draw nothing.
            from solver.drawing.picture import draw_plan

            draw_plan(made, self.picture)
        if self.output_format is Format.JSON:
            print_json(made.to_json())
            return
        print_profile(console(), request.profile)
        print_plan(console(), made)
        self._print_picture_path()

    def variants(self, requests: Mapping[str, PlanRequest], title: str) -> None:
        """Makes and prints one plan for each request, side by side."""
        from solver.cli.comparison_tables import print_variants
        from solver.variants import plan_variants

        share = None if self.time_limit_s is None else self.time_limit_s / len(requests)
        made = plan_variants(requests, dataclasses.replace(self, time_limit_s=share)._make_plan)
        if self.picture is not None:
            from solver.drawing.variants_plot import draw_variants

            draw_variants(made, title, self.picture)
        if self.output_format is Format.JSON:
            print_json([variant.to_json() for variant in made])
            return
        print_variants(console(), made, title)
        self._print_picture_path()

    def comparison(self, request: PlanRequest) -> None:
        from solver.cli.comparison_tables import print_comparison
        from solver.comparison import Comparison, Row, compare

        rows: list[Row] = []
        with PlanningStatus(console(stderr=True), "comparing methods"):
            if self.time_limit_s is None:
                made = compare(request)
            else:
                try:
                    work = functools.partial(_compare, self._limited(request))
                    made = call_with_timeout(work, self.time_limit_s, rows.append)
                except TimeOverError as error:
                    if all(row.reason for row in rows):
                        raise
                    late = [Row(name, str(error)) for name in METHODS if name not in {row.method for row in rows}]
                    made = Comparison.of([*rows, *late])
        self._print(made, print_comparison)

    def jobs(self, jobs: Sequence[PlanJob], cluster: Cluster, order: Order) -> None:
        from solver.cli.jobs_tables import print_jobs_plan
        from solver.jobs import plan_jobs

        own_limit_s = None if self.time_limit_s is None else PLANNER_TIME_SHARE * self.time_limit_s
        made = self._call_with_status(f"planning {len(jobs)} jobs", plan_jobs, jobs, cluster, order, own_limit_s)
        self._print(made, print_jobs_plan)

    def _limited(self, request: PlanRequest) -> PlanRequest:
        """The request with a time limit that the planner keeps itself, before the child process is killed."""
        if self.time_limit_s is None:
            return request
        return dataclasses.replace(request, time_limit_s=PLANNER_TIME_SHARE * self.time_limit_s)

    def _make_plan(self, request: PlanRequest) -> Plan:
        planner = functools.partial(_plan, self.method)
        with PlanningStatus(console(stderr=True), f"planning for {request.profile.name}") as status:
            if self.time_limit_s is None:
                return planner(request, status)
            return plan_with_timeout(request, self.time_limit_s, status, planner)

    def _call_with_status(self, text: str, function: Callable[..., Result], *arguments: Any) -> Result:
        with PlanningStatus(console(stderr=True), text) as status:
            if self.time_limit_s is None:
                return function(*arguments)
            made: Result = call_with_timeout(functools.partial(_call, function, arguments), self.time_limit_s, status)
            return made

    def _print(self, made: Any, print_table: Callable[..., None]) -> None:
        if self.output_format is Format.JSON:
            print_json(made.to_json())
        else:
            print_table(console(), made)

    def _print_picture_path(self) -> None:
        if self.picture is not None:
            console().print(f"The picture is in {self.picture}.")


def _plan(method: str, request: PlanRequest, on_progress: Observer) -> Plan:
    if method == "dike":
        return make_plan(request, on_progress)
    from solver.methods import plan_with

    return plan_with(method, request, on_progress)


def _call(function: Callable[..., Result], arguments: Sequence[Any], on_progress: Observer) -> Result:
    return function(*arguments)


def _compare(request: PlanRequest, on_row: Callable[[Row], None]) -> Comparison:
    from solver.comparison import compare

    return compare(request, on_row=on_row)
