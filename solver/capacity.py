"""Numbers of tasks that fit on machines, for many machines, tasks and loads at once."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from solver.nodes import NodeKind
from solver.resources import TaskResources

Ints = NDArray[np.int64]


class Machines:
    """Machines of several kinds as arrays, one row for each kind.

    Attributes:
        network_bytes_per_s: speed of their network cards, each way.
    """

    def __init__(self, kinds: Sequence[NodeKind]) -> None:
        self.kinds = tuple(kinds)
        self.counts = np.array([kind.count for kind in kinds], dtype=np.int64)
        self.network_bytes_per_s = np.array([kind.network_bytes_per_s for kind in kinds])
        self._have = np.array([kind.amounts for kind in kinds], dtype=np.int64)

    def capacity(self, tasks: Sequence[TaskResources], loads: Sequence[Sequence[TaskResources]] = ((),)) -> Ints:
        """Number of tasks of each size that fit on one machine beside each load; as `NodeKind.room_for`.

        Returns:
            An array of kinds x tasks x loads; -1 where the load itself does not fit.
        """
        taken = np.array([[sum(column) for column in _columns(load)] for load in loads], dtype=np.int64)
        free = self._have[:, None, :] - taken
        most = np.empty((len(self.kinds), len(tasks), len(loads)), dtype=np.int64)
        for index, task in enumerate(tasks):
            need = np.array(task.amounts, dtype=np.int64)
            wanted = need > 0
            most[:, index] = (free[:, :, wanted] // need[wanted]).min(axis=2)
        return np.where(free.min(axis=2)[:, None, :] < 0, -1, most)


def _columns(load: Sequence[TaskResources]) -> list[tuple[int, ...]]:
    return list(zip(*(task.amounts for task in load), strict=True)) if load else [()] * 4
