"""Forgets jobs that ended long ago, so that the database of a service that is left running does not grow for ever."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Iterator

from framework.lease import ServiceLeaseLostError
from framework.search.database import StorageUnavailableError
from framework.service.own_search import remove_old_searches
from framework.service.store import ServiceStore

logger = logging.getLogger(__name__)

EVERY_S = 3600.0


@contextlib.contextmanager
def forgetting_old_jobs(store: ServiceStore, keep_s: float, every_s: float = EVERY_S) -> Iterator[None]:
    """Removes old jobs at once and now and then, on a thread of its own, while the context lasts.

    Args:
        store: the service's database.
        keep_s: jobs that ended longer ago than this are removed, with all that is kept of them.
        every_s: how often is looked for them.
    """
    ending = threading.Event()
    thread = threading.Thread(target=_forget, args=(store, keep_s, every_s, ending), name="dike-keeping", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ending.set()
        thread.join()


def _forget(store: ServiceStore, keep_s: float, every_s: float, ending: threading.Event) -> None:
    while True:
        try:
            ended_before_s = time.time() - keep_s
            count = store.delete_jobs(ended_before_s, remove_old_searches(store, ended_before_s))
        except (StorageUnavailableError, ServiceLeaseLostError) as error:
            logger.warning("old jobs are not forgotten this time: %s", error)
        except Exception:
            # Whatever it is: the thread would be gone, and the database grow from now on.
            logger.exception("old jobs are not forgotten this time")
        else:
            if count:
                logger.info("%d jobs forgotten that ended more than %g days ago", count, keep_s / 86400)
        if ending.wait(every_s):
            return
