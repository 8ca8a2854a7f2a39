"""Tables of searches, in one database with Optuna's; docs/files.md describes them."""

from __future__ import annotations

import dataclasses
import math
import typing
from collections.abc import Collection
from typing import Any

from sqlalchemy import BigInteger, Column, Float, ForeignKey, Index, Integer, MetaData, String, Table, Text
from sqlalchemy.engine import Dialect
from sqlalchemy.types import TypeDecorator, TypeEngine

from framework.scheduler.lease import lease_columns
from framework.search.records import SliceRecord, TrialRecord

NAME_LENGTH = 200

METADATA = MetaData()


class _UnconvertedFloat(Float[float]):
    """Passes values to the database unchanged."""

    def bind_processor(self, dialect: Dialect) -> None: ...


class Number(TypeDecorator[float]):
    """A float that may be infinite or NaN.

    SQLite turns NaN into NULL, so these are stored as text there, which sorts after all numbers, as NaN does in
    PostgreSQL. Databases without NaN and infinities store NULL.
    """

    impl = Float(53)
    cache_ok = True

    def load_dialect_impl(self, dialect: Dialect) -> TypeEngine[Any]:
        return dialect.type_descriptor(_UnconvertedFloat(53) if dialect.name == "sqlite" else Float(53))

    def process_bind_param(self, value: float | None, dialect: Dialect) -> Any:
        if value is None or math.isfinite(value) or dialect.name == "postgresql":
            return value
        return repr(float(value)) if dialect.name == "sqlite" else None

    def process_result_value(self, value: Any, dialect: Dialect) -> float | None:
        return None if value is None else float(value)


SEARCHES = Table(
    "dike_searches",
    METADATA,
    Column("id", Integer, primary_key=True),
    Column("name", String(NAME_LENGTH), nullable=False, unique=True),
    Column("spec", Text, nullable=False),
    Column("created_s", Float(53), nullable=False),
    Column("ended_s", Float(53)),
    Column("failure", Text, nullable=False, default=""),
    Column("framework_id", String(NAME_LENGTH)),
    # Options of `dike tune` outside the specification, as JSON.
    Column("options", Text, nullable=False),
    *lease_columns(),
)


def _key(name: str) -> tuple[Column[Any], Column[Any]]:
    """Returns the leading key columns: the search, and a number in it."""
    return (
        Column("search_id", ForeignKey(SEARCHES.c.id, ondelete="CASCADE"), primary_key=True),
        Column(name, Integer, primary_key=True, autoincrement=False),
    )


def _columns(record: type, without: Collection[str]) -> list[Column[Any]]:
    """Returns columns for a record's fields, except these and lists, which have tables of their own."""
    hints = typing.get_type_hints(record)
    columns = []
    for field in dataclasses.fields(record):
        hint = hints[field.name]
        if field.name in without or typing.get_origin(hint) is list:
            continue
        columns.append(Column(field.name, _TYPES.get(hint, Text), nullable=type(None) in typing.get_args(hint)))
    return columns


_TYPES: dict[Any, type[TypeEngine[Any]]] = {
    int: BigInteger,
    int | None: BigInteger,
    float: Number,
    float | None: Number,
}
"""All other types are text: names, states, and JSON."""

TRIALS = Table("dike_trials", METADATA, *_key("number"), *_columns(TrialRecord, ("number", "current")))

SLICES = Table(
    "dike_slices",
    METADATA,
    *_key("trial"),
    Column("run", Integer, primary_key=True, autoincrement=False),
    *_columns(SliceRecord, ("trial", "run")),
)

LOSSES = Table(
    "dike_losses",
    METADATA,
    *_key("trial"),
    Column("number", Integer, primary_key=True, autoincrement=False),
    Column("run", Integer, nullable=False),
    Column("step", BigInteger, nullable=False),
    Column("train_s", Float(53), nullable=False),
    Column("loss", Number),
    Column("low", Number),
    Column("high", Number),
    Column("count", Integer, nullable=False),
    Column("value", Number),
    Column("best", Number),
    Column("metrics", Text, nullable=False),
    # Number of reports merged into this row.
    Column("reports", Integer, nullable=False),
)

OUTPUT = Table(
    "dike_trial_output",
    METADATA,
    # SQLite only autoincrements INTEGER keys.
    Column("number", BigInteger().with_variant(Integer, "sqlite"), primary_key=True, autoincrement=True),
    Column("search_id", ForeignKey(SEARCHES.c.id, ondelete="CASCADE"), nullable=False),
    Column("trial", Integer, nullable=False),
    Column("run", Integer, nullable=False),
    # Bytes of the run's output before this piece, and in it.
    Column("offset", BigInteger, nullable=False),
    Column("bytes", BigInteger, nullable=False),
    # Bytes deleted right before this piece.
    Column("skipped", BigInteger, nullable=False),
    Column("text", Text, nullable=False),
    Index("dike_trial_output_by_trial", "search_id", "trial", "number"),
)

TABLES = tuple(METADATA.tables)
"""Names of these tables; `METADATA` also gets those of a service once its modules are imported."""
