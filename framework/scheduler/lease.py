"""Leases: one process at a time runs a search, or a service. The owner is stored in the row, with a heartbeat.

Heartbeats use the database's clock, so clocks of different machines need not agree. On the owner's own machine its
process is checked instead: a killed process loses the lease immediately, and a stopped one keeps it.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC
from pathlib import Path
from typing import Any

import psutil
from sqlalchemy import Column, Engine, Float, Integer, Result, Row, String, Table, Update, func, select, update
from sqlalchemy.engine import Connection
from sqlalchemy.exc import SQLAlchemyError

from dike.exceptions import BadInputError
from framework.scheduler.journal import LeaseLostError

logger = logging.getLogger(__name__)

HEARTBEAT_S = 3.0
STALE_S = 15.0
"""Without a heartbeat for this time, an owner on another machine has lost the lease."""
_START_TOLERANCE_S = 1.0
"""Two readings of a process' start may differ by a correction of the clock."""
_NAME_LENGTH = 200
_ROWS_PER_STATEMENT = 1000  # databases limit the values of a statement
_own_tokens: set[str] = set()
"""Tokens of this process' leases. A lease whose release failed, for example on a full disk, is not among them and
counts as free.
"""


def lease_columns() -> list[Column[Any]]:
    """Returns the columns of a table whose rows can be leased."""
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


@dataclass(frozen=True)
class LeasedRow:
    """A row that one process at a time may write.

    Attributes:
        table: has the columns of `lease_columns`, and `id`.
        id: the row.
        description: for messages, such as `search 'digits'`.
        advice: what to do if another process owns it.
        error_type: raised once another process has taken it over.
    """

    table: Table
    id: int
    description: str
    advice: str = "wait for it or end it"
    error_type: type[LeaseLostError] = LeaseLostError


class Lease:
    """The exclusive right to write a row and everything that belongs to it.

    Args:
        engine: the database, for short writing transactions.
        leased: the row.
        on_lost: called with the reason, on another thread, if another process has taken over the lease.
        heartbeat: renews it together with others of the table; None: it has its own.
    """

    def __init__(
        self,
        engine: Engine,
        leased: LeasedRow,
        on_lost: Callable[[str], None] = logger.warning,
        heartbeat: Heartbeat | None = None,
    ) -> None:
        self._engine = engine
        self._leased = leased
        self._on_lost = on_lost
        self._table = leased.table
        self._token = secrets.token_hex(16)
        self._renewed_s = 0.0
        self._ended = threading.Event()
        self._heartbeat = heartbeat or Heartbeat(engine)

    def acquire(self, wait: Callable[[str], None] | None = None) -> None:
        """Acquires it, and renews it until it is released.

        Args:
            wait: called with the reason if another process owns it, which is then waited for; None raises an error
                instead.

        Raises:
            BadInputError: if another process owns it.
        """
        reported = ""
        _own_tokens.add(self._token)
        try:
            while conflict := self._try_acquire():
                if wait is None:
                    raise BadInputError(conflict)
                if conflict != reported:
                    wait(conflict)
                reported = conflict
                time.sleep(HEARTBEAT_S)
        except BaseException:
            _own_tokens.discard(self._token)
            raise
        self._heartbeat.add(self)

    def release(self, last_heartbeat_s: float | None = None) -> None:
        """Releases it.

        Args:
            last_heartbeat_s: heartbeat to leave in the row; None keeps the last one.
        """
        self._ended.set()
        self._heartbeat.remove(self)
        _own_tokens.discard(self._token)
        sign = {} if last_heartbeat_s is None else {"heartbeat_s": last_heartbeat_s}
        with self._engine.begin() as connection:
            connection.execute(_update_owned([self]).values(owner=None, **sign))

    def check(self, connection: Connection) -> None:
        """Checks that no other process has taken it over; must be called in each writing transaction.

        Raises:
            LeaseLostError: if one has.
        """
        if error_type := self._loss_reason(connection):
            raise self._leased.error_type(error_type)

    def ensure_owned(self) -> bool:
        """Renews it if it may be stale, for example after this process was stopped; returns whether no other process
        can own it.

        False if the database cannot be reached.
        """
        return _uptime_s() - self._renewed_s < STALE_S or self._heartbeat.renew([self])

    def _try_acquire(self) -> str:
        """Acquires it if it is free; otherwise returns which process owns it, as a sentence."""
        process = psutil.Process()
        begun_s = _uptime_s()
        with self._engine.begin() as connection:
            now_s = database_time_s(connection)
            row = self._owner_row(connection).one()
            if is_owned(row, now_s):
                since = time.strftime("%H:%M:%S", time.localtime(row.owner_since_s))
                return (
                    f"The {self._leased.description} is being run by process {row.owner_pid} on {row.owner_host} "
                    f"since {since}; {self._leased.advice}."
                )
            values = {
                "owner": self._token,
                "owner_machine": _machine_id(),
                "owner_host": socket.gethostname(),
                "owner_pid": process.pid,
                "owner_started_s": process.create_time(),
                "owner_since_s": now_s,
                "heartbeat_s": now_s,
            }
            connection.execute(update(self._table).where(self._table.c.id == self._leased.id).values(values))
        self._renewed_s = begun_s
        return ""

    def _owner_row(self, connection: Connection) -> Result[Any]:
        columns = [self._table.c[name] for name in _COLUMNS]
        return connection.execute(select(*columns).where(self._table.c.id == self._leased.id).with_for_update())

    def _loss_reason(self, connection: Connection) -> str:
        """Returns which process has taken it over, as a sentence; empty if none has."""
        row = self._owner_row(connection).one_or_none()
        if row is None:
            return f"The {self._leased.description} is not in its database any more."
        if row.owner == self._token:
            return ""
        by = f" by process {row.owner_pid} on {row.owner_host}" if row.owner else ""
        return (
            f"The {self._leased.description} was taken over{by} while this process sent no heartbeat; nothing is lost."
        )


