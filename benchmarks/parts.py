"""A document of several parts, each of which can be run alone."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence


def measure_parts(package: str, names: Sequence[str]) -> Iterator[str]:
    """The lines of all parts, one after the other.

    Args:
        package: that holds them.
        names: modules with a `TITLE` and a `measure`, in order.
    """
    for name in names:
        part = importlib.import_module(f"{package}.{name}")
        yield f"## {part.TITLE}"
        yield ""
        yield f"    python -m benchmarks {name}"
        yield ""
        yield from part.measure()
        yield ""
