"""Amounts of resources, and the arithmetic of them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import TypeVar

Amounts = Mapping[str, float]
"""Resource -> amount: `cpus`, `mem` and `disk` in MiB, `gpus`, `ports`. What is not named is 0."""

SCALARS = ("cpus", "mem", "disk", "gpus")
"""What Mesos counts; ports are named one by one."""
SHARE_RESOURCES = ("cpus", "mem", "gpus")
"""Of what a framework's or a user's share of a cluster is counted: few tasks ask for disk."""
Key = TypeVar("Key")
_DIGITS = 3
"""Mesos counts in thousandths."""


def total(parts: Iterable[Amounts]) -> dict[str, float]:
    """All of these together."""
    return totals((None, amounts) for amounts in parts).get(None, {})


def totals(parts: Iterable[tuple[Key, Amounts]]) -> dict[Key, dict[str, float]]:
    """Key -> all that was given under that key, together."""
    sums: dict[Key, dict[str, float]] = {}
    for key, amounts in parts:
        so_far = sums.setdefault(key, {})
        for name, amount in amounts.items():
            so_far[name] = round(so_far.get(name, 0.0) + amount, _DIGITS)
    return sums


def subtract(amounts: Amounts, taken: Amounts) -> dict[str, float]:
    """What is subtract of amounts once others are taken from them, 0 at least."""
    return {name: max(0.0, round(amount - taken.get(name, 0.0), _DIGITS)) for name, amount in amounts.items()}


def covers(amounts: Amounts, other: Amounts) -> bool:
    """Whether there is at least as much of everything as in the other."""
    return all(amount <= amounts.get(name, 0.0) for name, amount in other.items())


def missing(amounts: Amounts, free: Amounts) -> dict[str, float]:
    """By how much what is free is too little for these amounts; empty if it is not."""
    return {name: amount for name, amount in subtract(amounts, free).items() if amount > 0}


def elementwise_min(amounts: Amounts, other: Amounts | None) -> dict[str, float]:
    """The smaller of two, for each resource; None is more than anything."""
    return {name: min(amount, math.inf if other is None else other.get(name, 0.0)) for name, amount in amounts.items()}


def describe(amounts: Amounts) -> str:
    """In words: `2 cpus, 512 MiB, 1 gpu`."""
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
