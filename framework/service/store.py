"""The database of a service: jobs, bundles, tasks and their history (`framework.service.history`).

The service is the only process that writes. Each method is one short transaction, durable when it returns, and
thread-safe.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import logging
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from sqlalchemy import ColumnElement, RowMapping, and_, delete, func, insert, or_, select, update
from sqlalchemy.engine import Connection

from dike.exceptions import BadInputError
from framework.scheduler.queue_options import Priority
from framework.scheduler.records import JobKind, JobRecord, JobState, TaskRecord
from framework.service import queries, usage
from framework.service.database import ServiceDatabase
from framework.service.history import JobHistory
from framework.service.tables import BUNDLES, EVENTS, JOBS, OUTPUT, PROGRESS, RECEIVED, SERVICES, TASKS
from framework.service.usage import Usage
from framework.service.users import OverLimitError, UserLimits, no_limits
from solver.units import format_bytes

logger = logging.getLogger(__name__)

_JSON_COLUMNS = ("request", "constraints", "result", "state_data")
_LONG_COLUMNS = ("request", "result", "state_data")
_SEARCH_BATCH = 1000
DELETE_BATCH = 50
DELETE_PAUSE_S = 0.2


class ServiceStore:
    """The database of a service.

    Raises:
        BadInputError: if the database cannot be used; from every method.
    """

    def __init__(self, url: str, limits: Callable[[str], UserLimits] = no_limits) -> None:
        self.database = ServiceDatabase(url)
        self.history = JobHistory(self.database, limits)
        self.limits = limits
        self._submit_lock = threading.Lock()

    def close(self) -> None:
        self.database.close()

    # Framework

    def framework_id(self) -> str | None:
        with self.database.reading() as connection:
            return connection.execute(select(SERVICES.c.framework_id)).scalar()

    def set_framework_id(self, framework_id: str | None) -> None:
        with self.database.transaction() as connection:
            connection.execute(update(SERVICES).values(framework_id=framework_id))

    def forget_framework(self) -> None:
        """Records that Mesos has removed the framework and ended all its tasks."""
        now_s = time.time()
        lost = {"state": "lost", "ended_s": now_s, "message": "the framework was removed by the Mesos master"}
        live = self.tasks(live_only=True)
        with self.database.transaction() as connection:
            for task in live:
                _add_usage(connection, task, now_s)
            connection.execute(update(SERVICES).values(framework_id=None))
            connection.execute(update(TASKS).where(TASKS.c.ended_s.is_(None)).values(lost))

    # Jobs

    def add_job(self, record: JobRecord, bundle: bytes) -> None:
        """Adds a job with its bundle; raises `BadInputError` if the id is taken, and `OverLimitError`."""
        # Without the lock, two concurrent jobs could get the same number or pass a limit together: only SQLite
        # serializes writers.
        with self._submit_lock, self.database.transaction() as connection:
            if connection.execute(select(JOBS.c.id).where(JOBS.c.id == record.id)).first() is not None:
                raise BadInputError(f"There is a job '{record.id}' already; choose another --name.")
            self._check_open_jobs(connection, record.user)
            self._check_bundles(connection, record.user, len(bundle))
            values = {"number": _next_number(connection), **_job_values(dataclasses.asdict(record))}
            connection.execute(insert(JOBS).values(values))
            connection.execute(insert(BUNDLES).values(job_id=record.id, archive=bundle))

    def change_job(self, job_id: str, **changes: Any) -> None:
        with self.database.transaction() as connection:
            connection.execute(update(JOBS).where(JOBS.c.id == job_id).values(_job_values(changes)))

    def start_job(self, job_id: str, started_s: float) -> JobRecord | None:
        """Records that a job runs for the first time; returns it, None if it is unknown."""
        record = self.job(job_id)
        with self.database.transaction() as connection:
            values = _job_values({"state": JobState.RUNNING, "started_s": started_s})
            connection.execute(update(JOBS).where(JOBS.c.id == job_id).values(values))
            if record is not None:
                usage.add_start(connection, record.user, record.submitted_s, started_s)
        return record

    def usage(self, weeks: int, user: str | None = None) -> list[Usage]:
        """Returns the usage of the last weeks, this one included; see `framework.service.usage.usage`."""
        since = usage.week_of(time.time()) - datetime.timedelta(weeks=weeks - 1)
        with self.database.reading() as connection:
            return usage.usage(connection, since, user)

    def reopen_job(self, job_id: str, note: str, **changes: Any) -> bool:
        """Queues a job that has ended again, behind all others, with a note among its events.

        Returns False, with nothing changed, if it has not ended or was deleted. Raises `OverLimitError`.
        """
        fresh = {"state": JobState.QUEUED, "ended_s": None, "kill_requested": False, "failure": "", "result": None}
        ended = [str(state) for state in JobState if state.has_ended()]
        with self._submit_lock, self.database.transaction() as connection:
            values = {"number": _next_number(connection), **_job_values({**fresh, **changes})}
            query = update(JOBS).where(JOBS.c.id == job_id, JOBS.c.state.in_(ended)).values(values)
            user = connection.execute(select(JOBS.c.user).where(JOBS.c.id == job_id, JOBS.c.state.in_(ended))).scalar()
            if user is None:
                return False
            self._check_open_jobs(connection, user)
            if not connection.execute(query).rowcount:
                return False
            event = {"job_id": job_id, "time_s": time.time(), "kind": "note", "text": note}
            connection.execute(insert(EVENTS).values(event))
            return True

    def job(self, job_id: str) -> JobRecord | None:
        with self.database.reading() as connection:
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
        """Jobs, newest first; `before` is the id of the job where the page starts.

        With `brief`, omits request, result and state data, which may be long.
        """
        columns = [column for column in JOBS.c if not (brief and column.name in _LONG_COLUMNS)]
        query = select(*columns).order_by(JOBS.c.number.desc()).limit(limit)
        if user is not None:
            query = query.where(JOBS.c.user == user)
        if states is not None:
            query = query.where(JOBS.c.state.in_([str(state) for state in states]))
        if before is not None:
            query = query.where(JOBS.c.number < select(JOBS.c.number).where(JOBS.c.id == before).scalar_subquery())
        with self.database.reading() as connection:
            return [_job(row) for row in connection.execute(query).mappings()]

    def open_jobs(self) -> list[JobRecord]:
        """Jobs that have not ended, in order of arrival."""
        states = [state for state in JobState if not state.has_ended()]
        return self.jobs(states=states)[::-1]

    def bundle(self, token: str) -> bytes | None:
        query = select(BUNDLES.c.archive).join(JOBS, JOBS.c.id == BUNDLES.c.job_id).where(JOBS.c.bundle_token == token)
        with self.database.reading() as connection:
            return connection.execute(query).scalar()

    def old_searches(self, ended_before_s: float) -> list[str]:
        """Ids of searches that ended before a time (epoch seconds) and may be deleted; a limited number per call."""
        query = select(JOBS.c.id).where(_is_old(ended_before_s), JOBS.c.kind == str(JobKind.SEARCH))
        with self.database.reading() as connection:
            return list(connection.execute(query.limit(_SEARCH_BATCH)).scalars())

    def old_job(self, job_id: str, ended_before_s: float) -> JobRecord | None:
        """The job if it ended before a time (epoch seconds) and has no live task; None otherwise."""
        query = select(JOBS).where(JOBS.c.id == job_id, _is_old(ended_before_s))
        with self.database.reading() as connection:
            row = connection.execute(query).mappings().first()
        return None if row is None else _job(row)

    def delete_jobs(
        self, ended_before_s: float, searches: Collection[str] = (), ending: threading.Event | None = None
    ) -> int:
        """Deletes jobs that ended before a time (epoch seconds), with all their rows; returns their number.

        Of searches only the given ones, which are deleted from the database of searches already. `ending` stops it
        early.
        """
        is_deletable = and_(_is_old(ended_before_s), or_(JOBS.c.kind != str(JobKind.SEARCH), JOBS.c.id.in_(searches)))
        count = 0
        while True:
            # In batches: the service's other writes wait for each transaction.
            with self.database.transaction() as connection:
                old = connection.scalars(select(JOBS.c.id).where(is_deletable).limit(DELETE_BATCH)).all()
                for table in (BUNDLES, TASKS, EVENTS, OUTPUT, RECEIVED, PROGRESS):
                    connection.execute(delete(table).where(table.c.job_id.in_(old)))
                connection.execute(delete(JOBS).where(JOBS.c.id.in_(old)))
            count += len(old)
            # SQLite's waiting writers poll for the lock: the pause lets them in.
            if len(old) < DELETE_BATCH or (ending or threading.Event()).wait(DELETE_PAUSE_S):
                return count

    def _check_open_jobs(self, connection: Connection, user: str) -> None:
        limit = self.limits(user).open_jobs
        if limit is not None and (used := queries.open_jobs(connection, user)) >= limit:
            raise OverLimitError(
                f"The limit of open jobs that the service's operator has set for {user} is {limit}, and {used} are "
                "open; wait for the end of one, end one with dike kill, or ask for more."
            )

    def _check_bundles(self, connection: Connection, user: str, size: int) -> None:
        limit = self.limits(user).bundle_bytes
        if limit is not None and (used := queries.bundle_bytes(connection, user)) + size > limit:
            raise OverLimitError(
                f"The limit of bundles that the service's operator has set for {user} is {format_bytes(limit)}, "
                f"{format_bytes(used)} are used, and this one has {format_bytes(size)}; send less, or ask for more."
            )

    # Tasks

    def save(self, tasks: Sequence[TaskRecord], states: Mapping[str, Mapping[str, Any]]) -> None:
        """Writes tasks and jobs' state data in one transaction; skips tasks of deleted jobs."""
        with self.database.transaction() as connection:
            for job_id, state in states.items():
                values = {"state_data": json.dumps(state)}
                connection.execute(update(JOBS).where(JOBS.c.id == job_id).values(values))
            for task in tasks:
                _save_task(connection, task)

    def tasks(self, *, job_id: str | None = None, live_only: bool = False) -> list[TaskRecord]:
        query = select(TASKS).order_by(TASKS.c.launched_s, TASKS.c.task_id)
        if job_id is not None:
            query = query.where(TASKS.c.job_id == job_id)
        if live_only:
            query = query.where(TASKS.c.ended_s.is_(None))
        with self.database.reading() as connection:
            rows = connection.execute(query).mappings().all()
        return [TaskRecord(**{**row, "resources": json.loads(row["resources"])}) for row in rows]


