"""Searches, trials and time slices as tables for the terminal."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

from rich.cells import cell_len
from rich.table import Table
from rich.text import Text

from framework.search.records import (
    Mode,
    SearchSpec,
    SliceRecord,
    TrialRecord,
    TrialState,
    ValueKind,
    best_trial,
    describe_parameters,
    describe_value,
    ranked,
)
from solver.cli.output import new_table
from solver.units import format_bytes

if TYPE_CHECKING:
    from framework.search.store import SearchSummary

_STYLES = {TrialState.RUNNING: "green", TrialState.FAILED: "red", TrialState.WAITING: "dim"}
_MINUTE_S = 60
COLUMN_PADDING = 3
"""Width of a column's frame and padding, in characters."""
MIN_FOLDED_WIDTH = 20
"""Minimum width of a folded column while others can be left out, in characters."""


@dataclass(frozen=True)
class _Column:
    """A column of a table.

    Attributes:
        folds: whether a cell may have several lines.
        dispensable: the column with the highest number is left out first if the table is too wide; 0 is never left out.
    """

    heading: str
    cells: list[Text]
    folds: bool = False
    dispensable: int = 0

    def width(self) -> int:
        """Returns its minimum width in characters."""
        widest = max([cell_len(self.heading), *(cell.cell_len for cell in self.cells)])
        return min(widest, MIN_FOLDED_WIDTH) if self.folds else widest


def trials_table(
    records: Sequence[TrialRecord],
    spec: SearchSpec,
    width: int,
    *,
    one_line: bool = False,
    speeds: Mapping[int, Mapping[str, float]] = MappingProxyType({}),
    best: TrialRecord | None = None,
) -> Table:
    """Makes a table of trials; the best trial's value is bold.

    Args:
        records: the trials, in the order to show.
        spec: the search.
        width: width of the terminal in characters.
        one_line: whether each trial gets one line, with its parameters truncated.
        speeds: trial -> kind of slot -> samples/s.
        best: the best trial of the search; None to find it among the records.
    """
    best = best or best_trial(records, spec.mode)
    now_s = time.time()
    values = [Text(_number(record.value), "bold" if record is best else "") for record in records]
    columns = (
        _Column("trial", _texts(str(record.number) for record in records)),
        _Column("parameters", _texts(describe_parameters(record.parameters) for record in records), folds=True),
        _Column("state", [Text(record.status, _STYLES.get(record.state, "")) for record in records]),
        _Column("slot", _texts("" if record.slot is None else str(record.slot) for record in records), dispensable=2),
        _Column("steps", _texts(f"{record.step:,}" for record in records)),
        _Column("train loss", _texts(_number(record.loss) for record in records), dispensable=6),
        _Column(f"{spec.value} {spec.metric}", values),
        *_best_columns(records, spec.metric, spec.value),
        _Column("samples/s", _texts(_speeds(speeds.get(record.number, {})) for record in records), dispensable=5),
        _Column("time", _texts(format_duration(record.held_s(now_s)) for record in records), dispensable=1),
    )
    table = _fitting_table("", columns, width)
    for column in table.columns:
        if column.header not in ("trial", "parameters", "state", "slot", "samples/s"):
            column.justify = "right"
        elif column.header == "parameters" and one_line:
            column.no_wrap, column.overflow, column.ratio = True, "ellipsis", 1
            table.expand = True
    return table


def most_interesting(trials: Sequence[TrialRecord], mode: Mode, count: int) -> list[TrialRecord]:
    """Returns at most `count` trials: running ones, then the others by rank."""
    running = [trial for trial in trials if trial.state is TrialState.RUNNING]
    others = ranked([trial for trial in trials if trial.state is not TrialState.RUNNING], mode)
    return [*running, *others][:count]


