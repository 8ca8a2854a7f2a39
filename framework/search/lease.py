"""One `dike tune` at a time runs a search: who runs it stands in the database, with a heartbeat.

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
from contextlib import suppress
from datetime import UTC
from pathlib import Path
from typing import Any, cast

import psutil
from sqlalchemy import Engine, Row, func, select, update
from sqlalchemy.engine import Connection
from sqlalchemy.exc import SQLAlchemyError

from dike.exceptions import BadInputError, JobFailedError
from framework.search.tables import SEARCHES

logger = logging.getLogger(__name__)

HEARTBEAT_S = 3.0
STALE_S = 15.0
"""A holder on another machine from which nothing has been heard for so long is gone."""
_START_TOLERANCE_S = 1.0
"""Two readings of a process' start may differ by a correction of the clock."""


class Lease:
    """The right to write a search.

    Args:
        engine: the database, for short writing transactions.
        search_id: which search.
        name: its name, for messages.
    """

    def __init__(self, engine: Engine, search_id: int, name: str) -> None:
        self._engine = engine
        self._search_id = search_id
        self._name = name
        self._token = secrets.token_hex(16)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="dike-lease", daemon=True)

    def take(self) -> None:
        """Takes it, and keeps it alive until it is given back.

        Raises:
            BadInputError: if another process holds it.
        """
        process = psutil.Process()
        with self._engine.begin() as connection:
            now_s = database_time_s(connection)
            holder = _holder(connection, self._search_id)
            if is_held(holder, now_s):
                raise BadInputError(
                    f"The search '{self._name}' is being run by process {holder.owner_pid} on {holder.owner_host} "
                    f"since {time.strftime('%H:%M:%S', time.localtime(holder.owner_since_s))}; wait for it or end it."
                )
            connection.execute(
                update(SEARCHES)
                .where(SEARCHES.c.id == self._search_id)
                .values(
                    owner=self._token,
                    owner_machine=_machine(),
                    owner_host=socket.gethostname(),
                    owner_pid=process.pid,
                    owner_started_s=process.create_time(),
                    owner_since_s=now_s,
                    heartbeat_s=now_s,
                )
            )
        self._thread.start()

    def give_back(self) -> None:
        """Lets others have it."""
        self._ended.set()
        self._thread.join()
        with self._engine.begin() as connection:
            connection.execute(self._own_row().values(owner=None))

    def check(self, connection: Connection) -> None:
        """To be called in each writing transaction: nobody else has taken the search over.

        Raises:
            JobFailedError: if somebody has.
        """
        holder = _holder(connection, self._search_id)
        if holder.owner != self._token:
            by = f" by process {holder.owner_pid} on {holder.owner_host}" if holder.owner else ""
            raise JobFailedError(
                f"The search '{self._name}' was taken over{by} while this process could not be heard; nothing is lost."
            )

    def _own_row(self) -> Any:
        return update(SEARCHES).where(SEARCHES.c.id == self._search_id, SEARCHES.c.owner == self._token)

    def _beat(self) -> None:
        while not self._ended.wait(HEARTBEAT_S):
            try:
                with self._engine.begin() as connection:
                    connection.execute(self._own_row().values(heartbeat_s=database_time_s(connection)))
            except SQLAlchemyError:
                # The next beat may get through; if none does, the search's own writing fails and says so.
                logger.warning("no heartbeat for search %s", self._name, exc_info=True)


def is_held(holder: Row[Any], now_s: float) -> bool:
    """Whether somebody runs the search.

    Args:
        holder: the search's columns `owner...` and `heartbeat_s`.
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


def _holder(connection: Connection, search_id: int) -> Row[Any]:
    columns = [column for column in SEARCHES.c if column.name.startswith("owner")]
    statement = select(*columns, SEARCHES.c.heartbeat_s).where(SEARCHES.c.id == search_id).with_for_update()
    return cast("Row[Any]", connection.execute(statement).one())


def _machine() -> str:
    """What process ids are unique in: a boot of a machine, and there a container."""
    parts = [socket.gethostname()]
    with suppress(OSError):
        parts = [Path("/proc/sys/kernel/random/boot_id").read_text().strip(), os.readlink("/proc/self/ns/pid")]
    return " ".join(parts)
