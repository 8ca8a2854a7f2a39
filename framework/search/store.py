"""Stores searches in a database: specification, trials, time slices, losses, output.

Only the process that runs a search writes it (`Store.lock`). Each method is one short transaction, durable on return.
"""

from __future__ import annotations

import copy
import dataclasses
import difflib
import functools
import itertools
import json
import math
import operator
import time
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from pydantic import TypeAdapter
from sqlalchemy import ColumnElement, Engine, RowMapping, Table, case, delete, func, insert, select, true, update
from sqlalchemy.engine import Connection
from sqlalchemy.exc import IntegrityError

from dike.exceptions import BadInputError
from executor.trial_messages import TrialOutput
from framework.scheduler.lease import Heartbeat, Lease, LeasedRow, database_time_s, is_owned
from framework.scheduler.records import OutputChunk
from framework.search import output
from framework.search.database import open_database, parse_url, storage_errors
from framework.search.objective import MAX_REPORTS, Objective, even_groups
from framework.search.records import SearchSpec, SliceRecord, TrialRecord, TrialState
from framework.search.tables import LOSSES, NAME_LENGTH, OUTPUT, SEARCHES, SLICES, TRIALS

LossRow = dict[str, Any]
_SPEC = TypeAdapter(SearchSpec)
_TRIAL_COLUMNS = [column.name for column in TRIALS.c if column.name != "search_id"]
_SLICE_COLUMNS = [column.name for column in SLICES.c if column.name != "search_id"]


@dataclasses.dataclass(frozen=True)
class SearchSummary:
    """A search in the list of searches.

    Attributes:
        spec: its specification.
        created_s, ended_s: seconds since the epoch; `ended_s` is None until it ends.
        failure: why it ended early; empty if it did not.
        is_running: whether a process runs it now.
        states: state -> number of trials.
    """

    spec: SearchSpec
    created_s: float
    ended_s: float | None
    failure: str
    is_running: bool
    states: dict[TrialState, int]


