"""The connection to a service's database, and the lease on writing to it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from sqlalchemy import func, insert, select
from sqlalchemy.engine import Connection

from framework.scheduler.journal import ServiceLeaseLostError
from framework.scheduler.lease import Lease, LeasedRow
from framework.search.database import database_files, open_database, parse_url, storage_errors, table_creation_lock
from framework.search.optuna_study import SharedStudies
from framework.service.tables import SERVICES

_SERVICE = 1


class ServiceDatabase:
    """A database to which one service at a time writes.

    Attributes:
        engine: for stores of searches in the same database.
        shared: Optuna storage and heartbeat, shared by its searches.

    Raises:
        BadInputError: if the database cannot be used; from every method.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self.engine = open_database(url, private=True, option="--state")
        self._writing_engine = self.engine.execution_options(dike_writes=True)
        self._parsed = parse_url(url)
        self._lease: Lease | None = None
        self._joint = threading.local()
        self.shared = SharedStudies(url, self._writing_engine)
        with table_creation_lock(self._parsed), self.transaction() as connection:
            if connection.execute(select(SERVICES.c.id)).first() is None:
                connection.execute(insert(SERVICES).values(id=_SERVICE))

    def close(self) -> None:
        self.shared.close()
        self.engine.dispose()

    def size_bytes(self) -> int:
        """Size on disk; of a server, the whole database there; 0 if unknown."""
        if files := database_files(self.url):
            # stat only: closing a file of SQLite's drops this process's locks on it.
            return sum(path.stat().st_size for path in files if path.exists())
        if self.engine.dialect.name != "postgresql":
            return 0
        with self.reading() as connection:
            return int(connection.execute(select(func.pg_database_size(func.current_database()))).scalar_one())

    @contextmanager
    def lock(self, lost: Callable[[str], None], wait: Callable[[str], None] | None = None) -> Iterator[Lease]:
        """Makes this process the only writer (see `Lease`); after the lease is lost, writes raise
        `ServiceLeaseLostError`.

        Raises:
            BadInputError: if another process owns the lease; the message names it.
        """
        advice = "end it, or wait for its end with --standby" if wait is None else "this one stands by until that ends"
        leased = LeasedRow(SERVICES, _SERVICE, "service of this database", advice, ServiceLeaseLostError)
        lease = Lease(self._writing_engine, leased, lost)
        with storage_errors(self._parsed):
            lease.acquire(wait)
        self._lease = lease
        try:
            yield lease
        finally:
            self._lease = None
            with storage_errors(self._parsed):
                lease.release()

    @contextmanager
    def joint_transaction(self) -> Iterator[None]:
        """Joins all writes of this thread inside the context into one transaction, begun at the first write."""
        with ExitStack() as stack:
            self._joint.stack, self._joint.connection = stack, None
            try:
                yield
            finally:
                del self._joint.stack

    @contextmanager
    def transaction(self) -> Iterator[Connection]:
        """A connection for an atomic write; part of the thread's `joint_transaction`, if any."""
        stack: ExitStack | None = getattr(self._joint, "stack", None)
        if stack is None:
            with self._own_transaction() as connection:
                yield connection
            return
        if self._joint.connection is None:
            self._joint.connection = stack.enter_context(self._own_transaction())
        yield self._joint.connection

    @contextmanager
    def _own_transaction(self) -> Iterator[Connection]:
        with storage_errors(self._parsed), self._writing_engine.begin() as connection:
            if self._lease is not None:
                self._lease.check(connection)
            yield connection

    @contextmanager
    def reading(self) -> Iterator[Connection]:
        """A connection for read queries, such as those of `framework.service.queries`."""
        with storage_errors(self._parsed), self.engine.connect() as connection:
            yield connection
