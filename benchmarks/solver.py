"""All measurements of the solver, in one document: `make bench-solver`."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.parts import measure_parts

TITLE = "The solver, measured"
PARTS = (
    "planning",
    "formulations",
    "rule_prices",
    "optimum_share",
    "many_jobs",
    "shards",
    "step_time",
    "measured",
)


def measure() -> Iterator[str]:
    return measure_parts("benchmarks", PARTS)
