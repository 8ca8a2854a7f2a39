"""Read queries over many jobs or much data, one SQL query each."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from sqlalchemy import JSON, ColumnElement, LargeBinary, and_, case, cast, func, select
from sqlalchemy.engine import Connection

from framework.scheduler.records import JobKind, JobState, OutputChunk, ProgressPoint, dated_folder
from framework.search.records import TrialState
from framework.search.tables import SEARCHES, TRIALS
from framework.service.tables import BUNDLES, JOBS, OUTPUT, PROGRESS, TASKS

NOTE_TASK = "dike"
"""Task name of output that is not a task's but a note about missing output."""

_OPEN = [str(state) for state in JobState if not state.has_ended()]
_POINT = (PROGRESS.c.step, PROGRESS.c.time_s, PROGRESS.c.loss, PROGRESS.c.samples_per_s)


_NAMED_FOLDERS = (("checkpoint_dir",), ("spec", "checkpoint_dir"))
"""Paths in the requests of training jobs and of searches of the checkpoint folder that the user named."""


def live_tasks(connection: Connection, job_ids: Sequence[str]) -> dict[str, int]:
    """Job -> number of its tasks that have not ended; jobs without any are omitted."""
    query = select(TASKS.c.job_id, func.count()).where(TASKS.c.job_id.in_(job_ids), TASKS.c.ended_s.is_(None))
    return {str(job_id): int(count) for job_id, count in connection.execute(query.group_by(TASKS.c.job_id))}


def last_progress(connection: Connection, job_ids: Sequence[str]) -> dict[str, ProgressPoint]:
    """Job -> its chief's last report; jobs without one are omitted."""
    last = select(PROGRESS.c.job_id, func.max(PROGRESS.c.step).label("step")).where(PROGRESS.c.job_id.in_(job_ids))
    newest = last.group_by(PROGRESS.c.job_id).subquery()
    query = select(PROGRESS.c.job_id, *_POINT).join(
        newest, (newest.c.job_id == PROGRESS.c.job_id) & (newest.c.step == PROGRESS.c.step)
    )
    return {job_id: ProgressPoint(*point) for job_id, *point in connection.execute(query)}


def trial_states(connection: Connection, searches: Sequence[str]) -> dict[str, dict[TrialState, int]]:
    """Search -> trial state -> number of trials; searches that have not begun are omitted."""
    query = select(SEARCHES.c.name, TRIALS.c.state, func.count()).join(TRIALS, TRIALS.c.search_id == SEARCHES.c.id)
    counts: dict[str, dict[TrialState, int]] = {}
    grouped = query.where(SEARCHES.c.name.in_(searches)).group_by(SEARCHES.c.name, TRIALS.c.state)
    for name, state, count in connection.execute(grouped):
        counts.setdefault(name, {})[TrialState(state)] = count
    return counts


def search_modes(connection: Connection, searches: Sequence[str]) -> dict[str, str]:
    """Search -> `min` or `max`, the better direction of its objective; searches that have not begun are omitted."""
    mode = _json_text(connection, SEARCHES.c.spec, "mode")
    rows = connection.execute(select(SEARCHES.c.name, mode).where(SEARCHES.c.name.in_(searches)))
    return {str(name): str(found) for name, found in rows}


def best_values(connection: Connection, modes: Mapping[str, str]) -> dict[str, float]:
    """Search -> value of its best trial (`framework.search.records.best_trial`), given the searches' `search_modes`."""
    # NaN and infinities sort outside this range (`framework.search.tables.Number`).
    value, state = TRIALS.c.value, TRIALS.c.state
    is_finite = value.between(-sys.float_info.max, sys.float_info.max)
    finished = case((state == TrialState.FINISHED, value))
    query = select(SEARCHES.c.name, func.min(finished), func.max(finished), func.min(value), func.max(value))
    query = query.join(TRIALS, TRIALS.c.search_id == SEARCHES.c.id)
    query = query.where(SEARCHES.c.name.in_(modes), is_finite, state != TrialState.FAILED)
    best = {}
    for name, low, high, low_of_all, high_of_all in connection.execute(query.group_by(SEARCHES.c.name)):
        of_finished, of_all = (high, high_of_all) if modes[name] == "max" else (low, low_of_all)
        best[str(name)] = float(of_all if of_finished is None else of_finished)
    return best


