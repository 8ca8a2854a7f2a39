"""The tables of a service, in one database with those of searches; described in docs/service.md."""

from __future__ import annotations

from sqlalchemy import BigInteger, Boolean, Column, Float, ForeignKey, Index, Integer, LargeBinary, String, Table, Text

from framework.scheduler.lease import lease_columns
from framework.search.tables import METADATA, NAME_LENGTH, Number

_EVENT_KEY = BigInteger().with_variant(Integer, "sqlite")
"""SQLite auto-increments columns of exactly this type only."""


def _job_id() -> Column[str]:
    return Column("job_id", ForeignKey("dike_jobs.id", ondelete="CASCADE"), nullable=False)


SERVICES = Table(
    "dike_services",
    METADATA,
    # One row: a database holds one service.
    Column("id", Integer, primary_key=True),
    Column("framework_id", String(NAME_LENGTH)),
    *lease_columns(),
)

JOBS = Table(
    "dike_jobs",
    METADATA,
    Column("id", String(NAME_LENGTH), primary_key=True),
    # Order of arrival: times may be equal or set back.
    Column("number", Integer, nullable=False, unique=True),
    Column("kind", String(16), nullable=False),
    Column("user", String(NAME_LENGTH), nullable=False, index=True),
    Column("script", Text, nullable=False),
    Column("request", Text, nullable=False),
    Column("constraints", Text, nullable=False),
    Column("state", String(16), nullable=False, index=True),
    Column("submitted_s", Float(53), nullable=False),
    Column("started_s", Float(53)),
    Column("ended_s", Float(53)),
    Column("kill_requested", Boolean, nullable=False),
    Column("waiting", Text, nullable=False),
    Column("failure", Text, nullable=False),
    Column("result", Text),
    Column("bundle_token", String(64), nullable=False, unique=True),
    Column("priority", String(16), nullable=False),
    Column("state_data", Text),
)

BUNDLES = Table(
    "dike_bundles",
    METADATA,
    Column("job_id", ForeignKey("dike_jobs.id", ondelete="CASCADE"), primary_key=True),
    Column("archive", LargeBinary, nullable=False),
)

TASKS = Table(
    "dike_tasks",
    METADATA,
    Column("task_id", String(NAME_LENGTH + 64), primary_key=True),
    _job_id(),
    Column("agent_id", String(NAME_LENGTH), nullable=False),
    Column("node", String(NAME_LENGTH), nullable=False),
    Column("address", String(NAME_LENGTH), nullable=False),
    Column("name", String(64), nullable=False),
    Column("state", String(24), nullable=False),
    Column("resources", Text, nullable=False),
    Column("launched_s", Float(53), nullable=False),
    Column("ended_s", Float(53)),
    Column("message", Text, nullable=False),
    Column("executor_id", String(NAME_LENGTH + 64), nullable=False),
    Index("dike_tasks_by_job", "job_id"),
)

USAGE = Table(
    "dike_usage",
    METADATA,
    Column("user", String(NAME_LENGTH), primary_key=True),
    # Its Monday, such as 2027-01-25.
    Column("week", String(10), primary_key=True),
    Column("jobs", Integer, nullable=False),
    Column("gpu_s", Float(53), nullable=False),
    Column("cpu_s", Float(53), nullable=False),
    Column("waited_s", Float(53), nullable=False),
)

EVENTS = Table(
    "dike_events",
    METADATA,
    Column("number", _EVENT_KEY, primary_key=True, autoincrement=True),
    _job_id(),
    Column("time_s", Float(53), nullable=False),
    Column("kind", String(16), nullable=False),
    Column("text", Text, nullable=False),
    Index("dike_events_by_job", "job_id", "number"),
)

OUTPUT = Table(
    "dike_output",
    METADATA,
    Column("number", _EVENT_KEY, primary_key=True, autoincrement=True),
    _job_id(),
    Column("task", String(64), nullable=False),
    Column("stream", String(8), nullable=False),
    Column("text", Text, nullable=False),
    Index("dike_output_by_job", "job_id", "number"),
)

RECEIVED = Table(
    "dike_output_received",
    METADATA,
    Column("task_id", String(NAME_LENGTH + 64), primary_key=True),
    Column("stream", String(8), primary_key=True),
    _job_id(),
    Column("bytes", BigInteger, nullable=False),
    Index("dike_output_received_by_job", "job_id"),
)
"""Bytes received of a task's output, which is in `OUTPUT`, was deleted from it, or is given up as lost."""

PROGRESS = Table(
    "dike_progress",
    METADATA,
    Column("job_id", ForeignKey("dike_jobs.id", ondelete="CASCADE"), primary_key=True),
    Column("step", BigInteger, primary_key=True, autoincrement=False),
    Column("time_s", Float(53), nullable=False),
    Column("loss", Number),
    Column("samples_per_s", Number),
)
