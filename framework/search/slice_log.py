"""Writes down which run of a trial held which slot, when, and how fast it trained."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from executor.trial_messages import RunEnd
from framework.search.records import SliceRecord
from framework.search.slots import ActiveRun, Slot
from framework.search.speeds import Speeds
from framework.search.store import Store


class SliceLog:
    """The time slices of a search.

    Args:
        store: keeps them.
        speeds: what has been measured.
        clock: seconds, monotonic; also the policy's.
        wall_clock: seconds since the epoch.
    """

    def __init__(
        self, store: Store, speeds: Speeds, clock: Callable[[], float], wall_clock: Callable[[], float]
    ) -> None:
        self._store = store
        self._speeds = speeds
        self._clock = clock
        self._wall = wall_clock

    def begin(self, slot: Slot, run: ActiveRun) -> None:
        """A run has got its slot."""
        run.since_s = self._clock()
        run.slice = SliceRecord(
            trial=run.record.number,
            run=run.order.trial.run,
            slot=slot.id,
            agent=slot.node,
            kind=slot.kind,
            start_s=self._wall(),
            reason=run.choice.reason,
            convergence=run.choice.score,
            from_step=run.record.checkpoint_step,
        )
        self._store.save_slice(run.slice)

    def first_step(self, run: ActiveRun) -> None:
        """A run has begun to train. For the policy its slice counts from here: what it took is not the trial's."""
        run.since_s = self._clock()
        if run.slice is not None:
            run.slice.first_step_s = self._wall()
            self._store.save_slice(run.slice)

    def close(self, run: ActiveRun, outcome: str, end: RunEnd | None = None) -> None:
        """A run has ended.

        Args:
            run: which; nothing happens if it never got its slot.
            outcome: see `SliceRecord.outcome`.
            end: what its slot said of its end; None if nothing.
        """
        ended = run.slice
        if ended is None:
            return
        ended.end_s = self._wall()
        ended.outcome = outcome
        ended.to_step = max(run.record.step, ended.from_step)
        ended.samples_per_s = self._speeds.of_run(run.record, ended.run)
        if end is not None:
            ended.suspend_s = end.suspend_s
            for name, value in dataclasses.asdict(end.usage).items():
                setattr(ended, name, value)
        run.record.slot_s += ended.end_s - ended.start_s
        self._store.save_slice(ended)
