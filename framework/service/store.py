"""Keeps a service's jobs in a database: requests, bundles, tasks, what happened, output, progress.

The service is the only process that writes. Each method is one short transaction, durable when the method returns, and
may be called from any thread.
"""

from __future__ import annotations

import dataclasses
import json
import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from sqlalchemy import Engine, RowMapping, delete, func, insert, select, update
from sqlalchemy.engine import Connection

from dike.exceptions import BadInputError
from framework.lease import Lease, Leased
from framework.search.database import making_tables, open_database, parse_url, storage_errors
from framework.service.records import JobEvent, JobKind, JobRecord, JobState, OutputChunk, ProgressPoint, TaskRecord
from framework.service.tables import BUNDLES, EVENTS, JOBS, OUTPUT, PROGRESS, SERVICES, TASKS

OUTPUT_LIMIT_CHARACTERS = 8 * 2**20
"""How much of a job's output is kept here; the whole is in its sandboxes."""
_JSON_COLUMNS = ("request", "constraints", "result", "state_data")
_LONG_COLUMNS = ("request", "result", "state_data")
_SERVICE = 1


class ServiceStore:
    """The database of a service.

    Args:
        url: an SQLAlchemy URL.

    Raises:
        BadInputError: if the database cannot be used; every method may.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self._engine = open_database(url, private=True)
        self._writing_engine = self._engine.execution_options(dike_writes=True)
        self._parsed = parse_url(url)
        self._kept: dict[str, int] = {}
        self._adding = threading.Lock()
        self._lease: Lease | None = None
        with making_tables(self._parsed), self._transaction() as connection:
            if connection.execute(select(SERVICES.c.id)).first() is None:
                connection.execute(insert(SERVICES).values(id=_SERVICE))

    @property
    def engine(self) -> Engine:
        """The database, for stores of searches in it."""
        return self._engine

    def close(self) -> None:
        """Closes all connections."""
        self._engine.dispose()

    # The service itself.

    @contextmanager
    def lock(self, lost: Callable[[str], None], wait: Callable[[str], None] | None = None) -> Iterator[Lease]:
        """Makes this process the only one that writes here; writing methods raise `LeaseLostError` once it is not.

        Args:
            lost: see `Lease`.
            wait: see `Lease.take`.

        Raises:
            BadInputError: if another process runs it; the message says which.
        """
        leased = Leased(SERVICES, _SERVICE, "service of this database", "end it, or wait for its end with --standby")
        lease = Lease(self._writing_engine, leased, lost)
        with storage_errors(self._parsed):
            lease.take(wait)
        self._lease = lease
        try:
            yield lease
        finally:
            self._lease = None
            with storage_errors(self._parsed):
                lease.give_back()

    def framework_id(self) -> str | None:
        """Under which id Mesos knows the service; None before the first subscription."""
        with self.reading() as connection:
            return connection.execute(select(SERVICES.c.framework_id)).scalar()

    def set_framework_id(self, framework_id: str | None) -> None:
        """Notes it; None once Mesos has forgotten us."""
        with self._transaction() as connection:
            connection.execute(update(SERVICES).values(framework_id=framework_id))

    def forget_framework(self) -> None:
        """Notes that Mesos has ended us, and all our tasks."""
        lost = {"state": "lost", "ended_s": time.time(), "message": "the framework was removed by the Mesos master"}
        with self._transaction() as connection:
            connection.execute(update(SERVICES).values(framework_id=None))
            connection.execute(update(TASKS).where(TASKS.c.ended_s.is_(None)).values(lost))

    # Jobs.

    def add_job(self, record: JobRecord, bundle: bytes) -> None:
        """Takes a job in, with its bundle.

        Raises:
            BadInputError: if there is a job of that id.
        """
        # Two at once would get the same number: only SQLite has them wait for each other.
        with self._adding, self._transaction() as connection:
            if connection.execute(select(JOBS.c.id).where(JOBS.c.id == record.id)).first() is not None:
                raise BadInputError(f"There is a job '{record.id}' already; choose another --name.")
            number = connection.execute(select(func.coalesce(func.max(JOBS.c.number), 0) + 1)).scalar_one()
            connection.execute(insert(JOBS).values(number=number, **_job_values(dataclasses.asdict(record))))
            connection.execute(insert(BUNDLES).values(job_id=record.id, archive=bundle))

    def change_job(self, job_id: str, **changes: Any) -> None:
        """Writes some fields of a job."""
        with self._transaction() as connection:
            connection.execute(update(JOBS).where(JOBS.c.id == job_id).values(_job_values(changes)))

    def job(self, job_id: str) -> JobRecord | None:
        """One job; None if there is none of that id."""
        with self.reading() as connection:
            row = connection.execute(select(JOBS).where(JOBS.c.id == job_id)).mappings().first()
        return None if row is None else _job(row)

    def jobs(
        self,
        *,
        user: str | None = None,
        states: Iterable[JobState] | None = None,
        limit: int | None = None,
        before: str | None = None,
        brief: bool = False,
    ) -> list[JobRecord]:
        """Jobs, the newest first.

        Args:
            user: only this user's; None for everybody's.
            states: only those in one of these states; None for all.
            limit: at most so many; None for all.
            before: only those that came before the job of this id.
            brief: whether to leave out request, result and state data, which may be long.
        """
        columns = [column for column in JOBS.c if not (brief and column.name in _LONG_COLUMNS)]
        query = select(*columns).order_by(JOBS.c.number.desc()).limit(limit)
        if user is not None:
            query = query.where(JOBS.c.user == user)
        if states is not None:
            query = query.where(JOBS.c.state.in_([str(state) for state in states]))
        if before is not None:
            query = query.where(JOBS.c.number < select(JOBS.c.number).where(JOBS.c.id == before).scalar_subquery())
        with self.reading() as connection:
            return [_job(row) for row in connection.execute(query).mappings()]

    def open_jobs(self) -> list[JobRecord]:
        """All that have not ended, in the order of their arrival."""
        states = [state for state in JobState if not state.has_ended()]
        return self.jobs(states=states)[::-1]

    def counts(self) -> dict[JobState, int]:
        """State -> number of jobs in it."""
        query = select(JOBS.c.state, func.count()).group_by(JOBS.c.state)
        with self.reading() as connection:
            found = {JobState(state): count for state, count in connection.execute(query)}
        return {state: found.get(state, 0) for state in JobState}

    def bundle(self, token: str) -> bytes | None:
        """The archive that a bundle token names; None if there is none."""
        query = select(BUNDLES.c.archive).join(JOBS, JOBS.c.id == BUNDLES.c.job_id).where(JOBS.c.bundle_token == token)
        with self.reading() as connection:
            return connection.execute(query).scalar()

    def delete_jobs(self, ended_before_s: float) -> int:
        """Removes jobs that ended before a time (seconds since the epoch), with all that is kept of them.

        Returns:
            How many.
        """
        old = select(JOBS.c.id).where(JOBS.c.ended_s < ended_before_s)
        with self._transaction() as connection:
            for table in (BUNDLES, TASKS, EVENTS, OUTPUT, PROGRESS):
                connection.execute(delete(table).where(table.c.job_id.in_(old)))
            return int(connection.execute(delete(JOBS).where(JOBS.c.ended_s < ended_before_s)).rowcount)

    # Tasks.

    def save(self, tasks: Sequence[TaskRecord], states: Mapping[str, Mapping[str, Any]]) -> None:
        """Writes tasks as they are now, and jobs' state data, all or nothing.

        Args:
            tasks: new or changed ones.
            states: job -> its state data.
        """
        with self._transaction() as connection:
            for job_id, state in states.items():
                values = {"state_data": json.dumps(state)}
                connection.execute(update(JOBS).where(JOBS.c.id == job_id).values(values))
            for task in tasks:
                values = {**dataclasses.asdict(task), "resources": json.dumps(task.resources)}
                if (
                    connection.execute(update(TASKS).where(TASKS.c.task_id == task.task_id).values(values)).rowcount
                    == 0
                ):
                    connection.execute(insert(TASKS).values(values))

    def tasks(self, *, job_id: str | None = None, live_only: bool = False) -> list[TaskRecord]:
        """Tasks, in the order of their launch.

        Args:
            job_id: only those of this job; None for all jobs'.
            live_only: only those that have not ended.
        """
        query = select(TASKS).order_by(TASKS.c.launched_s, TASKS.c.task_id)
        if job_id is not None:
            query = query.where(TASKS.c.job_id == job_id)
        if live_only:
            query = query.where(TASKS.c.ended_s.is_(None))
        with self.reading() as connection:
            rows = connection.execute(query).mappings().all()
        return [TaskRecord(**{**row, "resources": json.loads(row["resources"])}) for row in rows]

    # What happens in a job.

    def add_events(self, job_id: str, events: Sequence[tuple[str, str]]) -> None:
        """Notes what happened: (kind, text) of each event, see `JobEvent`."""
        now_s = time.time()
        rows = [{"job_id": job_id, "time_s": now_s, "kind": kind, "text": text} for kind, text in events]
        if rows:
            with self._transaction() as connection:
                connection.execute(insert(EVENTS), rows)

    def events(self, job_id: str, *, after: int = 0, limit: int | None = None) -> list[JobEvent]:
        """Events of a job with numbers above `after`, oldest first."""
        query = select(EVENTS).where(EVENTS.c.job_id == job_id, EVENTS.c.number > after)
        with self.reading() as connection:
            rows = connection.execute(query.order_by(EVENTS.c.number).limit(limit)).mappings().all()
        return [JobEvent(**row) for row in rows]

    def add_output(self, job_id: str, chunks: Sequence[tuple[str, str, str]]) -> None:
        """Keeps output: (task, stream, text) of each chunk; beyond the limit the oldest goes."""
        rows = [{"job_id": job_id, "task": task, "stream": stream, "text": text} for task, stream, text in chunks]
        if not rows:
            return
        with self._transaction() as connection:
            connection.execute(insert(OUTPUT), rows)
            if job_id not in self._kept:
                self._kept[job_id] = self._output_size(connection, job_id)
            else:
                self._kept[job_id] += sum(len(row["text"]) for row in rows)
            if self._kept[job_id] > OUTPUT_LIMIT_CHARACTERS:
                self._forget_output(connection, job_id)
                self._kept[job_id] = self._output_size(connection, job_id)

    def output(self, job_id: str, *, after: int = 0, limit: int | None = None) -> list[OutputChunk]:
        """Output of a job with numbers above `after`, oldest first."""
        query = select(OUTPUT.c.number, OUTPUT.c.task, OUTPUT.c.stream, OUTPUT.c.text)
        query = query.where(OUTPUT.c.job_id == job_id, OUTPUT.c.number > after)
        with self.reading() as connection:
            rows = connection.execute(query.order_by(OUTPUT.c.number).limit(limit)).mappings().all()
        return [OutputChunk(**row) for row in rows]

    def add_progress(self, job_id: str, points: Sequence[ProgressPoint]) -> None:
        """Keeps what the chief reported; a step trained again replaces what was said of it and of later ones."""
        if not points:
            return
        rows = {point.step: {"job_id": job_id, **dataclasses.asdict(point)} for point in points}
        first = min(rows)
        with self._transaction() as connection:
            connection.execute(delete(PROGRESS).where(PROGRESS.c.job_id == job_id, PROGRESS.c.step >= first))
            connection.execute(insert(PROGRESS), [rows[step] for step in sorted(rows)])

    def progress(self, job_id: str, *, after_step: int = -1) -> list[ProgressPoint]:
        """Progress of a job after a step, in the order of the steps."""
        query = select(PROGRESS.c.step, PROGRESS.c.time_s, PROGRESS.c.loss, PROGRESS.c.samples_per_s)
        query = query.where(PROGRESS.c.job_id == job_id, PROGRESS.c.step > after_step).order_by(PROGRESS.c.step)
        with self.reading() as connection:
            return [ProgressPoint(**row) for row in connection.execute(query).mappings()]

    def last_progress(self, job_id: str) -> ProgressPoint | None:
        """The newest report of a job; None if there is none."""
        query = select(PROGRESS.c.step, PROGRESS.c.time_s, PROGRESS.c.loss, PROGRESS.c.samples_per_s)
        query = query.where(PROGRESS.c.job_id == job_id).order_by(PROGRESS.c.step.desc()).limit(1)
        with self.reading() as connection:
            row = connection.execute(query).mappings().first()
        return None if row is None else ProgressPoint(**row)

    def _output_size(self, connection: Connection, job_id: str) -> int:
        query = select(func.coalesce(func.sum(func.length(OUTPUT.c.text)), 0)).where(OUTPUT.c.job_id == job_id)
        return int(connection.execute(query).scalar_one())

    def _forget_output(self, connection: Connection, job_id: str) -> None:
        """Removes the older half, so that this is seldom needed."""
        middle = select(OUTPUT.c.number).where(OUTPUT.c.job_id == job_id).order_by(OUTPUT.c.number)
        numbers = connection.execute(middle).scalars().all()
        last = numbers[(len(numbers) - 1) // 2]
        connection.execute(delete(OUTPUT).where(OUTPUT.c.job_id == job_id, OUTPUT.c.number <= last))

    @contextmanager
    def _transaction(self) -> Iterator[Connection]:
        with storage_errors(self._parsed), self._writing_engine.begin() as connection:
            if self._lease is not None:
                self._lease.check(connection)
            yield connection

    @contextmanager
    def reading(self) -> Iterator[Connection]:
        """A connection for queries of one's own, such as those of `framework.service.overview`."""
        with storage_errors(self._parsed), self._engine.connect() as connection:
            yield connection


def finite(value: float | None) -> float | None:
    """A number that JSON knows; None for any other."""
    return value if value is not None and math.isfinite(value) else None


def _job_values(changes: Mapping[str, Any]) -> dict[str, Any]:
    values = dict(changes)
    for name in _JSON_COLUMNS:
        if values.get(name) is not None:
            values[name] = json.dumps(values[name])
    for name in ("kind", "state"):
        if name in values:
            values[name] = str(values[name])
    return values


_JOB_FIELDS = frozenset(field.name for field in dataclasses.fields(JobRecord))


def _job(row: RowMapping) -> JobRecord:
    values = {"request": {}, **{name: row[name] for name in row if name in _JOB_FIELDS}}
    for name in _JSON_COLUMNS:
        if isinstance(values.get(name), str):
            values[name] = json.loads(values[name])
    values["constraints"] = tuple(values["constraints"])
    return JobRecord(**{**values, "kind": JobKind(row["kind"]), "state": JobState(row["state"])})
