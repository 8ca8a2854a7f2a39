"""What it costs to go on with a trial in another slot than before, measured in the search itself."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterable

from framework.policies.trials.interface import PolicySettings
from framework.search.records import SliceRecord

DEFAULT_MOVE_S = 0.5
"""Stands in until it has been measured (assumption): another machine has not got the checkpoint in its memory yet."""
LEAST_COUNT = 3
"""How many trials must have gone on elsewhere, and as many where they were, before the difference says anything."""


def with_measured_migration_cost(settings: PolicySettings, slices: Iterable[SliceRecord]) -> PolicySettings:
    """Settings with the measured `move_s`, if the slices of a search that goes on tell.

    It is the median time from the decision to the first step of runs that went on in another slot, less that of runs
    that went on in the same one, all of them in new processes. The first run in a slot does not count: it waits for the
    zygote's imports.

    Args:
        settings: what the search was begun with.
        slices: its time slices, in the order in which they began.
    """
    begin_s: dict[bool, list[float]] = {True: [], False: []}
    slots: dict[int, int] = {}
    used: set[int] = set()
    for piece in slices:
        is_new = piece.process != "continued"
        if is_new and piece.trial in slots and piece.slot in used and piece.first_step_s is not None:
            begin_s[piece.slot != slots[piece.trial]].append(piece.first_step_s - piece.start_s)
        slots[piece.trial] = piece.slot
        used.add(piece.slot)
    if min(map(len, begin_s.values())) < LEAST_COUNT:
        return settings
    moved_s, stayed_s = (statistics.median(begin_s[moved]) for moved in (True, False))
    return dataclasses.replace(settings, move_s=max(0.0, moved_s - stayed_s))
