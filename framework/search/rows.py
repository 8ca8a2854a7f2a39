"""Records of a search as rows of the database, and back."""

from __future__ import annotations

import dataclasses
import json
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import TypeAdapter
from sqlalchemy import RowMapping

from dike.exceptions import BadInputError
from framework.search.objective import Objective
from framework.search.records import SearchSpec, SliceRecord, TrialRecord, TrialState
from framework.search.tables import SLICES, TRIALS

_SPEC = TypeAdapter(SearchSpec)
_TRIAL_COLUMNS = [column.name for column in TRIALS.c if column.name != "search_id"]
_SLICE_COLUMNS = [column.name for column in SLICES.c if column.name != "search_id"]


def write_spec(spec: SearchSpec) -> str:
    """A search's specification as text."""
    return json.dumps(dataclasses.asdict(spec))


def read_spec(name: str, text: str) -> SearchSpec:
    """Reads what `write_spec` wrote.

    Raises:
        BadInputError: if another version of Dike wrote it, which has other fields.
    """
    try:
        return _SPEC.validate_python(json.loads(text))
    except ValueError as error:
        raise BadInputError(
            f"The search '{name}' in this database was written by another version of Dike; use that one, or another "
            "--storage."
        ) from error


def trial_values(record: TrialRecord) -> dict[str, Any]:
    """A trial's columns; its readings and slices have tables of their own."""
    values = {name: getattr(record, name) for name in _TRIAL_COLUMNS}
    texts = {"parameters": json.dumps(record.parameters), "metrics": json.dumps(record.metrics)}
    return {**values, **texts, "state": record.state.value}


def slice_values(record: SliceRecord) -> dict[str, Any]:
    """A time slice's columns."""
    return {name: getattr(record, name) for name in _SLICE_COLUMNS}


def read_slice(row: RowMapping) -> SliceRecord:
    """The time slice in a row."""
    return SliceRecord(**_known(row, _SLICE_COLUMNS))


def read_trial(
    row: RowMapping, objective: Objective, reports: Sequence[Mapping[str, Any]], from_steps: Sequence[int]
) -> TrialRecord:
    """The trial in a row.

    Args:
        row: the row.
        objective: what its readings are of.
        reports: what it reported, oldest first.
        from_steps: for each of its time slices, the steps done before.
    """
    values = _known(row, _TRIAL_COLUMNS)
    texts = {name: json.loads(row[name]) for name in ("parameters", "metrics")}
    record = TrialRecord(**{**values, **texts, "state": TrialState(row["state"])})
    for report in reports:
        reading = objective.reading(report)
        if reading is not None and (not record.readings or reading.step > record.readings[-1].step):
            record.readings.append(reading)
    steps = [reading.step for reading in record.readings]
    for step in from_steps:
        record.slices.append(max([bisect_right(steps, step), *record.slices[-1:]]))
    return record


def _known(row: RowMapping, names: Sequence[str]) -> dict[str, Any]:
    """What is in a row; for the rest a record has its defaults."""
    return {name: row[name] for name in names if row[name] is not None}
