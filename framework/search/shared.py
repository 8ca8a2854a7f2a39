"""What all searches of one process share of a database: however many there are, these are a few connections."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from sqlalchemy import Engine

from framework.lease import Heartbeat
from framework.search.study_storage import close_storage, open_storage

if TYPE_CHECKING:
    from optuna.storages import RDBStorage


class SharedSearches:
    """Connections to the studies, and the thread that keeps the leases; nothing of it is there before the first search.

    Args:
        url: an SQLAlchemy URL.
        engine: that database, for short writing transactions.

    Attributes:
        heartbeat: keeps the searches' leases alive.
    """

    def __init__(self, url: str, engine: Engine) -> None:
        self._url = url
        self._opening = threading.Lock()
        self._storage: RDBStorage | None = None
        self.heartbeat = Heartbeat(engine)

    def storage(self) -> RDBStorage:
        """Optuna's storage.

        Raises:
            BadInputError: if it cannot be used.
        """
        with self._opening:
            if self._storage is None:
                self._storage = open_storage(self._url)
            return self._storage

    def close(self) -> None:
        """Closes the connections to the studies."""
        if self._storage is not None:
            close_storage(self._storage)