def slices_table(slices: Sequence[SliceRecord], width: int) -> Table:
    """Makes a table of time slices.

    Args:
        slices: in the order to show.
        width: width of the terminal in characters.
    """
    begin_s = min((record.start_s for record in slices), default=0.0)
    times = (None if record.end_s is None else record.end_s - record.start_s for record in slices)
    steps = (f"{record.from_step:,} to {max(record.from_step, record.to_step):,}" for record in slices)
    gpu_use = ("" if record.gpu_utilisation is None else f"{record.gpu_utilisation:.0%}" for record in slices)
    columns = (
        _Column("start", _texts(f"+{format_duration(record.start_s - begin_s)}" for record in slices)),
        _Column("time", _texts(map(_duration, times))),
        _Column("slot", _texts(str(record.slot) for record in slices)),
        _Column("kind", _texts(record.kind for record in slices), dispensable=3),
        _Column("agent", _texts(record.agent for record in slices), dispensable=2),
        _Column("trial", _texts(str(record.trial) for record in slices)),
        _Column("run", _texts(str(record.run) for record in slices), dispensable=1),
        _Column("chosen because", _texts(record.reason for record in slices), folds=True),
        _Column("score", _texts(_number(record.convergence) for record in slices), dispensable=7),
        _Column("process", _texts(record.process for record in slices), dispensable=4),
        _Column("steps", _texts(steps)),
        _Column("samples/s", _texts(_speed(record.samples_per_s) for record in slices), dispensable=5),
        _Column("ended", _texts(record.outcome or "runs" for record in slices)),
        _Column("suspended in", _texts(_duration(record.suspend_s) for record in slices), dispensable=8),
        _Column("memory", _texts(_bytes(record.rss_bytes) for record in slices), dispensable=9),
        _Column("GPU memory", _texts(_bytes(record.gpu_mem_bytes) for record in slices), dispensable=7),
        _Column("GPU use", _texts(gpu_use), dispensable=6),
    )
    return _fitting_table("", columns, width)


def best_trials_table(
    trials: Sequence[TrialRecord], metric: str, value: ValueKind, names: Sequence[str], folder: str, width: int
) -> Table:
    """Makes a table of the best trials and their checkpoints.

    Args:
        trials: best first.
        metric: the objective.
        value: whether a trial's value is its last or its best.
        names: names of the parameters.
        folder: folder of the search's checkpoints; empty if unknown.
        width: width of the terminal in characters.
    """
    parameters = [
        _Column(name, _texts(describe_value(trial.parameters.get(name, "")) for trial in trials)) for name in names
    ]
    if _width(parameters) > width / 2:
        parameters = [
            _Column("parameters", _texts(describe_parameters(trial.parameters) for trial in trials), folds=True)
        ]
    inside = f"{folder.rstrip('/')}/" if folder else ""
    columns = (
        _Column("trial", _texts(str(trial.number) for trial in trials)),
        *parameters,
        _Column(f"{value} {metric}", _texts(_number(each.value) for each in trials)),
        *_best_columns(trials, metric, value),
        _Column("steps", _texts(str(trial.step) for trial in trials), dispensable=1),
        _Column("state", _texts(str(trial.state) for trial in trials), dispensable=2),
        _Column("checkpoint", _texts((trial.checkpoint or "").removeprefix(inside) for trial in trials), folds=True),
    )
    return _fitting_table("Best trials", columns, width)


def _best_columns(trials: Sequence[TrialRecord], metric: str, value: ValueKind) -> list[_Column]:
    """Makes a column of best values and their steps; of the steps alone if `value` is `best`."""
    reached = [trial.reached() for trial in trials]
    if value == "best":
        return [_Column("at step", _texts("" if each is None else f"{each[1]:,}" for each in reached), dispensable=3)]
    # One column, so that a narrow table never shows the step beside another value.
    cells = _texts("" if each is None else f"{_number(each[0])} at {each[1]:,}" for each in reached)
    return [_Column(f"best {metric} at step", cells, dispensable=3)]


def describe_best(trials: Sequence[TrialRecord], metric: str, mode: Mode) -> str:
    """Describes the best trial: `trial 15 (finished): loss 0.0144, at best 0.0141 at step 300`; empty without one."""
    best = best_trial(trials, mode)
    return "" if best is None else f"trial {best.number} ({best.state}): {best.in_words(metric)}"


