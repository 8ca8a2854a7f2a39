"""Searches, trials and time slices as tables for the terminal."""

from __future__ import annotations

import time
from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from framework.search.records import Mode, SliceRecord, TrialRecord, TrialState
from framework.search.store import SearchSummary
from solver.cli.tables import new_table
from solver.units import format_bytes

_STYLES = {TrialState.RUNNING: "green", TrialState.FAILED: "red", TrialState.WAITING: "dim"}
_MINUTE_S = 60


def trials_table(records: Sequence[TrialRecord], mode: Mode) -> Table:
    """What the trials are and how they stand; the best value is in bold.

    Args:
        records: the trials, in the order to show them.
        mode: whether the least or the greatest value is best.
    """
    columns = ("trial", "parameters", "state", "slot", "steps", "loss", "value", "convergence", "time on slot")
    table = new_table("", *columns)
    for column in table.columns[4:]:
        column.justify = "right"
    best: TrialRecord | None = None
    for record in records:
        if record.state is not TrialState.FAILED and record.beats(best, mode):
            best = record
    for record in records:
        table.add_row(
            str(record.number),
            ", ".join(f"{name}={_value(value)}" for name, value in record.parameters.items()),
            Text(str(record.state), _STYLES.get(record.state, "")),
            "" if record.slot is None else str(record.slot),
            f"{record.step:,}",
            _number(record.loss),
            Text(_number(record.value), "bold" if record is best else ""),
            _number(record.convergence),
            format_duration(record.slot_s),
        )
    return table


def slices_table(slices: Sequence[SliceRecord]) -> Table:
    """Which trial held which slot, when, and why; columns of which nothing is known are left out."""
    begin_s = min((record.start_s for record in slices), default=0.0)
    columns: dict[str, list[str]] = {
        "start": [f"+{format_duration(record.start_s - begin_s)}" for record in slices],
        "time": [_duration(None if record.end_s is None else record.end_s - record.start_s) for record in slices],
        "slot": [f"{record.slot} on {record.agent}" for record in slices],
        "trial": [str(record.trial) for record in slices],
        "run": [str(record.run) for record in slices],
        "chosen because": [record.reason for record in slices],
        "score": [_number(record.convergence) for record in slices],
        "steps": [f"{record.from_step:,} to {max(record.from_step, record.to_step):,}" for record in slices],
        "ended": [record.outcome or "runs" for record in slices],
        "suspended in": [_duration(record.suspend_s) for record in slices],
        "memory": [_bytes(record.rss_bytes) for record in slices],
        "GPU memory": [_bytes(record.gpu_mem_bytes) for record in slices],
        "GPU use": ["" if record.gpu_utilisation is None else f"{record.gpu_utilisation:.0%}" for record in slices],
    }
    known = {heading: cells for heading, cells in columns.items() if any(cells)}
    table = new_table("", *known)
    for row in zip(*known.values(), strict=True):
        table.add_row(*row)
    return table


def searches_table(searches: Sequence[SearchSummary]) -> Table:
    """What searches there are and how they stand."""
    table = new_table("", "search", "script", "policy", "begun", "state", "trials")
    for search in searches:
        counts = ", ".join(f"{search.states[state]} {state}" for state in TrialState if state in search.states)
        table.add_row(
            search.spec.name,
            search.spec.script,
            search.spec.policy,
            time.strftime("%Y-%m-%d %H:%M", time.localtime(search.created_s)),
            search_state(search),
            f"{search.spec.trial_count}: {counts}" if counts else f"{search.spec.trial_count}",
        )
    return table


def search_state(search: SearchSummary) -> str:
    """`running`, `complete`, `ended early` or `interrupted`."""
    if search.is_running:
        return "running"
    if search.ended_s is None:
        return "interrupted"
    return "ended early" if search.failure else "complete"


def format_duration(seconds: float) -> str:
    """`12.3 s`, `4:05` or `1:04:05`."""
    if seconds < _MINUTE_S:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), _MINUTE_S)
    hours, minutes = divmod(minutes, _MINUTE_S)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _value(value: object) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def _duration(seconds: float | None) -> str:
    return "" if seconds is None else format_duration(seconds)


def _bytes(count: int | None) -> str:
    return "" if count is None else format_bytes(count)
