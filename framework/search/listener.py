"""What the slots of a search say, taken in: how they are, what their runs report, how these ended."""

from __future__ import annotations

import logging
from collections.abc import Callable

from executor.trial_messages import Losses, RunEnd, SlotStatus, decode_slot_message
from framework.search.endings import Endings
from framework.search.fleet import Fleet
from framework.search.roster import Roster
from framework.search.slots import Slot

logger = logging.getLogger(__name__)

PATIENCE_S = 10.0
"""How long the end of a run waits for reports that were lost on their way."""


class SlotListener:
    """Takes in what slots say.

    Args:
        fleet: the slots.
        roster: the trials.
        endings: is told of runs that have ended.
        clock: seconds, monotonic.
    """

    def __init__(self, fleet: Fleet, roster: Roster, endings: Endings, clock: Callable[[], float]) -> None:
        self._fleet = fleet
        self._roster = roster
        self._endings = endings
        self._clock = clock
        self._waits_since_s: dict[tuple[int, int], float] = {}

    def message(self, data: str) -> bool:
        """A message has come; whether a policy has something new to decide upon.

        Raises:
            BadInputError: if the script has refused its arguments before any trial has trained.
        """
        message = _decoded(data)
        slot = None if message is None else self._fleet.find(message.task_id)
        if message is None or slot is None:
            return False
        slot.heard_s = self._clock()
        if isinstance(message, SlotStatus):
            return self._status(slot, message)
        if not self._losses(message):
            slot.ask_again()
        return False

    def last_words(self, slot: Slot, data: str) -> None:
        """What came with the end of a slot's task: how runs ended that we may not have heard of.

        Raises:
            BadInputError: as `message`.
        """
        message = _decoded(data)
        if not isinstance(message, SlotStatus):
            return
        for losses in message.losses:
            self._losses(losses)
        self._status(slot, message)

    def _losses(self, losses: Losses) -> bool:
        """Takes reports in; false if some before them are missing."""
        record = self._roster.records.get(losses.trial)
        return record is None or record.state.has_ended() or self._roster.received(record, losses)

    def _status(self, slot: Slot, status: SlotStatus) -> bool:
        before = slot.view()
        slot.status = status
        is_news = slot.inherited
        if slot.inherited:
            slot.adopt(status)
        run = slot.current
        if run is not None and status.run == run.key:
            self._roster.checkpointed(run.record, status.checkpoint, status.checkpoint_step)
            self._roster.learned_batch_size(run.record, status.batch_size)
            if status.training and not run.training:
                run.training = slot.has_trained = True
                self._endings.has_trained(run)
        for end in status.ends:
            if not self._must_wait(slot, end):
                is_news |= self._endings.run_ended(slot, end)
        unknown = slot.unknown_run()
        if unknown is not None:
            logger.info("slot %d has never heard of run %s", slot.id, unknown.key)
            trial = unknown.order.trial
            step = unknown.record.checkpoint_step
            end = RunEnd(trial.number, trial.run, "stopped", checkpoint=trial.resume_from, step=step)
            is_news |= self._endings.run_ended(slot, end)
        return is_news or slot.view() != before

    def _must_wait(self, slot: Slot, end: RunEnd) -> bool:
        """Whether the end of a run is not taken in yet, because reports of it are still to come."""
        run = next((run for run in slot.runs if run.key == end.key), None)
        if run is None or slot.is_gone or not self._roster.lacks(run.record, end):
            self._waits_since_s.pop(end.key, None)
            return False
        now_s = self._clock()
        if now_s - self._waits_since_s.setdefault(end.key, now_s) >= PATIENCE_S:
            logger.warning("some reports of trial %d, run %d never came", *end.key)
            return False
        slot.ask_again()
        return True


def _decoded(data: str) -> SlotStatus | Losses | None:
    """What a slot sent; None if it cannot be read."""
    try:
        return decode_slot_message(data)
    except ValueError as error:
        logger.warning("message ignored: %s", error)
        return None
