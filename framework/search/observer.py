"""What a search tells whoever watches it."""

from __future__ import annotations

from collections.abc import Sequence

from framework.search.records import TrialRecord
from framework.search.slots import Slot


class SearchObserver:
    """Hears of everything worth showing; this base class ignores it all.

    All methods are called on the search's thread and must return soon.

    Attributes:
        is_public: whether others than the search's user read it: what a script says of its end is not for them.
    """

    is_public = False

    def waiting(self, reason: str) -> None:
        """No slot can start yet; `reason` says what is missing."""

    def trials_changed(self, trials: Sequence[TrialRecord]) -> None:
        """Something of the trials is new: a state, a loss."""

    def slot_changed(self, slot: Slot) -> None:
        """A slot came or went."""

    def trial_started(self, trial: TrialRecord, slot: Slot, reason: str) -> None:
        """A trial was given a slot."""

    def trial_ended(self, trial: TrialRecord, slot: Slot, outcome: str) -> None:
        """A run of a trial has ended; see `executor.trial_messages.RunEnd.outcome`."""

    def trial_stopped(self, trial: TrialRecord) -> None:
        """A trial has been ended for good (`--stop`); its run is about to leave its slot."""

    def output(self, text: str) -> None:
        """The end of a failed run's output."""

    def notify(self, text: str) -> None:
        """Anything else a user should know."""