def named_folders(connection: Connection) -> list[str]:
    """The checkpoint folders that users named for jobs that have not ended."""
    query = select(*(_json_text(connection, JOBS.c.request, *path) for path in _NAMED_FOLDERS))
    return [text for row in connection.execute(query.where(JOBS.c.state.in_(_OPEN))) for text in row if text]


def checkpoint_folders(connection: Connection, user: str, root: str) -> tuple[list[str], list[str]]:
    """The checkpoint folders of the user's jobs and of other users' jobs; `root` is the parent of those the service
    chose.
    """
    named = [_json_text(connection, JOBS.c.request, *path) for path in _NAMED_FOLDERS]
    chosen = _json_text(connection, JOBS.c.state_data, "checkpoint_dir")
    query = select(JOBS.c.user, JOBS.c.id, JOBS.c.submitted_s, *named, chosen)
    found: tuple[list[str], list[str]] = ([], [])
    for owner, job_id, submitted_s, *folders in connection.execute(query):
        own = [folder for folder in folders if folder]
        own += [f"{root}/{name}" for name in (job_id, dated_folder(job_id, submitted_s))]
        found[owner != user].extend(own)
    return found


def _json_text(connection: Connection, column: ColumnElement[str], *path: str) -> ColumnElement[str]:
    """One text of the JSON in a column, NULL if missing; the rest, which may be long, is not fetched."""
    if connection.dialect.name == "sqlite":
        return func.json_extract(column, ".".join(("$", *path)))
    found: ColumnElement[Any] = cast(column, JSON)
    for name in path:
        found = found[name]
    return found.as_string()


def thinned_progress(connection: Connection, job_id: str, after_step: int, limit: int) -> list[ProgressPoint]:
    """Progress of a job after a step: at most about `limit` points, evenly spaced, including the last."""
    ours = (PROGRESS.c.job_id == job_id) & (PROGRESS.c.step > after_step)
    count = connection.execute(select(func.count()).where(ours)).scalar_one()
    stride = max(1, math.ceil(count / limit))
    from_the_end = func.row_number().over(order_by=PROGRESS.c.step.desc()) - 1
    numbered = select(*_POINT, from_the_end.label("number")).where(ours).subquery()
    query = select(numbered).where(numbered.c.number % stride == 0).order_by(numbered.c.step)
    return [ProgressPoint(*point) for *point, _ in connection.execute(query)]


def output(
    connection: Connection, job_id: str, *, after: int, task: str | None, limit: int | None
) -> list[OutputChunk]:
    """Output of a job with numbers above `after`, oldest first; of one task, its output and the notes about missing
    output.
    """
    wanted: list[ColumnElement[bool]] = [OUTPUT.c.job_id == job_id, OUTPUT.c.number > after]
    if task is not None:
        wanted.append(OUTPUT.c.task.in_([task, NOTE_TASK]))
    query = select(OUTPUT.c.number, OUTPUT.c.task, OUTPUT.c.stream, OUTPUT.c.text)
    rows = connection.execute(query.where(*wanted).order_by(OUTPUT.c.number).limit(limit)).mappings().all()
    return [OutputChunk(**row) for row in rows]


def job_counts(connection: Connection) -> dict[tuple[JobKind, JobState], int]:
    query = select(JOBS.c.kind, JOBS.c.state, func.count()).group_by(JOBS.c.kind, JOBS.c.state)
    return {(JobKind(kind), JobState(state)): count for kind, state, count in connection.execute(query)}


def state_counts(connection: Connection, user: str | None = None) -> dict[JobState, int]:
    """State -> number of the user's jobs, or of all jobs; states without any are omitted."""
    query = select(JOBS.c.state, func.count()).group_by(JOBS.c.state)
    if user is not None:
        query = query.where(JOBS.c.user == user)
    counts = {JobState(state): int(count) for state, count in connection.execute(query)}
    return {state: counts[state] for state in JobState if state in counts}


def task_counts(connection: Connection) -> dict[str, int]:
    query = select(TASKS.c.state, func.count()).group_by(TASKS.c.state)
    return {str(state): int(count) for state, count in connection.execute(query)}


