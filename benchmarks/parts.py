"""Documents of several parts, each of which can be run alone."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence


def measure_parts(package: str, names: Sequence[str]) -> Iterator[str]:
    """Yields the lines of all parts: modules of `package` with a `TITLE` and a `measure`."""
    for name in names:
        part = importlib.import_module(f"{package}.{name}")
        yield f"## {part.TITLE}"
        yield ""
        yield f"    python -m benchmarks {name}"
        yield ""
        yield from part.measure()
        yield ""
