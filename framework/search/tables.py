"""The tables of searches. They stand beside Optuna's in one database; docs/search-database.md describes them."""

from __future__ import annotations

import math
from typing import Any

from sqlalchemy import BigInteger, Column, Float, ForeignKey, Integer, MetaData, String, Table, Text
from sqlalchemy.engine import Dialect
from sqlalchemy.types import TypeDecorator, TypeEngine

NAME_LENGTH = 200

METADATA = MetaData()


class _UnconvertedFloat(Float[float]):
    """Leaves values as they are on the way into the database."""

    def bind_processor(self, dialect: Dialect) -> None:
        """None: nothing is done to values."""


class Number(TypeDecorator[float]):
    """A float that may be infinite or not a number.

    SQLite turns NaN into NULL, so it gets it as text, which it sorts behind all numbers as PostgreSQL sorts NaN.
    Databases that know neither NaN nor infinities get NULL.
    """

    impl = Float(53)
    cache_ok = True

    def load_dialect_impl(self, dialect: Dialect) -> TypeEngine[Any]:
        """The type in this kind of database."""
        return dialect.type_descriptor(_UnconvertedFloat(53) if dialect.name == "sqlite" else Float(53))

    def process_bind_param(self, value: float | None, dialect: Dialect) -> Any:
        """The value as the database takes it."""
        if value is None or math.isfinite(value) or dialect.name == "postgresql":
            return value
        return repr(float(value)) if dialect.name == "sqlite" else None

    def process_result_value(self, value: Any, dialect: Dialect) -> float | None:
        """The value as it was."""
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
    # Who runs it: see framework.search.lease.
    Column("owner", String(64)),
    Column("owner_machine", String(NAME_LENGTH)),
    Column("owner_host", String(NAME_LENGTH)),
    Column("owner_pid", Integer),
    Column("owner_started_s", Float(53)),
    Column("owner_since_s", Float(53)),
    Column("heartbeat_s", Float(53)),
)

TRIALS = Table(
    "dike_trials",
    METADATA,
    Column("search_id", ForeignKey(SEARCHES.c.id, ondelete="CASCADE"), primary_key=True),
    Column("number", Integer, primary_key=True, autoincrement=False),
    Column("parameters", Text, nullable=False),
    Column("state", String(20), nullable=False),
    Column("runs", Integer, nullable=False),
    Column("failures", Integer, nullable=False),
    Column("step", BigInteger, nullable=False),
    Column("train_s", Float(53), nullable=False),
    Column("slot_s", Float(53), nullable=False),
    Column("loss", Number),
    Column("value", Number),
    Column("metrics", Text, nullable=False),
    Column("convergence", Number),
    Column("checkpoint", Text),
    Column("checkpoint_step", BigInteger, nullable=False),
    Column("checkpoint_train_s", Float(53), nullable=False),
    Column("agent", Text, nullable=False),
    Column("slot", Integer),
    Column("error", Text, nullable=False),
    Column("created_s", Float(53), nullable=False),
    Column("ended_s", Float(53)),
)

SLICES = Table(
    "dike_slices",
    METADATA,
    Column("search_id", ForeignKey(SEARCHES.c.id, ondelete="CASCADE"), primary_key=True),
    Column("trial", Integer, primary_key=True, autoincrement=False),
    Column("run", Integer, primary_key=True, autoincrement=False),
    Column("slot", Integer, nullable=False),
    Column("agent", Text, nullable=False),
    Column("start_s", Float(53), nullable=False),
    Column("end_s", Float(53)),
    Column("first_step_s", Float(53)),
    Column("reason", Text, nullable=False),
    Column("convergence", Number),
    Column("from_step", BigInteger, nullable=False),
    Column("to_step", BigInteger, nullable=False),
    Column("outcome", String(40), nullable=False),
    Column("suspend_s", Float(53)),
    Column("rss_bytes", BigInteger),
    Column("cpu", Float(53)),
    Column("gpu_mem_bytes", BigInteger),
    Column("gpu_utilisation", Float(53)),
)

LOSSES = Table(
    "dike_losses",
    METADATA,
    Column("search_id", ForeignKey(SEARCHES.c.id, ondelete="CASCADE"), primary_key=True),
    Column("trial", Integer, primary_key=True, autoincrement=False),
    Column("number", Integer, primary_key=True, autoincrement=False),
    Column("run", Integer, nullable=False),
    Column("step", BigInteger, nullable=False),
    Column("train_s", Float(53), nullable=False),
    Column("loss", Number),
    Column("low", Number),
    Column("high", Number),
    Column("count", Integer, nullable=False),
    Column("value", Number),
    Column("metrics", Text, nullable=False),
    # How many reports have been merged into this row.
    Column("reports", Integer, nullable=False),
)
