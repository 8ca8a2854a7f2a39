"""The fastest placement of one job on the free resources."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from solver.jobs.allocation import Counts
from solver.jobs.forms import Form
from solver.jobs.free_capacity import FreeCapacity
from solver.jobs.job import PlanJob
from solver.jobs.packing import JobPlacement, Packer
from solver.units import SPEED_TIE_SHARE


@dataclass(frozen=True)
class Found:
    """A placement, not reserved, and the workers and parameter servers requested."""

    placement: JobPlacement
    wanted: Counts


class OneJob:
    def __init__(self, packer: Packer, free: FreeCapacity) -> None:
        self._packer = packer
        self._free = free
        self._room: dict[Form, int] = {}
        self._too_many: dict[Form, int] = {}

    def clear_failures(self) -> None:
        """Clears known failures; call it when resources are released, as failed requests may fit now."""
        self._room.clear()
        self._too_many.clear()

    def fastest(self, job: PlanJob, forms: Sequence[Form], samples_per_s: float = 0.0) -> Found | None:
        """Finds the fastest placement in any of the forms."""
        floor, best = samples_per_s, None
        for promised, form, counts in self._offers(job, forms, floor):
            if promised <= floor:
                break
            placement = self._packer.place_most(form, *counts, job.min_workers)
            if placement is None:
                self._too_many[form] = min(job.min_workers, self._too_many.get(form, job.min_workers))
                continue
            if placement.workers < counts[0]:
                # The free resources are fragmented, and the next job will not find larger pieces.
                self._room[form] = placement.workers
            self._packer.release(placement)
            if placement.samples_per_s > floor:
                floor, best = placement.samples_per_s, Found(placement, counts)
        return best

    def _offers(self, job: PlanJob, forms: Sequence[Form], floor: float) -> list[tuple[float, Form, Counts]]:
        """Samples/s that the table predicts for the free resources in sum, and the counts for it, best first."""
        offers = []
        for form in forms:
            most = form.most_workers(job)
            if job.min_workers > most or job.min_workers >= self._too_many.get(form, math.inf):
                continue
            most = max(job.min_workers, min(most, self._room.get(form, most)))
            if floor * form.table.least_s_per_sample(job.min_workers, most) >= 1:
                continue
            counts = form.table.fastest(job.min_workers, most, self._free.total(form.usable), SPEED_TIE_SHARE)
            # If not even the minimum fits the sum, parameter server and chief may fit elsewhere.
            counts = counts or (job.min_workers, 1)
            offers.append((1 / form.table.s_per_sample(*counts), form, counts))
        return sorted(offers, key=lambda offer: -offer[0])
