"""Shows a running search: a live table of its trials on a terminal, plain lines elsewhere."""

from __future__ import annotations

import io
import json
import sys
import time
from collections import Counter
from collections.abc import Sequence

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from dike.trial.search_command import FRAME_PREFIX
from framework.cli.console import describe_outputs
from framework.cli.search_tables import (
    best_trials_table,
    describe_best,
    most_interesting,
    trials_table,
)
from framework.search.observer import SearchObserver
from framework.search.records import (
    SearchOutcome,
    SearchSpec,
    TrialRecord,
    TrialState,
    best_trial,
    best_trials,
    describe_parameters,
)
from framework.search.slots import Slot

SUMMARY_INTERVAL_S = 10.0
BEST_SHOWN = 5
NOTEBOOK_WIDTH, NOTEBOOK_LINES = 120, 32
"""Size of a table in a notebook, in characters and lines."""
_PRE = '<pre style="white-space:pre;overflow-x:auto;line-height:normal">{code}</pre>'
_STATES = (
    TrialState.WAITING,
    "starting",
    "restarting",
    *(state for state in TrialState if state is not TrialState.WAITING),
)
LINES_BESIDE_TABLE = 9
"""Lines of a terminal that the live table leaves for headings and notes."""


class PlainSearchView(SearchObserver):
    """Prints lines for pipes, logs and CI: first starts, ends, and a regular summary."""

    def __init__(self, console: Console, spec: SearchSpec) -> None:
        self._console = console
        self._spec = spec
        self._waiting_for = ""
        self._summary_s = time.monotonic()

    def say(self, text: str) -> None:
        """Prints a line of Dike's own."""
        self._console.print(f"dike: {text}", markup=False, highlight=False, soft_wrap=True)

    def waiting(self, reason: str) -> None:
        if reason != self._waiting_for:
            self._waiting_for = reason
            self.say(f"waiting: {reason}")

    def trials_changed(self, trials: Sequence[TrialRecord]) -> None:
        now = time.monotonic()
        if now - self._summary_s >= SUMMARY_INTERVAL_S:
            self._summary_s = now
            self.say(summary(trials, self._spec))

    def slot_changed(self, slot: Slot) -> None:
        if slot.is_gone:
            self.say(f"slot {slot.id} on {slot.node} has ended")
        elif slot.is_up:
            kind = f" ({slot.kind})" if slot.kind else ""
            self.say(f"slot {slot.id} on {slot.node}{kind} is up")

    def trial_started(self, trial: TrialRecord, slot: Slot, reason: str) -> None:
        if trial.runs == 1:
            self.say(f"trial {trial.number} ({describe_parameters(trial.parameters)}) starts in slot {slot.id}")

    def trial_ended(self, trial: TrialRecord, slot: Slot, outcome: str) -> None:
        if trial.state is TrialState.FINISHED:
            value = trial.in_words(self._spec.metric)
            self.say(
                f"trial {trial.number} ({describe_parameters(trial.parameters)}) finished at step {trial.step}: {value}"
            )

    def trial_stopped(self, trial: TrialRecord) -> None:
        value = "" if trial.value is None else f": {self._spec.metric} {trial.value:.4g}"
        self.say(
            f"trial {trial.number} ({describe_parameters(trial.parameters)}) stopped at step {trial.step}{value} "
            f"(--stop {self._spec.stop})"
        )

    def output(self, text: str) -> None:
        self._console.print("end of the failed trial's output:", style="bold")
        self._console.print(text.rstrip(), markup=False, highlight=False)

    def notify(self, text: str) -> None:
        self.say(text)


class LiveSearchView(PlainSearchView):
    """Shows a live table of the trials below the lines, on a terminal."""

    def __init__(self, console: Console, spec: SearchSpec) -> None:
        super().__init__(console, spec)
        self._live = Live(console=console, refresh_per_second=4, transient=True)

    def __enter__(self) -> LiveSearchView:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def trials_changed(self, trials: Sequence[TrialRecord]) -> None:
        self._live.update(live_frame(trials, self._spec, *self._console.size))

    def slot_changed(self, slot: Slot) -> None:
        """The table shows it."""

    def trial_started(self, trial: TrialRecord, slot: Slot, reason: str) -> None:
        """The table shows it."""


class NotebookSearchView(PlainSearchView):
    """Prints for a notebook, in which `dike.tune` shows the output.

    Changed tables go to standard error as JSON after `FRAME_PREFIX`, lines to the console.
    """

    def __init__(self, console: Console, spec: SearchSpec) -> None:
        super().__init__(console, spec)
        self._shown = ""

    def trials_changed(self, trials: Sequence[TrialRecord]) -> None:
        page = Console(record=True, file=io.StringIO(), width=NOTEBOOK_WIDTH, force_jupyter=False)
        page.print(live_frame(trials, self._spec, NOTEBOOK_WIDTH, NOTEBOOK_LINES))
        text = page.export_text(clear=False)
        if text != self._shown:
            self._shown = text
            frame = {"text/plain": text, "text/html": page.export_html(inline_styles=True, code_format=_PRE)}
            print(FRAME_PREFIX + json.dumps(frame), file=sys.stderr, flush=True)

    def slot_changed(self, slot: Slot) -> None:
        """The table shows it."""

    def trial_started(self, trial: TrialRecord, slot: Slot, reason: str) -> None:
        """The table shows it."""

    def trial_ended(self, trial: TrialRecord, slot: Slot, outcome: str) -> None:
        """The table shows it."""

    def trial_stopped(self, trial: TrialRecord) -> None:
        """The table shows it."""


def live_frame(trials: Sequence[TrialRecord], spec: SearchSpec, width: int, height: int) -> Group:
    """Makes a summary and a table of trials that fit into `width` characters and `height` lines."""
    shown = most_interesting(trials, spec.mode, max(3, height - LINES_BESIDE_TABLE))
    # Rich cuts off the end if there is not enough room.
    return Group(
        Text(summary(trials, spec)), trials_table(shown, spec, width, one_line=True, best=best_trial(trials, spec.mode))
    )


def summary(trials: Sequence[TrialRecord], spec: SearchSpec) -> str:
    """Describes the state of the search in one line."""
    # For running trials, `starting` and `restarting (try 2)` are more precise than the state.
    counts = Counter(trial.status.partition(" ")[0] for trial in trials)
    states = ", ".join(f"{counts[state]} {state}" for state in _STATES if counts[state])
    best = describe_best(trials, spec.metric, spec.mode)
    best = f"; best: {best}" if best else ""
    return f"{len(trials)} trials: {states or 'none yet'}{best}"


def print_result(console: Console, result: SearchOutcome, spec: SearchSpec) -> None:
    """Prints the best trials and the folder of the checkpoints."""
    best = best_trials(result.trials, result.mode)[:BEST_SHOWN]
    if best:
        # If a function defines the space, trials may have different parameters.
        names = list(dict.fromkeys(name for trial in best for name in trial.parameters))
        console.print(best_trials_table(best, spec.metric, spec.value, names, result.checkpoint_dir, console.width))
    console.print(f"Checkpoints are in {result.checkpoint_dir}", markup=False, highlight=False, soft_wrap=True)
    first = result.best
    for text in describe_outputs(f"{result.checkpoint_dir}/trial-{first.number}") if first is not None else ():
        console.print(f"Best trial: {text}", markup=False, highlight=False, soft_wrap=True)
