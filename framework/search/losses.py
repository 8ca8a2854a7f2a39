"""The losses of trials in the database: every report at first, merged evenly as they become many."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import ColumnElement, case, delete, func, insert, select
from sqlalchemy.engine import Connection

from framework.search.tables import LOSSES

LIMIT = 2000
"""Rows of a trial; beyond it, neighbours are merged until half as many are left."""

Row = dict[str, Any]


def add(connection: Connection, search_id: int, trial: int, run: int, reports: Sequence[Mapping[str, Any]]) -> None:
    """Adds `progress` reports of a run (`dike.trial.reports`), oldest first; steps that are there already are left out.

    Raises:
        ValueError: if a report is malformed.
    """
    ours = _of(search_id, trial)
    loss_step = case((LOSSES.c.count > 0, LOSSES.c.step))
    last = select(func.max(LOSSES.c.number), func.max(LOSSES.c.step), func.max(loss_step), func.count()).where(ours)
    last_number, last_step, last_loss_step, count = connection.execute(last).one()
    rows = [_row(run, report) for report in reports]
    # A step may be reported twice: its loss, then the results of the epoch that it ends.
    rows = [row for row in rows if last_step is None or row["step"] >= last_step]
    rows = [row for row in rows if not row["count"] or last_loss_step is None or row["step"] > last_loss_step]
    if not rows:
        return
    _insert(connection, search_id, trial, rows, 0 if last_number is None else last_number + 1)
    if count + len(rows) > LIMIT:
        kept = connection.execute(select(LOSSES).where(ours).order_by(LOSSES.c.number)).mappings().all()
        connection.execute(delete(LOSSES).where(ours))
        _insert(connection, search_id, trial, merge([dict(row) for row in kept], LIMIT // 2), 0)


def load(
    connection: Connection, search_id: int, trial: int | None = None, limit: int | None = None
) -> dict[int, list[dict[str, Any]]]:
    """Trial -> its reports, oldest first, with the key `run` besides.

    Args:
        connection: to the database.
        search_id: which search.
        trial: only of this trial; None for all.
        limit: at most so many reports of each trial, evenly chosen, the last among them; None for all.
    """
    ours = LOSSES.c.search_id == search_id if trial is None else _of(search_id, trial)
    statement = select(LOSSES).where(ours).order_by(LOSSES.c.trial, LOSSES.c.number)
    if limit is not None:
        # Numbers count up from 0 without gaps.
        lasts = select(LOSSES.c.trial, func.max(LOSSES.c.number).label("number")).where(ours).group_by(LOSSES.c.trial)
        last = lasts.subquery()
        stride = last.c.number // limit + 1
        statement = statement.join(last, last.c.trial == LOSSES.c.trial)
        statement = statement.where((last.c.number - LOSSES.c.number) % stride == 0)
    reports: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for row in connection.execute(statement).mappings():
        report: dict[str, Any] = {"run": row["run"], "step": row["step"], "train_s": row["train_s"]}
        if row["count"]:
            report.update({name: _number(row[name]) for name in ("loss", "low", "high")}, count=row["count"])
        if row["value"] is not None:
            report["value"] = row["value"]
        report["metrics"] = json.loads(row["metrics"])
        reports[row["trial"]].append(report)
    return dict(reports)


def merge(rows: Sequence[Row], limit: int) -> list[Row]:
    """Merges neighbours so that about `limit` rows are left that stand for equally many reports each.

    A merged row says of both together what each said: the mean, least and greatest loss, and the newest of the rest.
    """
    share = math.ceil(sum(row["reports"] for row in rows) / limit)
    merged: list[Row] = []
    for row in rows:
        if merged and merged[-1]["reports"] + row["reports"] <= share:
            merged[-1] = _together(merged[-1], row)
        else:
            merged.append(row)
    return merged


def _together(first: Row, second: Row) -> Row:
    counted = [row for row in (first, second) if row["count"]]
    count = sum(row["count"] for row in counted)
    numbers: Row = {"loss": None, "low": None, "high": None}
    if counted:
        numbers["loss"] = sum(_number(row["loss"]) * (row["count"] / count) for row in counted)
        lows, highs = ([_number(row[name]) for row in counted] for name in ("low", "high"))
        is_nan = any(map(math.isnan, [*lows, *highs]))
        numbers["low"], numbers["high"] = (math.nan, math.nan) if is_nan else (min(lows), max(highs))
    value = first["value"] if second["value"] is None else second["value"]
    metrics = json.dumps({**json.loads(first["metrics"]), **json.loads(second["metrics"])})
    reports = first["reports"] + second["reports"]
    return {**second, **numbers, "count": count, "value": value, "metrics": metrics, "reports": reports}


def _row(run: int, report: Mapping[str, Any]) -> Row:
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
            "value": float(report["value"]) if report.get("value") is not None else None,
            "metrics": json.dumps({str(name): float(value) for name, value in report.get("metrics", {}).items()}),
            "reports": 1,
        }
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"malformed progress report: {error!r}") from error


def _number(value: float | None) -> float:
    """A loss that was reported; a database that knows no NaN has NULL for it."""
    return math.nan if value is None else float(value)


def _insert(connection: Connection, search_id: int, trial: int, rows: Sequence[Row], number: int) -> None:
    keys = {"search_id": search_id, "trial": trial}
    connection.execute(insert(LOSSES), [{**row, **keys, "number": at} for at, row in enumerate(rows, number)])


def _of(search_id: int, trial: int) -> ColumnElement[bool]:
    return (LOSSES.c.search_id == search_id) & (LOSSES.c.trial == trial)
