"""Everything that is claimed of the hyper-parameter search, in one document."""

from __future__ import annotations

import importlib
from collections.abc import Iterator

TITLE = "The hyper-parameter search, measured"
PARTS = ("simulated", "held_out", "policy_plots", "real", "preemption")


def measure() -> Iterator[str]:
    """The parts one after the other; each can be run alone."""
    for name in PARTS:
        part = importlib.import_module(f"benchmarks.search.{name}")
        yield f"## {part.TITLE}"
        yield ""
        yield f"    python -m benchmarks {name}"
        yield ""
        yield from part.measure()
        yield ""
