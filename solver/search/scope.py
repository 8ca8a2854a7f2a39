"""The options that are bounded together."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from solver.capacity import Ints, Machines


@dataclass(frozen=True)
class Scope:
    """Machines and limits of the options.

    Attributes:
        max_workers: maximum workers; the minimum is 1.
        uplink_bytes_per_s: speed of each rack's uplink, each way; None if racks do not matter.
    """

    machines: Machines
    max_workers: int
    uplink_bytes_per_s: float | None = None
    ps_may_share: bool = False

    @property
    def counts(self) -> Ints:
        return np.arange(1, self.max_workers + 1)
