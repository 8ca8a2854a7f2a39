"""Arithmetic on amounts of resources."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import TypeVar

Amounts = Mapping[str, float]
"""Resource -> amount: `cpus`, `mem` and `disk` in MiB, `gpus`, number of `ports`. Missing resources are 0."""

SCALARS = ("cpus", "mem", "disk", "gpus")
"""Mesos' scalar resources; ports are ranges."""
SHARE_RESOURCES = ("cpus", "mem", "gpus")
"""Resources that count for shares of the cluster; disk does not, because few tasks ask for it."""
Key = TypeVar("Key")
_DIGITS = 3  # Mesos' precision


def total(parts: Iterable[Amounts]) -> dict[str, float]:
    """Sum of all parts."""
    return totals((None, amounts) for amounts in parts).get(None, {})


def totals(parts: Iterable[tuple[Key, Amounts]]) -> dict[Key, dict[str, float]]:
    """Sum of the parts of each key."""
    sums: dict[Key, dict[str, float]] = {}
    for key, amounts in parts:
        found = sums.setdefault(key, {})
        for name, amount in amounts.items():
            found[name] = round(found.get(name, 0.0) + amount, _DIGITS)
    return sums


def subtract(amounts: Amounts, taken: Amounts) -> dict[str, float]:
    """Difference for each resource of `amounts`, at least 0."""
    return {name: max(0.0, round(amount - taken.get(name, 0.0), _DIGITS)) for name, amount in amounts.items()}


def covers(amounts: Amounts, other: Amounts) -> bool:
    """Whether `amounts` has at least as much of everything as `other`."""
    return all(amount <= amounts.get(name, 0.0) for name, amount in other.items())


def missing(amounts: Amounts, free: Amounts) -> dict[str, float]:
    """Amounts by which `free` falls short; empty if it does not."""
    return {name: amount for name, amount in subtract(amounts, free).items() if amount > 0}


def elementwise_min(amounts: Amounts, other: Amounts | None) -> dict[str, float]:
    """Minimum of the two for each resource; None counts as infinite."""
    return {name: min(amount, math.inf if other is None else other.get(name, 0.0)) for name, amount in amounts.items()}


def describe(amounts: Amounts) -> str:
    """Formats amounts as text: `2 cpus, 512 MiB, 1 gpu`."""
    words = []
    for name, amount in amounts.items():
        match name:
            case "mem":
                words.append(f"{amount:g} MiB")
            case "disk":
                words.append(f"{amount:g} MiB of disk")
            case _:
                words.append(f"{amount:g} {name.removesuffix('s') if amount == 1 else name}")
    return ", ".join(words) or "nothing"
