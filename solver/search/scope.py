"""Which options are bounded together, before any is placed."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from solver.capacity import Ints, Machines


@dataclass(frozen=True)
class Scope:
    """Where the options are placed, and how large they may be.

    Attributes:
        machines: where to place them.
        max_workers: they have 1 to this many workers.
        uplink_bytes_per_s: speed of each rack's uplink, each way; None where racks do not matter.
        ps_may_share: whether a machine may have several parameter servers.
    """

    machines: Machines
    max_workers: int
    uplink_bytes_per_s: float | None = None
    ps_may_share: bool = False

    @property
    def counts(self) -> Ints:
        """The numbers of workers, from one on."""
        return np.arange(1, self.max_workers + 1)
