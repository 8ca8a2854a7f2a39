"""One process at a time runs a search, or a service: who does stands in its row of the database, with a heartbeat.

The heartbeat is in the database's time, so clocks of different machines need not agree. On the holder's own machine its
process is looked at instead: one that has been killed holds nothing, and one that was only stopped holds on.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC
from pathlib import Path
from typing import Any

import psutil
from sqlalchemy import Column, Engine, Float, Integer, Row, String, Table, func, select, update
from sqlalchemy.engine import Connection
from sqlalchemy.exc import SQLAlchemyError

from dike.exceptions import BadInputError, JobFailedError

logger = logging.getLogger(__name__)

HEARTBEAT_S = 3.0
STALE_S = 15.0
"""A holder on another machine from which nothing has been heard for so long is gone."""
_START_TOLERANCE_S = 1.0
"""Two readings of a process' start may differ by a correction of the clock."""
_NAME_LENGTH = 200


def lease_columns() -> list[Column[Any]]:
    """What a table needs whose rows can be leased."""
    return [
        Column("owner", String(64)),
        Column("owner_machine", String(_NAME_LENGTH)),
        Column("owner_host", String(_NAME_LENGTH)),
        Column("owner_pid", Integer),
        Column("owner_started_s", Float(53)),
        Column("owner_since_s", Float(53)),
        Column("heartbeat_s", Float(53)),
    ]


_COLUMNS = tuple(column.name for column in lease_columns())


class LeaseLostError(JobFailedError):
    """Another process has taken over what this one was to write; nothing more may be done in its name."""


class ServiceLeaseLostError(LeaseLostError):
    """What was taken over is the service, and with it all its jobs."""


@dataclass(frozen=True)
class Leased:
    """A row that one process at a time may write.

    Attributes:
        table: has the columns of `lease_columns`, and `id`.
        id: which row.
        what: what it is, for messages, such as `search 'digits'`.
        advice: what to do where somebody else holds it.
        loss: what is raised once somebody else has taken it over.
    """

    table: Table
    id: int
    what: str
    advice: str = "wait for it or end it"
    loss: type[LeaseLostError] = LeaseLostError


class Lease:
    """The right to write a row and all that belongs to it.

    Args:
        engine: the database, for short writing transactions.
        leased: of what.
        lost: called, on a thread that is not the caller's, if somebody else has taken it; the argument says who.
    """

    def __init__(self, engine: Engine, leased: Leased, lost: Callable[[str], None] = logger.warning) -> None:
        self._engine = engine
        self._leased = leased
        self._lost = lost
        self._table = leased.table
        self._token = secrets.token_hex(16)
        self._renewed_s = 0.0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="dike-lease", daemon=True)

    def take(self, wait: Callable[[str], None] | None = None) -> None:
        """Takes it, and keeps it alive until it is given back.

        Args:
            wait: where another process holds it, it is told so, and the end of that is waited for; without it, an error
                is raised.

        Raises:
            BadInputError: if another process holds it.
        """
        said = ""
        while held := self._try():
            if wait is None:
                raise BadInputError(held)
            if held != said:
                wait(held)
            said = held
            time.sleep(HEARTBEAT_S)
        self._thread.start()

    def give_back(self) -> None:
        """Lets others have it."""
        self._ended.set()
        self._thread.join()
        with self._engine.begin() as connection:
            connection.execute(self._own_row().values(owner=None))

    def check(self, connection: Connection) -> None:
        """To be called in each writing transaction: nobody else has taken it over.

        Raises:
            LeaseLostError: if somebody has.
        """
        holder = self._holder(connection)
        if holder.owner != self._token:
            raise self._leased.loss(self._loss(holder))

    def is_certain(self) -> bool:
        """Whether nobody else can hold it now, however long this process may have been stopped meanwhile.

        False if the database cannot be asked, or if it is lost.
        """
        return _uptime_s() - self._renewed_s < STALE_S or self._renew()

    def _try(self) -> str:
        """Takes it if nobody holds it; says who does otherwise."""
        process = psutil.Process()
        begun_s = _uptime_s()
        with self._engine.begin() as connection:
            now_s = database_time_s(connection)
            holder = self._holder(connection)
            if is_held(holder, now_s):
                since = time.strftime("%H:%M:%S", time.localtime(holder.owner_since_s))
                return (
                    f"The {self._leased.what} is being run by process {holder.owner_pid} on {holder.owner_host} since "
                    f"{since}; {self._leased.advice}."
                )
            values = {
                "owner": self._token,
                "owner_machine": _machine(),
                "owner_host": socket.gethostname(),
                "owner_pid": process.pid,
                "owner_started_s": process.create_time(),
                "owner_since_s": now_s,
                "heartbeat_s": now_s,
            }
            connection.execute(update(self._table).where(self._table.c.id == self._leased.id).values(values))
        self._renewed_s = begun_s
        return ""

    def _own_row(self) -> Any:
        return update(self._table).where(self._table.c.id == self._leased.id, self._table.c.owner == self._token)

    def _holder(self, connection: Connection) -> Row[Any]:
        statement = (
            select(*(self._table.c[name] for name in _COLUMNS))
            .where(self._table.c.id == self._leased.id)
            .with_for_update()
        )
        return connection.execute(statement).one()

    def _loss(self, holder: Row[Any]) -> str:
        by = f" by process {holder.owner_pid} on {holder.owner_host}" if holder.owner else ""
        return f"The {self._leased.what} was taken over{by} while this process could not be heard; nothing is lost."

    def _beat(self) -> None:
        while not self._ended.wait(HEARTBEAT_S):
            self._renew()

    def _renew(self) -> bool:
        """Tells the database that we are alive; whether it has heard that, and we hold the lease still."""
        begun_s = _uptime_s()
        try:
            with self._engine.begin() as connection:
                values = {"heartbeat_s": database_time_s(connection)}
                is_ours = connection.execute(self._own_row().values(values)).rowcount == 1
                holder = None if is_ours else self._holder(connection)
        except SQLAlchemyError:
            # The next beat may get through; if none does, the holder's own writing fails and says so.
            logger.warning("no heartbeat for the %s", self._leased.what, exc_info=True)
            return False
        if holder is None:
            self._renewed_s = begun_s
        elif not self._ended.is_set():
            self._ended.set()
            self._lost(self._loss(holder))
        return is_ours


def is_held(holder: Row[Any], now_s: float) -> bool:
    """Whether somebody holds the lease of a row.

    Args:
        holder: the row's columns `owner...` and `heartbeat_s`.
        now_s: the database's time.
    """
    if holder.owner is None:
        return False
    if holder.owner_machine != _machine():
        return bool(now_s - holder.heartbeat_s < STALE_S)
    try:
        process = psutil.Process(holder.owner_pid)
        is_same = abs(process.create_time() - holder.owner_started_s) < _START_TOLERANCE_S
        return is_same and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def database_time_s(connection: Connection) -> float:
    """The database's clock, seconds since the epoch."""
    now = connection.execute(select(func.now())).scalar_one()
    return float((now if now.tzinfo else now.replace(tzinfo=UTC)).timestamp())


def _uptime_s() -> float:
    """A clock that goes on while the machine sleeps."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def _machine() -> str:
    """What process ids are unique in: a boot of a machine, and there a container."""
    parts = [socket.gethostname()]
    with suppress(OSError):
        parts = [Path("/proc/sys/kernel/random/boot_id").read_text().strip(), os.readlink("/proc/self/ns/pid")]
    return " ".join(parts)
