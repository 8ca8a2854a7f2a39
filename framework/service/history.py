"""Events, output and progress of a service's jobs."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from sqlalchemy import Table, delete, func, insert, select, update
from sqlalchemy.engine import Connection

from framework.scheduler.records import JobEvent, OutputChunk, ProgressPoint
from framework.service import queries
from framework.service.database import ServiceDatabase
from framework.service.tables import EVENTS, JOBS, OUTPUT, PROGRESS, RECEIVED
from framework.service.users import UserLimits, no_limits
from solver.units import format_bytes

OUTPUT_LIMIT_CHARACTERS = 8 * 2**20
"""Maximum output of a job in the database; its sandboxes hold all of it."""
EVENTS_LIMIT = 10_000
"""Maximum number of events of a job; beyond it the older half is deleted."""
KEPT_FRACTION = 0.75
"""Fraction of the limit to which a user's output is cut when it exceeds it, so that cuts are rare."""
PROGRESS_LIMIT = 20_000
"""Maximum number of reports of a job; beyond it every second one is deleted."""


class JobHistory:
    def __init__(self, database: ServiceDatabase, limits: Callable[[str], UserLimits] = no_limits) -> None:
        self._database = database
        self._limits = limits
        self._users: dict[str, str] = {}
        self._output_kept: dict[str, int] = {}
        self._output_kept_of_users: dict[str, int] = {}
        self._events_kept: dict[str, int] = {}
        self._progress_kept: dict[str, int] = {}

    def close(self, job_id: str) -> None:
        """Drops the cached counts of a job, of which nothing more is written."""
        for kept in (self._output_kept, self._events_kept, self._progress_kept):
            kept.pop(job_id, None)
        self._users.pop(job_id, None)

    def add_events(self, job_id: str, events: Sequence[tuple[str, str]]) -> None:
        """Adds events, each (kind, text); see `JobEvent`."""
        now_s = time.time()
        rows = [{"job_id": job_id, "time_s": now_s, "kind": kind, "text": text} for kind, text in events]
        if not rows:
            return
        with self._database.transaction() as connection:
            connection.execute(insert(EVENTS), rows)
            if self._count(connection, self._events_kept, EVENTS, job_id, len(rows)) > EVENTS_LIMIT:
                del self._events_kept[job_id]
                query = select(EVENTS.c.number).where(EVENTS.c.job_id == job_id).order_by(EVENTS.c.number)
                last = _middle(connection.execute(query).scalars().all())
                connection.execute(delete(EVENTS).where(EVENTS.c.job_id == job_id, EVENTS.c.number <= last))

    def events(self, job_id: str, *, after: int = 0, limit: int | None = None) -> list[JobEvent]:
        """Events of a job with numbers above `after`, oldest first."""
        query = select(EVENTS).where(EVENTS.c.job_id == job_id, EVENTS.c.number > after)
        with self._database.reading() as connection:
            rows = connection.execute(query.order_by(EVENTS.c.number).limit(limit)).mappings().all()
        return [JobEvent(**row) for row in rows]

    def add_output(
        self,
        job_id: str,
        chunks: Sequence[tuple[str, str, str]],
        received: Mapping[tuple[str, str], int] = MappingProxyType({}),
    ) -> None:
        """Adds output chunks (task, stream, text); beyond the limits of job and user a note replaces the oldest.

        `received` maps (task id, stream) to the bytes received up to the end of these chunks.
        """
        rows = [{"job_id": job_id, "task": task, "stream": stream, "text": text} for task, stream, text in chunks]
        if not rows:
            return
        with self._database.transaction() as connection:
            connection.execute(insert(OUTPUT), rows)
            for key, size in received.items():
                _save_received(connection, job_id, key, size)
            self._output_kept[job_id] = (
                self._output_kept[job_id] + sum(len(row["text"]) for row in rows)
                if job_id in self._output_kept
                else self._output_size(connection, job_id)
            )
            more = sum(len(row["text"].encode()) for row in rows)
            if self._output_kept[job_id] > OUTPUT_LIMIT_CHARACTERS:
                del self._output_kept[job_id]
                self._keep_newer_half(connection, job_id)
            self._keep_within_limit(connection, job_id, more)

    def received(self, job_id: str) -> dict[str, dict[str, int]]:
        """Bytes received of each task's output: task id -> stream -> bytes."""
        query = select(RECEIVED.c.task_id, RECEIVED.c.stream, RECEIVED.c.bytes).where(RECEIVED.c.job_id == job_id)
        found: dict[str, dict[str, int]] = {}
        with self._database.reading() as connection:
            for task_id, stream, size in connection.execute(query):
                found.setdefault(task_id, {})[stream] = size
        return found

    def output(self, job_id: str, *, after: int = 0, limit: int | None = None) -> list[OutputChunk]:
        """Output of a job with numbers above `after`, oldest first."""
        with self._database.reading() as connection:
            return queries.output(connection, job_id, after=after, task=None, limit=limit)

    def add_progress(self, job_id: str, points: Sequence[ProgressPoint]) -> None:
        """Adds the chief's reports; a step trained again replaces earlier reports of it and of later steps."""
        if not points:
            return
        rows = {point.step: {"job_id": job_id, **dataclasses.asdict(point)} for point in points}
        first = min(rows)
        with self._database.transaction() as connection:
            replaced = delete(PROGRESS).where(PROGRESS.c.job_id == job_id, PROGRESS.c.step >= first)
            more = len(rows) - connection.execute(replaced).rowcount
            connection.execute(insert(PROGRESS), [rows[step] for step in sorted(rows)])
            if self._count(connection, self._progress_kept, PROGRESS, job_id, more) > PROGRESS_LIMIT:
                del self._progress_kept[job_id]
                self._thin_progress(connection, job_id)

    def progress(self, job_id: str, *, after_step: int = -1) -> list[ProgressPoint]:
        """Progress of a job after a step, by step."""
        query = select(PROGRESS.c.step, PROGRESS.c.time_s, PROGRESS.c.loss, PROGRESS.c.samples_per_s)
        query = query.where(PROGRESS.c.job_id == job_id, PROGRESS.c.step > after_step).order_by(PROGRESS.c.step)
        with self._database.reading() as connection:
            return [ProgressPoint(**row) for row in connection.execute(query).mappings()]

    def last_progress(self, job_id: str) -> ProgressPoint | None:
        with self._database.reading() as connection:
            return queries.last_progress(connection, [job_id]).get(job_id)

    def _output_size(self, connection: Connection, job_id: str) -> int:
        query = select(func.coalesce(func.sum(func.length(OUTPUT.c.text)), 0)).where(OUTPUT.c.job_id == job_id)
        return int(connection.execute(query).scalar_one())

    def _keep_newer_half(self, connection: Connection, job_id: str) -> None:
        """Deletes the older half: more than needed, so that it is rarely needed."""
        query = select(OUTPUT.c.number).where(OUTPUT.c.job_id == job_id).order_by(OUTPUT.c.number)
        last = _middle(connection.execute(query).scalars().all())
        kept = f"a service keeps the newest {OUTPUT_LIMIT_CHARACTERS / 2**20:.3g} Mi characters of a job"
        _truncate(connection, job_id, last, f"{kept}, and its sandboxes have all of it")

    def _keep_within_limit(self, connection: Connection, job_id: str, more: int) -> None:
        """Deletes the oldest output of all the user's jobs if `more` new bytes exceed the user's limit."""
        user = self._user(connection, job_id)
        limit = self._limits(user).output_bytes
        if limit is None:
            self._output_kept_of_users.pop(user, None)
            return
        known = self._output_kept_of_users.get(user)
        # Recounts before it deletes anything: old jobs may have been deleted since.
        kept = limit + 1 if known is None else known + more
        if kept > limit:
            kept = queries.output_bytes(connection, user)
        if kept > limit:
            last: dict[str, int] = {}
            for number, job, size in queries.oldest_output(connection, user):
                if kept <= KEPT_FRACTION * limit:
                    break
                last[job] = number
                kept -= size
            why = f"the limit of {user}'s kept output, set by the service's operator, is {format_bytes(limit)}"
            for job, number in last.items():
                _truncate(connection, job, number, why)
                self._output_kept.pop(job, None)
        self._output_kept_of_users[user] = kept

    def _user(self, connection: Connection, job_id: str) -> str:
        if job_id not in self._users:
            self._users[job_id] = str(connection.execute(select(JOBS.c.user).where(JOBS.c.id == job_id)).scalar_one())
        return self._users[job_id]

    def _count(self, connection: Connection, kept: dict[str, int], table: Table, job_id: str, more: int) -> int:
        """An upper bound of a job's rows: counted once, then added up."""
        if job_id in kept:
            kept[job_id] += more
        else:
            query = select(func.count()).select_from(table).where(table.c.job_id == job_id)
            kept[job_id] = int(connection.execute(query).scalar_one())
        return kept[job_id]

    def _thin_progress(self, connection: Connection, job_id: str) -> None:
        numbered = (
            select(PROGRESS.c.step, func.row_number().over(order_by=PROGRESS.c.step.desc()).label("place"))
            .where(PROGRESS.c.job_id == job_id)
            .subquery()
        )
        # Keeps the newest.
        odd = select(numbered.c.step).where(numbered.c.place % 2 == 0)
        connection.execute(delete(PROGRESS).where(PROGRESS.c.job_id == job_id, PROGRESS.c.step.in_(odd)))


def _middle(numbers: Sequence[int]) -> int:
    """The last number of the older half."""
    return numbers[(len(numbers) - 1) // 2]


def _truncate(connection: Connection, job_id: str, last: int, why: str) -> None:
    """Replaces a job's output up to a number by a note; repeated cuts leave a single note."""
    note = {"task": queries.NOTE_TASK, "stream": "stderr", "text": f"dike: older output was deleted: {why}.\n"}
    connection.execute(delete(OUTPUT).where(OUTPUT.c.job_id == job_id, OUTPUT.c.number < last))
    connection.execute(update(OUTPUT).where(OUTPUT.c.number == last).values(note))


def _save_received(connection: Connection, job_id: str, key: tuple[str, str], size: int) -> None:
    task_id, stream = key
    values = {"job_id": job_id, "task_id": task_id, "stream": stream, "bytes": size}
    ours = (RECEIVED.c.task_id == task_id) & (RECEIVED.c.stream == stream)
    if not connection.execute(update(RECEIVED).where(ours).values(values)).rowcount:
        connection.execute(insert(RECEIVED).values(values))
