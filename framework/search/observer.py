"""Callbacks for the progress of a search."""

from __future__ import annotations

from collections.abc import Sequence

from framework.search.records import TrialRecord
from framework.search.slots import Slot


class SearchObserver:
    """Receives what is worth showing of a search; this base class ignores it.

    All methods are called on the search's thread and must return quickly.

    Attributes:
        is_public: whether people other than the search's user read it, who must not see the script's output.
    """

    is_public = False

    def waiting(self, reason: str) -> None:
        """No slot can start yet; `reason` says what is missing."""

    def trials_changed(self, trials: Sequence[TrialRecord]) -> None: ...

    def slot_changed(self, slot: Slot) -> None: ...

    def trial_started(self, trial: TrialRecord, slot: Slot, reason: str) -> None: ...

    def trial_ended(self, trial: TrialRecord, slot: Slot, outcome: str) -> None:
        """A run of a trial has ended; see `executor.trial_messages.RunEnd.outcome`."""

    def trial_stopped(self, trial: TrialRecord) -> None:
        """A trial was stopped (`--stop`); its run is about to leave the slot."""

    def output(self, text: str) -> None:
        """Shows the end of a failed run's output."""

    def notify(self, text: str) -> None: ...