class Heartbeat:
    """Thread that renews the leases of rows of one table, in one transaction at a time."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._changing = threading.Lock()
        self._leases: list[Lease] = []
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def add(self, lease: Lease) -> None:
        with self._changing:
            self._leases.append(lease)
            if self._thread is None:
                self._ended = threading.Event()
                self._thread = threading.Thread(target=self._beat, args=(self._ended,), name="dike-lease", daemon=True)
                self._thread.start()

    def remove(self, lease: Lease) -> None:
        """Stops renewing a lease; the thread ends with the last one."""
        with self._changing:
            self._leases.remove(lease)
            if self._leases:
                return
            self._ended.set()
            last, self._thread = self._thread, None
        if last is not None:
            last.join()

    def renew(self, leases: Sequence[Lease]) -> bool:
        """Writes a heartbeat; returns whether that succeeded and this process still owns all of these leases."""
        begun_s = _uptime_s()
        try:
            with self._engine.begin() as connection:
                values = {"heartbeat_s": database_time_s(connection)}
                is_ours = connection.execute(_update_owned(leases).values(values)).rowcount == len(leases)
                losses = {} if is_ours else {lease: lease._loss_reason(connection) for lease in leases}
        except SQLAlchemyError:
            # The next heartbeat may succeed; if none does, the owner's own writes fail with an error.
            logger.warning(
                "cannot write the heartbeat of the %s (%d leases)",
                leases[0]._leased.description,
                len(leases),
                exc_info=True,
            )
            return False
        for lease in leases:
            if not (error_type := losses.get(lease)):
                lease._renewed_s = begun_s
            elif not lease._ended.is_set():
                lease._ended.set()
                lease._on_lost(error_type)
        return is_ours

    def _beat(self, ended: threading.Event) -> None:
        while not ended.wait(HEARTBEAT_S):
            with self._changing:
                leases = [lease for lease in self._leases if not lease._ended.is_set()]
            for first in range(0, len(leases), _ROWS_PER_STATEMENT):
                self.renew(leases[first : first + _ROWS_PER_STATEMENT])


def _update_owned(leases: Sequence[Lease]) -> Update:
    """An UPDATE of those of the rows that are still owned."""
    table = leases[0]._table
    ids, tokens = [lease._leased.id for lease in leases], [lease._token for lease in leases]
    return update(table).where(table.c.id.in_(ids), table.c.owner.in_(tokens))


def is_owned(row: Row[Any], now_s: float) -> bool:
    """Whether a process owns the lease of a row.

    Args:
        row: the row's columns `owner...` and `heartbeat_s`.
        now_s: the database's time.
    """
    if row.owner is None:
        return False
    if row.owner_machine != _machine_id():
        return bool(now_s - row.heartbeat_s < STALE_S)
    try:
        process = psutil.Process(row.owner_pid)
        is_same = abs(process.create_time() - row.owner_started_s) < _START_TOLERANCE_S
        if is_same and process.pid == os.getpid():
            return row.owner in _own_tokens
        return is_same and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def database_time_s(connection: Connection) -> float:
    """Returns the database's clock, in seconds since the epoch."""
    now = connection.execute(select(func.now())).scalar_one()
    return float((now if now.tzinfo else now.replace(tzinfo=UTC)).timestamp())


def _uptime_s() -> float:
    """A clock that includes the time when the machine was suspended."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def _machine_id() -> str:
    """Returns the scope in which process ids are unique: a boot of a machine, and a container there."""
    parts = [socket.gethostname()]
    with suppress(OSError):
        parts = [Path("/proc/sys/kernel/random/boot_id").read_text().strip(), os.readlink("/proc/self/ns/pid")]
    return " ".join(parts)
