"""Remembers what jobs could not use, so that jobs like them need not look at as little again."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass

from framework.service.offer_pool import Supply, is_within

FORGET_S = 120.0
"""After so long a job may look again at offers that it could not use: it may have changed."""
REMEMBERED = 4
"""How many different supplies are remembered that a kind of job could not use."""


@dataclass(frozen=True)
class _Look:
    supply: Supply
    time_s: float


class Fruitless:
    """Looks at offers after which nothing was launched, by kind of job (`Tenant.demand_key`)."""

    def __init__(self) -> None:
        self._looks: dict[Hashable, deque[_Look]] = {}

    def remember(self, key: Hashable, supply: Supply, now_s: float) -> None:
        """A job of this kind had no use for this supply."""
        self._looks.setdefault(key, deque(maxlen=REMEMBERED)).append(_Look(supply, now_s))

    def is_hopeless(self, key: Hashable, supply: Supply, now_s: float) -> bool:
        """Whether a job of this kind could not use as much before; never for one like no other (None)."""
        return any(
            now_s - look.time_s < FORGET_S and is_within(supply, look.supply) for look in self._looks.get(key, ())
        )

    def forget(self, now_s: float) -> None:
        """Forgets what is long ago."""
        self._looks = {key: looks for key, looks in self._looks.items() if now_s - looks[-1].time_s < FORGET_S}
