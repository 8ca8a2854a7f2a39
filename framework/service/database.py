"""The connection to a service's database, and the right to write to it."""

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
    """A database that one service at a time writes to.

    Args:
        url: an SQLAlchemy URL.

    Attributes:
        url: the same.
        engine: its connections, for stores of searches in it.
        shared: what its searches share.

    Raises:
        BadInputError: if the database cannot be used; every method may.
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
        """Closes all connections."""
        self.shared.close()
        self.engine.dispose()

    def size_bytes(self) -> int:
        """What it takes on the disk; of a server, all that is in the database there. 0 where that is not known."""
        if files := database_files(self.url):
            # Only looked at, never opened.
            return sum(path.stat().st_size for path in files if path.exists())
        if self.engine.dialect.name != "postgresql":
            return 0
        with self.reading() as connection:
            return int(connection.execute(select(func.pg_database_size(func.current_database()))).scalar_one())

    @contextmanager
    def lock(self, lost: Callable[[str], None], wait: Callable[[str], None] | None = None) -> Iterator[Lease]:
        """Makes this process the only one that writes here; writing methods raise `ServiceLeaseLostError` once not.

        Args:
            lost: see `Lease`.
            wait: see `Lease.acquire`.

        Raises:
            BadInputError: if another process runs it; the message says which.
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
    def together(self) -> Iterator[None]:
        """What this thread writes in the context is one transaction, made at the first of it and durable at the end."""
        with ExitStack() as stack:
            self._joint.stack, self._joint.connection = stack, None
            try:
                yield
            finally:
                del self._joint.stack

    @contextmanager
    def transaction(self) -> Iterator[Connection]:
        """A connection to write with, all or nothing; part of `together` where this thread is in that."""
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
        """A connection for queries of one's own, such as those of `framework.service.queries`."""
        with storage_errors(self._parsed), self.engine.connect() as connection:
            yield connection