def slot_counts(connection: Connection) -> dict[str, int]:
    """State -> number of searches' tasks that have not ended; each is a slot."""
    query = select(TASKS.c.state, func.count()).join(JOBS, JOBS.c.id == TASKS.c.job_id)
    ours = query.where(JOBS.c.kind == str(JobKind.SEARCH), TASKS.c.ended_s.is_(None))
    return {str(state): int(count) for state, count in connection.execute(ours.group_by(TASKS.c.state))}


def open_job_counts(connection: Connection) -> dict[tuple[str, JobState], int]:
    """(User, state) -> number of jobs that have not ended."""
    query = select(JOBS.c.user, JOBS.c.state, func.count()).where(JOBS.c.state.in_(_OPEN))
    grouped = query.group_by(JOBS.c.user, JOBS.c.state)
    return {(str(user), JobState(state)): int(count) for user, state, count in connection.execute(grouped)}


def oldest_queued_s(connection: Connection) -> float | None:
    """Submission time (epoch seconds) of the job that has waited longest for its first run; None without one."""
    query = select(func.min(JOBS.c.submitted_s))
    found = connection.execute(query.where(JOBS.c.state == str(JobState.QUEUED), JOBS.c.started_s.is_(None))).scalar()
    return None if found is None else float(found)


def bundle_bytes(connection: Connection, user: str | None = None) -> int:
    """Total size of the bundles of the user's jobs, or of all jobs."""
    query = select(func.coalesce(func.sum(func.length(BUNDLES.c.archive)), 0))
    if user is not None:
        query = query.join(JOBS, JOBS.c.id == BUNDLES.c.job_id).where(JOBS.c.user == user)
    return int(connection.execute(query).scalar_one())


def trial_counts(connection: Connection) -> dict[TrialState, int]:
    """State -> number of trials of this service's searches."""
    query = select(TRIALS.c.state, func.count()).join(SEARCHES, TRIALS.c.search_id == SEARCHES.c.id)
    grouped = query.where(SEARCHES.c.name.in_(select(JOBS.c.id))).group_by(TRIALS.c.state)
    return {TrialState(state): count for state, count in connection.execute(grouped)}


def newest_ids(connection: Connection, limit: int = 1000) -> list[str]:
    query = select(JOBS.c.id).order_by(JOBS.c.number.desc()).limit(limit)
    return list(connection.execute(query).scalars())


def open_jobs(connection: Connection, user: str) -> int:
    query = select(func.count()).select_from(JOBS).where(JOBS.c.user == user, JOBS.c.state.in_(_OPEN))
    return int(connection.execute(query).scalar_one())


def output_bytes(connection: Connection, user: str) -> int:
    """Total size in UTF-8 of the stored output of the user's jobs."""
    query = select(func.coalesce(func.sum(_text_bytes(connection)), 0)).where(_output_of(user))
    return int(connection.execute(query).scalar_one())


def oldest_output(connection: Connection, user: str) -> Iterator[tuple[int, str, int]]:
    """Number, job and bytes of each chunk of output of the user's jobs, oldest first."""
    query = select(OUTPUT.c.number, OUTPUT.c.job_id, _text_bytes(connection)).where(_output_of(user))
    with connection.execute(query.order_by(OUTPUT.c.number)) as rows:
        for number, job_id, size in rows:
            yield int(number), str(job_id), int(size)


def _text_bytes(connection: Connection) -> ColumnElement[int]:
    """The size of a chunk in UTF-8: LENGTH counts characters."""
    if connection.dialect.name == "sqlite":
        return func.length(cast(OUTPUT.c.text, LargeBinary))
    return func.octet_length(OUTPUT.c.text)


def _output_of(user: str) -> ColumnElement[bool]:
    return and_(OUTPUT.c.job_id.in_(select(JOBS.c.id).where(JOBS.c.user == user)), OUTPUT.c.task != NOTE_TASK)


def state_of(connection: Connection, job_id: str) -> JobState | None:
    state = connection.execute(select(JOBS.c.state).where(JOBS.c.id == job_id)).scalar()
    return None if state is None else JobState(state)