class Store:
    """A database of searches, and one open search in it after `create_search` or `open_search`.

    Args:
        url: an SQLAlchemy URL.
        must_exist: whether to reject a database without searches instead of creating one.
        engine: that database, if it is open already, owned by the caller.

    Raises:
        BadInputError: by any method, if the database cannot be used.
    """

    def __init__(self, url: str, *, must_exist: bool = False, engine: Engine | None = None) -> None:
        self._engine = engine or open_database(url, must_exist=must_exist)
        self._writing_engine = self._engine.execution_options(dike_writes=True)
        self._url = parse_url(url)
        self._lease: Lease | None = None
        self._search_id: int | None = None
        self._spec: SearchSpec | None = None
        self._output_kept: dict[int, int] = {}

    def close(self) -> None:
        self._engine.dispose()

    @property
    def spec(self) -> SearchSpec:
        assert self._spec is not None, "no search has been opened"
        return self._spec

    def create_search(self, spec: SearchSpec, options: Mapping[str, Any] | None = None) -> None:
        """Creates a search, with the options of `dike tune` outside its specification as JSON values.

        Raises:
            BadInputError: if the name exists or is invalid.
        """
        if not spec.name or len(spec.name) > NAME_LENGTH:
            raise BadInputError(f"A search's name must have 1 to {NAME_LENGTH} characters; choose another --name.")
        written = {"spec": write_spec(spec), "options": json.dumps(dict(options or {}))}
        values = {"name": spec.name, "created_s": time.time(), **written}
        with self._transaction() as connection:
            try:
                key = connection.execute(insert(SEARCHES).values(values)).inserted_primary_key
            except IntegrityError:
                raise BadInputError(
                    f"There is a search '{spec.name}' already; resume it with --resume {spec.name}, or choose "
                    "another --name."
                ) from None
        assert key is not None
        self._search_id, self._spec = key[0], spec

    def open_search(self, name: str) -> SearchSpec:
        """Opens a search, to read or resume it.

        Raises:
            BadInputError: if it does not exist.
        """
        with self.reading() as connection:
            row = connection.execute(select(SEARCHES.c.id, SEARCHES.c.spec).where(SEARCHES.c.name == name)).first()
        if row is None:
            raise BadInputError(
                f"There is no search '{name}' here; {self.hint(name)} If it belongs to a service, see "
                f"dike jobs {name}, and resume it with dike tune --resume {name} --detach."
            )
        self._search_id, self._spec = row.id, read_spec(name, row.spec)
        return self._spec

    def has_search(self, name: str) -> bool:
        with self.reading() as connection:
            return connection.execute(select(SEARCHES.c.id).where(SEARCHES.c.name == name)).first() is not None

    def hint(self, name: str) -> str:
        """Suggests existing searches in place of a missing one."""
        with self.reading() as connection:
            near = difflib.get_close_matches(name, connection.execute(select(SEARCHES.c.name)).scalars(), n=1)
        return f"did you mean '{near[0]}'?" if near else "`dike trials` lists the searches there are."

    def other_search(self, name: str) -> Store:
        """Opens another search of this database for reading; it shares this store's connections.

        Raises:
            BadInputError: if it does not exist.
        """
        other = copy.copy(self)
        other._lease = None
        other.open_search(name)
        return other

    def searches(self, *names: str) -> list[SearchSummary]:
        """Returns all searches, or those of these names, oldest first."""
        named = SEARCHES.c.name.in_(names) if names else true()
        counted = select(TRIALS.c.search_id, TRIALS.c.state, func.count()).group_by(TRIALS.c.search_id, TRIALS.c.state)
        counted = counted.where(TRIALS.c.search_id.in_(select(SEARCHES.c.id).where(named)))
        with self.reading() as connection:
            now_s = database_time_s(connection)
            rows = connection.execute(select(SEARCHES).where(named).order_by(SEARCHES.c.created_s, SEARCHES.c.id)).all()
            states: dict[int, dict[TrialState, int]] = defaultdict(dict)
            for search_id, state, count in connection.execute(counted):
                states[search_id][TrialState(state)] = count
        return [
            SearchSummary(
                read_spec(row.name, row.spec),
                row.created_s,
                row.ended_s,
                row.failure,
                is_owned(row, now_s),
                states[row.id],
            )
            for row in rows
        ]

    @contextmanager
    def lock(self, name: str, heartbeat: Heartbeat | None = None, last_sign_s: float | None = None) -> Iterator[None]:
        """Acquires the exclusive lease to run the search, for the duration of the context (arguments: `Lease`).

        Meanwhile each writing method raises `JobFailedError` if another process has taken the lease.

        Raises:
            BadInputError: if another process runs it; the message names it.
        """
        lease = Lease(
            self._writing_engine, LeasedRow(SEARCHES, self._id_of(name), f"search '{name}'"), heartbeat=heartbeat
        )
        with storage_errors(self._url):
            lease.acquire()
        self._lease = lease
        try:
            yield
        finally:
            self._lease = None
            with storage_errors(self._url):
                lease.release(last_sign_s)

    def set_framework_id(self, name: str, framework_id: str | None) -> None:
        """Stores the search's framework id of Mesos, with which a successor can take over its tasks."""
        with self._transaction() as connection:
            connection.execute(update(SEARCHES).where(SEARCHES.c.name == name).values(framework_id=framework_id))

    def framework_id(self, name: str) -> str | None:
        with self.reading() as connection:
            return connection.execute(select(SEARCHES.c.framework_id).where(SEARCHES.c.name == name)).scalar()

    def last_heartbeat_s(self, name: str) -> float | None:
        """Returns the last heartbeat of the process that runs or ran the search, by the database's clock."""
        with self.reading() as connection:
            return connection.execute(select(SEARCHES.c.heartbeat_s).where(SEARCHES.c.name == name)).scalar()

    def finish_search(self, failure: str = "") -> None:
        """Marks the search as ended, with the reason if it ended early."""
        with self._transaction() as connection:
            values = {"ended_s": time.time(), "failure": failure}
            connection.execute(update(SEARCHES).where(SEARCHES.c.id == self._search_id).values(values))

    @property
    def options(self) -> dict[str, Any]:
        """Options outside the specification with which the search was last started or resumed."""
        with self.reading() as connection:
            text = connection.execute(select(SEARCHES.c.options).where(SEARCHES.c.id == self._require_id())).scalar()
        return dict(json.loads(text or "{}"))

    def change_search(self, spec: SearchSpec, options: Mapping[str, Any]) -> None:
        """Replaces specification and options of the open search; its name and space must not change."""
        written = {"spec": write_spec(spec), "options": json.dumps(dict(options))}
        with self._transaction() as connection:
            connection.execute(update(SEARCHES).where(SEARCHES.c.id == self._require_id()).values(written))
        self._spec = spec

    def reopen_search(self) -> None:
        with self._transaction() as connection:
            values = {"ended_s": None, "failure": ""}
            connection.execute(update(SEARCHES).where(SEARCHES.c.id == self._search_id).values(values))

    def delete_search(self) -> None:
        with self._transaction() as connection:
            for table in (OUTPUT, LOSSES, SLICES, TRIALS):
                connection.execute(delete(table).where(table.c.search_id == self._require_id()))
            connection.execute(delete(SEARCHES).where(SEARCHES.c.id == self._require_id()))

    def save_trial(self, record: TrialRecord) -> None:
        """Stores a trial, without readings and slices."""
        self._save(TRIALS, ("number",), trial_values(record))

    def load_trials(self, *, readings: bool = True) -> list[TrialRecord]:
        """Returns all trials of the search by number.

        Args:
            readings: whether to load readings and slices, which may take seconds.
        """
        objective = Objective(self.spec.metric, self.spec.mode, self.spec.value)
        with self.reading() as connection:
            rows = connection.execute(self._select(TRIALS).order_by(TRIALS.c.number)).mappings().all()
            reports = _load_losses(connection, self._require_id()) if readings else {}
            from_steps: dict[int, list[int]] = defaultdict(list)
            for record in self._load_slices(connection) if readings else ():
                from_steps[record.trial].append(record.from_step)
            held = connection.execute(self._select(SLICES).where(SLICES.c.end_s.is_(None)))
            current = {(piece.trial, piece.run): piece for piece in map(read_slice, held.mappings())}
        found = [read_trial(row, objective, reports.get(row["number"], ()), from_steps[row["number"]]) for row in rows]
        for trial in found:
            if trial.state is TrialState.RUNNING:
                trial.current = current.get((trial.number, trial.runs - 1))
        return found

    def save_slice(self, record: SliceRecord) -> None:
        self._save(SLICES, ("trial", "run"), slice_values(record))

    def load_slices(self) -> list[SliceRecord]:
        """Returns all time slices of the search, in order of their start."""
        with self.reading() as connection:
            return self._load_slices(connection)

    def save_progress(self, record: TrialRecord, reports: Iterable[tuple[int, Mapping[str, Any]]]) -> None:
        """Stores a trial and its new reports in one transaction.

        Reports of earlier runs for the same steps are kept.

        Args:
            record: the trial.
            reports: run, and content of a `progress` report of it; oldest first.

        Raises:
            ValueError: if a report is malformed.
        """
        with self._transaction() as connection:
            for run, pairs in itertools.groupby(reports, key=operator.itemgetter(0)):
                contents = [content for _, content in pairs]
                _add_losses(connection, self._require_id(), record.number, run, contents)
            self._write(connection, TRIALS, ("number",), trial_values(record))

    def load_losses(self, trial: int | None = None, limit: int | None = None) -> dict[int, list[dict[str, Any]]]:
        """Returns trial -> its reports, oldest first, as in `dike.trial.reports` with the additional key `run`.

        Args:
            trial: load only this trial.
            limit: maximum number per trial, evenly chosen, including the last.
        """
        with self.reading() as connection:
            return _load_losses(connection, self._require_id(), trial, limit)

    def add_output(self, pieces: Sequence[TrialOutput]) -> None:
        """Appends output of runs, each byte once; of long output the middle is deleted."""
        limit = output.limit_of(self.spec.trial_count)
        trials = {piece.trial for piece in pieces}
        with self._transaction() as connection:
            output.add_output(connection, self._require_id(), pieces)
            for trial in trials:
                more = sum(len(piece.data) for piece in pieces if piece.trial == trial)
                kept = self._output_kept[trial] + more if trial in self._output_kept else limit + 1
                if kept > limit:
                    kept = output.kept_bytes(connection, self._require_id(), trial)
                if kept > limit:
                    output.thin_output(connection, self._require_id(), trial, limit)
                    kept = output.kept_bytes(connection, self._require_id(), trial)
                self._output_kept[trial] = kept

    def trial_state(self, trial: int) -> TrialState | None:
        """Returns the state of a trial; None if it does not exist yet."""
        condition = (TRIALS.c.search_id == self._require_id()) & (TRIALS.c.number == trial)
        with self.reading() as connection:
            state = connection.execute(select(TRIALS.c.state).where(condition)).scalar()
        return None if state is None else TrialState(state)

    def output_received(self, trial: int, run: int) -> int:
        """Returns how many bytes of a run's output have been stored or deleted."""
        with self.reading() as connection:
            return output.received_bytes(connection, self._require_id(), trial, run)

    def load_output(self, trial: int, *, after: int = 0, limit: int | None = None) -> list[OutputChunk]:
        with self.reading() as connection:
            return output.load_output(connection, self._require_id(), trial, after=after, limit=limit)

    @contextmanager
    def _transaction(self) -> Iterator[Connection]:
        with storage_errors(self._url), self._writing_engine.begin() as connection:
            if self._lease is not None:
                self._lease.check(connection)
            yield connection

    @contextmanager
    def reading(self) -> Iterator[Connection]:
        with storage_errors(self._url), self._engine.connect() as connection:
            yield connection

    def _require_id(self) -> int:
        assert self._search_id is not None, "no search has been opened"
        return self._search_id

    def _id_of(self, name: str) -> int:
        if self._spec is None or self._spec.name != name:
            self.open_search(name)
        return self._require_id()

    def _save(self, table: Table, keys: tuple[str, ...], values: dict[str, Any]) -> None:
        with self._transaction() as connection:
            self._write(connection, table, keys, values)

    def _write(self, connection: Connection, table: Table, keys: tuple[str, ...], values: dict[str, Any]) -> None:
        where = [table.c.search_id == self._require_id(), *(table.c[key] == values[key] for key in keys)]
        if connection.execute(update(table).where(*where).values(values)).rowcount == 0:
            connection.execute(insert(table).values(search_id=self._search_id, **values))

    def _select(self, table: Table) -> Any:
        return select(table).where(table.c.search_id == self._require_id())

    def _load_slices(self, connection: Connection) -> list[SliceRecord]:
        rows = connection.execute(self._select(SLICES).order_by(SLICES.c.start_s, SLICES.c.run, SLICES.c.trial))
        return [read_slice(row) for row in rows.mappings()]


