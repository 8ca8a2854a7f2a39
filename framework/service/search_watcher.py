"""Writes down what a search tells; its trials, losses and time slices are in tables of their own."""

from __future__ import annotations

from framework.search.observer import SearchObserver
from framework.search.records import TrialRecord
from framework.search.slots import Slot
from framework.service.watchers import Notebook


class SearchWatcher(SearchObserver):
    """Writes down what a search tells.

    Args:
        notebook: where it goes.
    """

    def __init__(self, notebook: Notebook) -> None:
        self._book = notebook

    def waiting(self, reason: str) -> None:
        self._book.waits(reason)

    def slot_changed(self, slot: Slot) -> None:
        self._book.waiting = ""
        said = f": {slot.message}" if slot.message and slot.is_gone and not slot.leaving else ""
        self._book.event("task", f"slot {slot.id} on {slot.node} is {slot.state}{said}")

    def trial_started(self, trial: TrialRecord, slot: Slot, reason: str) -> None:
        why = f" ({reason})" if reason else ""
        self._book.event("trial", f"trial {trial.number} got slot {slot.id} on {slot.node}{why}")

    def trial_ended(self, trial: TrialRecord, slot: Slot, outcome: str) -> None:
        value = "" if trial.value is None else f", value {trial.value:.6g}"
        self._book.event("trial", f"trial {trial.number}, slot {slot.id}: {outcome} at step {trial.step}{value}")

    def output(self, text: str) -> None:
        self._book.output("trials", "stderr", text if text.endswith("\n") else f"{text}\n")

    def note(self, text: str) -> None:
        self._book.event("note", text)
