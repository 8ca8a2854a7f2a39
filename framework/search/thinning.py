"""What a trial has reported, in bounded memory: every report at first, merged evenly as they become many."""

from __future__ import annotations

import math
from bisect import bisect_right

from framework.policies.interface import Reading
from framework.search.losses import LIMIT
from framework.search.records import TrialRecord


def thin(record: TrialRecord) -> None:
    """Merges neighbours among a trial's readings, if they are too many, so that each stands for equally many losses.

    The time slices of the trial are numbered anew with them.
    """
    if len(record.readings) <= LIMIT:
        return
    share = math.ceil(sum(reading.count for reading in record.readings) / (LIMIT // 2))
    merged: list[Reading] = []
    ends: list[int] = []
    for end, reading in enumerate(record.readings, 1):
        if merged and merged[-1].count + reading.count <= share:
            merged[-1], ends[-1] = _together(merged[-1], reading), end
        else:
            merged.append(reading)
            ends.append(end)
    record.readings[:] = merged
    record.slices[:] = [bisect_right(ends, before) for before in record.slices]


def _together(first: Reading, second: Reading) -> Reading:
    count = first.count + second.count
    # Not the sum of all losses, which may be too large for a number.
    loss = first.loss * (first.count / count) + second.loss * (second.count / count)
    is_nan = any(map(math.isnan, (first.low, first.high, second.low, second.high)))
    low, high = (math.nan, math.nan) if is_nan else (min(first.low, second.low), max(first.high, second.high))
    return Reading(second.train_s, second.step, loss, low, high, count)
