"""Everything that is claimed of the solver, in one document: `make bench-solver`."""

from __future__ import annotations

import importlib
from collections.abc import Iterator

TITLE = "The solver, measured"
PARTS = ("planning", "formulations", "rule_prices", "optimum_share", "many_jobs", "shards", "step_time", "measured")


def measure() -> Iterator[str]:
    """The parts one after the other; each can be run alone."""
    for name in PARTS:
        part = importlib.import_module(f"benchmarks.{name}")
        yield f"## {part.TITLE}"
        yield ""
        yield f"    python -m benchmarks {name}"
        yield ""
        yield from part.measure()
        yield ""