def _save_task(connection: Connection, task: TaskRecord) -> None:
    values = {**dataclasses.asdict(task), "resources": json.dumps(task.resources)}
    if task.ended_s is not None:
        _add_usage(connection, task, task.ended_s)
    if connection.execute(update(TASKS).where(TASKS.c.task_id == task.task_id).values(values)).rowcount:
        return
    if connection.execute(select(JOBS.c.id).where(JOBS.c.id == task.job_id)).first() is not None:
        connection.execute(insert(TASKS).values(values))
    else:
        # Its agent was partitioned for longer than the job was kept.
        logger.info("task %s of job %s, which is forgotten, is %s", task.task_id, task.job_id, task.state)


def _add_usage(connection: Connection, task: TaskRecord, ended_s: float) -> None:
    """Adds a task that ends now to its user's usage; an end that is stored already does not count again."""
    query = select(JOBS.c.user).join(TASKS, TASKS.c.job_id == JOBS.c.id)
    user = connection.execute(query.where(TASKS.c.task_id == task.task_id, TASKS.c.ended_s.is_(None))).scalar()
    if user is not None:
        usage.add_task(connection, user, task.resources, task.launched_s, ended_s)


def _next_number(connection: Connection) -> int:
    return int(connection.execute(select(func.coalesce(func.max(JOBS.c.number), 0) + 1)).scalar_one())


def _is_old(ended_before_s: float) -> ColumnElement[bool]:
    """Jobs that may be deleted: without live tasks, which must be known until they have ended."""
    tasks = TASKS.alias()
    running = select(tasks.c.job_id).where(tasks.c.ended_s.is_(None))
    return and_(JOBS.c.ended_s < ended_before_s, JOBS.c.id.not_in(running))


def _job_values(changes: Mapping[str, Any]) -> dict[str, Any]:
    values = dict(changes)
    for name in _JSON_COLUMNS:
        if values.get(name) is not None:
            values[name] = json.dumps(values[name])
    for name in ("kind", "state", "priority"):
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
    enums = {"kind": JobKind(row["kind"]), "state": JobState(row["state"]), "priority": Priority(row["priority"])}
    return JobRecord(**{**values, **enums})
