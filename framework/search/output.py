"""Output of trials in the database: all runs of a trial in sequence, without the middle if it is long."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from sqlalchemy import ColumnElement, delete, func, insert, select, update
from sqlalchemy.engine import Connection

from executor.messages import storable
from executor.trial_messages import TrialOutput
from framework.scheduler.records import OutputChunk
from framework.search.tables import OUTPUT, SLICES
from solver.units import format_bytes

TRIAL_BYTES = 512 * 1024
"""Maximum output kept per trial."""
SEARCH_BYTES = 64 * 2**20
"""Maximum output kept of all trials together, divided evenly."""
# Shares of the limit kept when the middle is removed; the rest is free, so that this is rarely needed.
_FIRST_SHARE, _LAST_SHARE = 0.25, 0.5


def limit_of(trial_count: int) -> int:
    return min(TRIAL_BYTES, SEARCH_BYTES // trial_count)


def task_of(trial: int) -> str:
    return f"trial:{trial}"


def add_output(connection: Connection, search_id: int, pieces: Sequence[TrialOutput]) -> None:
    """Stores output of trials, given in order and each byte once."""
    rows = [
        {
            "search_id": search_id,
            "trial": piece.trial,
            "run": piece.run,
            "offset": piece.offset,
            "bytes": len(piece.data),
            "skipped": piece.skipped,
            "text": storable(piece.data.decode(errors="replace")),
        }
        for piece in pieces
    ]
    connection.execute(insert(OUTPUT), rows)


def kept_bytes(connection: Connection, search_id: int, trial: int) -> int:
    query = select(func.coalesce(func.sum(OUTPUT.c.bytes), 0)).where(_of_trial(search_id, trial))
    return int(connection.execute(query).scalar_one())


def received_bytes(connection: Connection, search_id: int, trial: int, run: int) -> int:
    """Returns the offset up to which output of a run is stored."""
    condition = _of_trial(search_id, trial) & (OUTPUT.c.run == run)
    query = select(func.coalesce(func.max(OUTPUT.c.offset + OUTPUT.c.bytes), 0)).where(condition)
    return int(connection.execute(query).scalar_one())


def thin_output(connection: Connection, search_id: int, trial: int, limit_bytes: int) -> None:
    """Deletes the middle of a trial's output, so that less than the limit remains."""
    query = select(OUTPUT.c.number, OUTPUT.c.bytes, OUTPUT.c.skipped).where(_of_trial(search_id, trial))
    rows = connection.execute(query.order_by(OUTPUT.c.number)).all()
    first = _fitting([row.bytes for row in rows], limit_bytes * _FIRST_SHARE)
    last = max(1, _fitting([row.bytes for row in reversed(rows)], limit_bytes * _LAST_SHARE))
    middle = rows[first : len(rows) - last]
    after = rows[-last]
    if middle:
        gone = (OUTPUT.c.number >= middle[0].number) & (OUTPUT.c.number <= middle[-1].number)
        connection.execute(delete(OUTPUT).where(_of_trial(search_id, trial), gone))
        skipped = after.skipped + sum(row.bytes + row.skipped for row in middle)
        connection.execute(update(OUTPUT).where(OUTPUT.c.number == after.number).values(skipped=skipped))
    if after.bytes > limit_bytes * (1 - _FIRST_SHARE):
        _cut(connection, after.number, int(limit_bytes * _LAST_SHARE))


def _cut(connection: Connection, number: int, size: int) -> None:
    """Deletes all but the last bytes of a piece that is too large."""
    condition = OUTPUT.c.number == number
    row = connection.execute(select(OUTPUT).where(condition)).one()
    text = row.text.encode()[-size:].decode(errors="ignore")
    gone = row.bytes - size
    values = {"text": text, "offset": row.offset + gone, "bytes": size, "skipped": row.skipped + gone}
    connection.execute(update(OUTPUT).where(condition).values(values))


def load_output(
    connection: Connection, search_id: int, trial: int, *, after: int = 0, limit: int | None = None
) -> list[OutputChunk]:
    """Returns at most `limit` pieces of a trial's output after the piece numbered `after`, oldest first.

    Additional lines mark the start of each run, and deleted output.
    """
    condition = select(OUTPUT).where(_of_trial(search_id, trial))
    rows = connection.execute(condition.where(OUTPUT.c.number > after).order_by(OUTPUT.c.number).limit(limit)).all()
    if not rows:
        return []
    before = condition.where(OUTPUT.c.number <= after).order_by(OUTPUT.c.number.desc()).limit(1)
    last = connection.execute(before).first() if after else None
    query = select(SLICES.c.run, SLICES.c.agent, SLICES.c.from_step)
    slices = connection.execute(query.where(SLICES.c.search_id == search_id, SLICES.c.trial == trial))
    begun = {row.run: f" on {row.agent}, from step {row.from_step}" for row in slices}
    run, is_line_open = (None, False) if last is None else (last.run, not last.text.endswith("\n"))
    chunks = []
    for row in rows:
        notes = [] if row.run == run else [f"run {row.run}{begun.get(row.run, '')}"]
        notes += [f"{format_bytes(row.skipped)} left out"] if row.skipped else []
        said = "".join(f"--- {note} ---\n" for note in notes)
        text = ("\n" if said and is_line_open else "") + said + row.text
        chunks.append(OutputChunk(row.number, task_of(trial), "stdout", text))
        run, is_line_open = row.run, not text.endswith("\n")
    return chunks


def _of_trial(search_id: int, trial: int) -> ColumnElement[bool]:
    return (OUTPUT.c.search_id == search_id) & (OUTPUT.c.trial == trial)


def _fitting(sizes: Sequence[int], limit: float) -> int:
    """Returns how many leading sizes fit into the limit together."""
    return sum(total <= limit for total in itertools.accumulate(sizes))
