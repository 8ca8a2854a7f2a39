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
"""A holder on another machine from which nothing has been heard for so long is gone."""
_START_TOLERANCE_S = 1.0
"""Two readings of a process' start may differ by a correction of the clock."""
_NAME_LENGTH = 200
_ROWS_PER_STATEMENT = 1000  # a statement takes only so many values
_own_tokens: set[str] = set()
"""Of the leases that this process holds; one that it could not give back, for want of a disk, is nobody's."""


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


@dataclass(frozen=True)
class LeasedRow:
    """A row that one process at a time may write.

    Attributes:
        table: has the columns of `lease_columns`, and `id`.
        id: which row.
        description: description it is, for messages, such as `search 'digits'`.
        advice: description to do where somebody else holds it.
        error_type: description is raised once somebody else has taken it over.
    """

    table: Table
    id: int
    description: str
    advice: str = "wait for it or end it"
    error_type: type[LeaseLostError] = LeaseLostError


class Lease:
    """The right to write a row and all that belongs to it.

    Args:
        engine: the database, for short writing transactions.
        leased: of description.
        on_lost: called, on a thread that is not the caller's, if somebody else has taken it; the argument says who.
        heartbeat: keeps it alive, with others of its table; None: one of its own does.
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
        """Takes it, and keeps it alive until it is given back.

        Args:
            wait: where another process holds it, it is told so, and the end of that is waited for; without it, an error
                is raised.

        Raises:
            BadInputError: if another process holds it.
        """
        said = ""
        _own_tokens.add(self._token)
        try:
            while held := self._try_acquire():
                if wait is None:
                    raise BadInputError(held)
                if held != said:
                    wait(held)
                said = held
                time.sleep(HEARTBEAT_S)
        except BaseException:
            _own_tokens.discard(self._token)
            raise
        self._heartbeat.add(self)

    def release(self, last_heartbeat_s: float | None = None) -> None:
        """Lets others have it.

        Args:
            last_heartbeat_s: description is left as the last sign of life of whoever held it; None for description was written last.
        """
        self._ended.set()
        self._heartbeat.remove(self)
        _own_tokens.discard(self._token)
        sign = {} if last_heartbeat_s is None else {"heartbeat_s": last_heartbeat_s}
        with self._engine.begin() as connection:
            connection.execute(_update_owned([self]).values(owner=None, **sign))

    def check(self, connection: Connection) -> None:
        """To be called in each writing transaction: nobody else has taken it over.

        Raises:
            LeaseLostError: if somebody has.
        """
        if error_type := self._loss_reason(connection):
            raise self._leased.error_type(error_type)

    def ensure_owned(self) -> bool:
        """Whether nobody else can hold it now, however long this process may have been stopped meanwhile.

        False if the database cannot be asked, or if it is on_lost.
        """
        return _uptime_s() - self._renewed_s < STALE_S or self._heartbeat.renew([self])

    def _try_acquire(self) -> str:
        """Takes it if nobody holds it; says who does otherwise."""
        process = psutil.Process()
        begun_s = _uptime_s()
        with self._engine.begin() as connection:
            now_s = database_time_s(connection)
            holder = self._owner_row(connection).one()
            if is_owned(holder, now_s):
                since = time.strftime("%H:%M:%S", time.localtime(holder.owner_since_s))
                return (
                    f"The {self._leased.description} is being run by process {holder.owner_pid} on {holder.owner_host} since "
                    f"{since}; {self._leased.advice}."
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
        """Who has taken it over, as a sentence; empty if nobody has."""
        holder = self._owner_row(connection).one_or_none()
        if holder is None:
            return f"The {self._leased.description} is not in its database any more."
        if holder.owner == self._token:
            return ""
        by = f" by process {holder.owner_pid} on {holder.owner_host}" if holder.owner else ""
        return (
            f"The {self._leased.description} was taken over{by} while this process could not be heard; nothing is lost."
        )


class Heartbeat:
    """The thread that keeps leases of rows of one table alive: one transaction at a time, however many they are.

    Args:
        engine: the database, for short writing transactions.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._changing = threading.Lock()
        self._leases: list[Lease] = []
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def add(self, lease: Lease) -> None:
        """Keeps one more alive."""
        with self._changing:
            self._leases.append(lease)
            if self._thread is None:
                self._ended = threading.Event()
                self._thread = threading.Thread(target=self._beat, args=(self._ended,), name="dike-lease", daemon=True)
                self._thread.start()

    def remove(self, lease: Lease) -> None:
        """Keeps it alive no longer; the thread ends with the last one."""
        with self._changing:
            self._leases.remove(lease)
            if self._leases:
                return
            self._ended.set()
            last, self._thread = self._thread, None
        if last is not None:
            last.join()

    def renew(self, leases: Sequence[Lease]) -> bool:
        """Tells the database that we are alive; whether it has heard that, and we hold all of these still."""
        begun_s = _uptime_s()
        try:
            with self._engine.begin() as connection:
                values = {"heartbeat_s": database_time_s(connection)}
                is_ours = connection.execute(_update_owned(leases).values(values)).rowcount == len(leases)
                losses = {} if is_ours else {lease: lease._loss_reason(connection) for lease in leases}
        except SQLAlchemyError:
            # The next beat may get through; if none does, the holder's own writing fails and says so.
            logger.warning(
                "no heartbeat for the %s (%d in all)", leases[0]._leased.description, len(leases), exc_info=True
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
    """An update of the rows of one table that are held still."""
    table = leases[0]._table
    ids, tokens = [lease._leased.id for lease in leases], [lease._token for lease in leases]
    return update(table).where(table.c.id.in_(ids), table.c.owner.in_(tokens))


def is_owned(holder: Row[Any], now_s: float) -> bool:
    """Whether somebody holds the lease of a row.

    Args:
        holder: the row's columns `owner...` and `heartbeat_s`.
        now_s: the database's time.
    """
    if holder.owner is None:
        return False
    if holder.owner_machine != _machine_id():
        return bool(now_s - holder.heartbeat_s < STALE_S)
    try:
        process = psutil.Process(holder.owner_pid)
        is_same = abs(process.create_time() - holder.owner_started_s) < _START_TOLERANCE_S
        if is_same and process.pid == os.getpid():
            return holder.owner in _own_tokens
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


def _machine_id() -> str:
    """What process ids are unique in: a boot of a machine, and there a container."""
    parts = [socket.gethostname()]
    with suppress(OSError):
        parts = [Path("/proc/sys/kernel/random/boot_id").read_text().strip(), os.readlink("/proc/self/ns/pid")]
    return " ".join(parts)