# Records as rows, and back.


def write_spec(spec: SearchSpec) -> str:
    return json.dumps(dataclasses.asdict(spec))


def read_spec(name: str, text: str) -> SearchSpec:
    """Parses what `write_spec` returned.

    Raises:
        BadInputError: if another version of Dike wrote it, with other fields.
    """
    try:
        return _SPEC.validate_python(json.loads(text))
    except ValueError as error:
        raise BadInputError(
            f"The search '{name}' in this database was written by another version of Dike; use that one, or another "
            "--storage."
        ) from error


def trial_values(record: TrialRecord) -> dict[str, Any]:
    """Returns a trial's columns, without readings and slices, which have tables of their own."""
    values = {name: getattr(record, name) for name in _TRIAL_COLUMNS}
    texts = {"parameters": json.dumps(record.parameters), "metrics": json.dumps(record.metrics)}
    return {**values, **texts, "state": record.state.value}


def slice_values(record: SliceRecord) -> dict[str, Any]:
    return {name: getattr(record, name) for name in _SLICE_COLUMNS}


def read_slice(row: RowMapping) -> SliceRecord:
    return SliceRecord(**{name: row[name] for name in _SLICE_COLUMNS})


def read_trial(
    row: RowMapping, objective: Objective, reports: Sequence[Mapping[str, Any]], from_steps: Sequence[int]
) -> TrialRecord:
    """Builds a trial from its row, its reports (oldest first), and the steps before each of its time slices."""
    values = {name: row[name] for name in _TRIAL_COLUMNS}
    texts = {name: json.loads(row[name]) for name in ("parameters", "metrics")}
    record = TrialRecord(**{**values, **texts, "state": TrialState(row["state"])})
    record.readings = objective.readings(reports)
    steps = [reading.step for reading in record.readings]
    for step in from_steps:
        record.slices.append(max([bisect_right(steps, step), *record.slices[-1:]]))
    return record


