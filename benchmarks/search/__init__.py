"""All measurements of the hyper-parameter search, in one document."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.parts import measure_parts

TITLE = "The hyper-parameter search, measured"
PARTS = ("simulated", "held_out", "policy_plots", "real", "preemption")


def measure() -> Iterator[str]:
    return measure_parts("benchmarks.search", PARTS)