def searches_table(searches: Sequence[SearchSummary], width: int) -> Table:
    """Makes a table of searches for a terminal of `width` characters."""
    started = (time.strftime("%Y-%m-%d %H:%M", time.localtime(search.created_s)) for search in searches)
    columns = (
        _Column("search", _texts(search.spec.name for search in searches)),
        _Column("script", _texts(search.spec.script for search in searches), folds=True),
        _Column("policy", _texts(search.spec.policy for search in searches), dispensable=2),
        _Column("started", _texts(started), dispensable=1),
        _Column("state", _texts(map(search_state, searches))),
        _Column("trials", _texts(map(_counts, searches)), folds=True),
    )
    return _fitting_table("", columns, width)


def search_state(search: SearchSummary) -> str:
    """Returns `running`, `complete`, `ended early` or `interrupted`."""
    if search.is_running:
        return "running"
    if search.ended_s is None:
        return "interrupted"
    return "ended early" if search.failure else "complete"


def resume_hint(search: SearchSummary, options: str = "") -> str:
    """Returns why an incomplete search does not run, and the command that resumes it; empty for other searches.

    Args:
        search: the search.
        options: further options for the command.
    """
    name, state = search.spec.name, search_state(search)
    command = f"dike tune --resume {name} {options}".rstrip()
    if state == "interrupted":
        return f"{name} was interrupted: its process has ended; {command} resumes it"
    if state == "ended early":
        return f"{name} has ended early: {search.failure.rstrip('.')}; {command} resumes it"
    return ""


def trial_counts(search: SearchSummary) -> dict[str, int]:
    """Counts trials by state; running ones of a search that does not run count as `interrupted`."""
    return {
        "interrupted" if state is TrialState.RUNNING and not search.is_running else str(state): search.states[state]
        for state in TrialState
        if state in search.states
    }


def _counts(search: SearchSummary) -> str:
    counts = ", ".join(f"{count} {state}" for state, count in trial_counts(search).items())
    return f"{search.spec.trial_count}: {counts}" if counts else f"{search.spec.trial_count}"


def format_duration(seconds: float) -> str:
    """Formats a duration: `12.3 s`, `4:05` or `1:04:05`."""
    if seconds < _MINUTE_S:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), _MINUTE_S)
    hours, minutes = divmod(minutes, _MINUTE_S)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _fitting_table(title: str, columns: Sequence[_Column], width: int) -> Table:
    """Makes a table of the columns that are not empty and that fit into `width` characters."""
    known = [column for column in columns if any(column.cells) or not column.cells]
    while _width(known) > width and (least := max(known, key=lambda column: column.dispensable)).dispensable:
        known.remove(least)
    table = new_table(title, *(column.heading for column in known))
    for shown, column in zip(table.columns, known, strict=True):
        shown.no_wrap = not column.folds
        shown.overflow = "fold" if column.folds else "ellipsis"
    for row in zip(*(column.cells for column in known), strict=True):
        table.add_row(*row)
    return table


def _width(columns: Sequence[_Column]) -> int:
    """Returns a table's minimum width in characters."""
    return 1 + sum(COLUMN_PADDING + column.width() for column in columns)


def _texts(cells: Iterable[str]) -> list[Text]:
    return [Text(cell) for cell in cells]


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def _speeds(by_kind: Mapping[str, float]) -> str:
    return ", ".join(f"{kind} {_speed(speed)}".strip() for kind, speed in sorted(by_kind.items()))


def _speed(samples_per_s: float | None) -> str:
    if samples_per_s is None:
        return ""
    return f"{samples_per_s:.3g}" if samples_per_s < 1000 else f"{samples_per_s:,.0f}"


def _duration(seconds: float | None) -> str:
    return "" if seconds is None else format_duration(seconds)


def _bytes(count: int | None) -> str:
    return "" if count is None else format_bytes(count)