# Losses: one row per report, merged evenly beyond a maximum.


def _add_losses(
    connection: Connection, search_id: int, trial: int, run: int, reports: Sequence[Mapping[str, Any]]
) -> None:
    """Appends `progress` reports of a run (`dike.trial.reports`), oldest first; stored steps are skipped.

    Raises:
        ValueError: if a report is malformed.
    """
    condition = _losses_of(search_id, trial)
    loss_step = case((LOSSES.c.count > 0, LOSSES.c.step))
    last = select(func.max(LOSSES.c.number), func.max(LOSSES.c.step), func.max(loss_step), func.count()).where(
        condition
    )
    last_number, last_step, last_loss_step, count = connection.execute(last).one()
    rows = [_loss_row(run, report) for report in reports]
    # A step may be reported twice: its loss, then the results of the epoch.
    rows = [row for row in rows if last_step is None or row["step"] >= last_step]
    rows = [row for row in rows if not row["count"] or last_loss_step is None or row["step"] > last_loss_step]
    if not rows:
        return
    _insert_losses(connection, search_id, trial, rows, 0 if last_number is None else last_number + 1)
    if count + len(rows) > MAX_REPORTS:
        stored = connection.execute(select(LOSSES).where(condition).order_by(LOSSES.c.number)).mappings().all()
        connection.execute(delete(LOSSES).where(condition))
        _insert_losses(connection, search_id, trial, merge_losses([dict(row) for row in stored], MAX_REPORTS // 2), 0)


def _load_losses(
    connection: Connection, search_id: int, trial: int | None = None, limit: int | None = None
) -> dict[int, list[dict[str, Any]]]:
    condition = LOSSES.c.search_id == search_id if trial is None else _losses_of(search_id, trial)
    statement = select(LOSSES).where(condition).order_by(LOSSES.c.trial, LOSSES.c.number)
    if limit is not None:
        # Numbers are consecutive from 0.
        lasts = (
            select(LOSSES.c.trial, func.max(LOSSES.c.number).label("number")).where(condition).group_by(LOSSES.c.trial)
        )
        last = lasts.subquery()
        stride = last.c.number // limit + 1
        statement = statement.join(last, last.c.trial == LOSSES.c.trial)
        statement = statement.where((last.c.number - LOSSES.c.number) % stride == 0)
    reports: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for row in connection.execute(statement).mappings():
        report: dict[str, Any] = {"run": row["run"], "step": row["step"], "train_s": row["train_s"]}
        if row["count"]:
            report.update({name: _loss(row[name]) for name in ("loss", "low", "high")}, count=row["count"])
        if row["value"] is not None:
            report["value"] = row["value"]
        if row["best"] is not None:
            report["best"] = row["best"]
        report["metrics"] = json.loads(row["metrics"])
        reports[row["trial"]].append(report)
    return dict(reports)


def merge_losses(rows: Sequence[LossRow], limit: int) -> list[LossRow]:
    """Merges neighbours into about `limit` rows that stand for equally many reports each.

    A merged row has the mean, minimum and maximum loss, and the newest of everything else.
    """
    ends = even_groups([row["reports"] for row in rows], limit)
    return [functools.reduce(_merged, rows[begin:end]) for begin, end in itertools.pairwise([0, *ends])]


def _merged(first: LossRow, second: LossRow) -> LossRow:
    counted = [row for row in (first, second) if row["count"]]
    count = sum(row["count"] for row in counted)
    numbers: LossRow = {"loss": None, "low": None, "high": None}
    if counted:
        numbers["loss"] = sum(_loss(row["loss"]) * (row["count"] / count) for row in counted)
        lows, highs = ([_loss(row[name]) for row in counted] for name in ("low", "high"))
        is_nan = any(map(math.isnan, [*lows, *highs]))
        numbers["low"], numbers["high"] = (math.nan, math.nan) if is_nan else (min(lows), max(highs))
    newest = {name: first[name] if second[name] is None else second[name] for name in ("value", "best")}
    metrics = json.dumps({**json.loads(first["metrics"]), **json.loads(second["metrics"])})
    reports = first["reports"] + second["reports"]
    return {**second, **numbers, **newest, "count": count, "metrics": metrics, "reports": reports}


def _loss_row(run: int, report: Mapping[str, Any]) -> LossRow:
    try:
        has_loss = "loss" in report
        return {
            "run": run,
            "step": int(report["step"]),
            "train_s": float(report["train_s"]),
            "loss": float(report["loss"]) if has_loss else None,
            "low": float(report["low"]) if has_loss else None,
            "high": float(report["high"]) if has_loss else None,
            "count": max(1, int(report["count"])) if has_loss else 0,
            **{name: None if report.get(name) is None else float(report[name]) for name in ("value", "best")},
            "metrics": json.dumps({str(name): float(value) for name, value in report.get("metrics", {}).items()}),
            "reports": 1,
        }
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"malformed progress report: {error!r}") from error


def _loss(value: float | None) -> float:
    """Replaces NULL, from databases without NaN, by NaN."""
    return math.nan if value is None else float(value)


def _insert_losses(connection: Connection, search_id: int, trial: int, rows: Sequence[LossRow], number: int) -> None:
    keys = {"search_id": search_id, "trial": trial}
    connection.execute(insert(LOSSES), [{**row, **keys, "number": at} for at, row in enumerate(rows, number)])


def _losses_of(search_id: int, trial: int) -> ColumnElement[bool]:
    return (LOSSES.c.search_id == search_id) & (LOSSES.c.trial == trial)
