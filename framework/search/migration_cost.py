"""Measures, within a search, what it costs to resume a trial in another slot."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterable

from framework.policies.trials.interface import PolicySettings
from framework.search.records import SliceRecord

DEFAULT_MOVE_S = 0.5
"""Assumed until measured: on another machine the checkpoint is not yet in the page cache."""
MIN_RUNS = 3
"""Minimum number of runs, both moved and not, for a measurement."""


def with_measured_migration_cost(settings: PolicySettings, slices: Iterable[SliceRecord]) -> PolicySettings:
    """Returns the settings with the measured `move_s`, if the slices of a resumed search suffice.

    It is the median time from decision to first step of runs in another slot than before, minus that of runs in the
    same one, in new processes only. The first run in a slot does not count, as it waits for the zygote's imports.

    Args:
        settings: original settings of the search.
        slices: its time slices, in order of their start.
    """
    begin_s: dict[bool, list[float]] = {True: [], False: []}
    slots: dict[int, int] = {}
    used: set[int] = set()
    for time_slice in slices:
        is_new = time_slice.process != "continued"
        if is_new and time_slice.trial in slots and time_slice.slot in used and time_slice.first_step_s is not None:
            begin_s[time_slice.slot != slots[time_slice.trial]].append(time_slice.first_step_s - time_slice.start_s)
        slots[time_slice.trial] = time_slice.slot
        used.add(time_slice.slot)
    if min(map(len, begin_s.values())) < MIN_RUNS:
        return settings
    moved_s, stayed_s = (statistics.median(begin_s[moved]) for moved in (True, False))
    return dataclasses.replace(settings, move_s=max(0.0, moved_s - stayed_s))
