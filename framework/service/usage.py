"""What each user's jobs have used, by week: hours of GPUs and CPUs, and the time that jobs have waited to start.

Kept apart from jobs and tasks, which are deleted after a while. Weeks begin on Monday, in UTC.
"""

from __future__ import annotations

import datetime
import json
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from sqlalchemy import insert, select, update
from sqlalchemy.engine import Connection

from framework.service.tables import JOBS, TASKS, USAGE

_HOUR_S = 3600.0
_WEEK = datetime.timedelta(weeks=1)


@dataclass(frozen=True)
class Usage:
    """What the jobs of a user have used in a week, tasks that still run included.

    Attributes:
        week: its Monday.
        jobs: number of jobs that started in it.
        gpu_hours, cpu_hours: of the jobs' tasks.
        waited_hours: time from the submission to the first task of those jobs.
    """

    user: str
    week: datetime.date
    jobs: int = 0
    gpu_hours: float = 0.0
    cpu_hours: float = 0.0
    waited_hours: float = 0.0


def week_of(time_s: float) -> datetime.date:
    """The Monday before a time, seconds since the epoch."""
    date = datetime.datetime.fromtimestamp(time_s, datetime.UTC).date()
    return date - datetime.timedelta(days=date.weekday())


def add_start(connection: Connection, user: str, submitted_s: float, started_s: float) -> None:
    """Adds a job that has got its first task."""
    _add(connection, user, week_of(started_s), jobs=1, waited_s=max(0.0, started_s - submitted_s))


def add_task(connection: Connection, user: str, resources: Mapping[str, float], begin_s: float, end_s: float) -> None:
    """Adds a task that has ended."""
    for week, values in _by_week(resources, begin_s, end_s):
        _add(connection, user, week, **values)


def usage(connection: Connection, since: datetime.date, user: str | None = None) -> list[Usage]:
    """Returns the usage by week and user, newest first, the greatest first in a week.

    Args:
        connection: to the database.
        since: the first week.
        user: the only user; None for all.
    """
    sums: defaultdict[tuple[str, datetime.date], defaultdict[str, float]] = defaultdict(lambda: defaultdict(float))
    query = select(USAGE).where(USAGE.c.week >= since.isoformat())
    for row in connection.execute(query).mappings():
        key = (row["user"], datetime.date.fromisoformat(row["week"]))
        for name in ("jobs", "gpu_s", "cpu_s", "waited_s"):
            sums[key][name] += row[name]
    running = select(JOBS.c.user, TASKS.c.resources, TASKS.c.launched_s).join(JOBS, JOBS.c.id == TASKS.c.job_id)
    now_s = time.time()
    for name, resources, launched_s in connection.execute(running.where(TASKS.c.ended_s.is_(None))):
        for week, values in _by_week(json.loads(resources), launched_s, now_s):
            for amount, seconds in values.items():
                sums[name, week][amount] += seconds
    found = [
        Usage(
            name,
            week,
            int(each["jobs"]),
            each["gpu_s"] / _HOUR_S,
            each["cpu_s"] / _HOUR_S,
            each["waited_s"] / _HOUR_S,
        )
        for (name, week), each in sums.items()
        if week >= since and user in (None, name)
    ]
    return sorted(found, key=lambda one: (-one.week.toordinal(), -one.gpu_hours, -one.cpu_hours, one.user))


def totals(rows: Iterable[Usage]) -> dict[str, Usage]:
    """User -> the sum over the weeks; `week` is the first."""
    found: dict[str, Usage] = {}
    for row in rows:
        before = found.get(row.user, Usage(row.user, row.week))
        found[row.user] = Usage(
            row.user,
            min(before.week, row.week),
            before.jobs + row.jobs,
            before.gpu_hours + row.gpu_hours,
            before.cpu_hours + row.cpu_hours,
            before.waited_hours + row.waited_hours,
        )
    return found


def _by_week(
    resources: Mapping[str, float], begin_s: float, end_s: float
) -> Iterator[tuple[datetime.date, dict[str, float]]]:
    """Splits the seconds of a task at the ends of weeks."""
    while begin_s < end_s:
        week = week_of(begin_s)
        next_s = datetime.datetime.combine(week + _WEEK, datetime.time(), datetime.UTC).timestamp()
        seconds = min(end_s, next_s) - begin_s
        yield week, {"gpu_s": seconds * resources.get("gpus", 0.0), "cpu_s": seconds * resources.get("cpus", 0.0)}
        begin_s = next_s


def _add(connection: Connection, user: str, week: datetime.date, **amounts: float) -> None:
    key = (USAGE.c.user == user, USAGE.c.week == week.isoformat())
    changes = {name: USAGE.c[name] + amount for name, amount in amounts.items()}
    if not connection.execute(update(USAGE).where(*key).values(changes)).rowcount:
        nothing = {"jobs": 0, "gpu_s": 0.0, "cpu_s": 0.0, "waited_s": 0.0}
        connection.execute(insert(USAGE).values({"user": user, "week": week.isoformat(), **nothing, **amounts}))
