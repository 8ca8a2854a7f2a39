"""Forgets jobs that ended long ago, so that the database of a service that is left running does not grow for ever."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Iterator

from dike.exceptions import BadInputError
from framework.scheduler.journal import StorageUnavailableError
from framework.scheduler.lease import ServiceLeaseLostError
from framework.search.optuna_study import remove_study
from framework.search.store import Store
from framework.service.requests import is_own_search
from framework.service.store import ServiceStore

logger = logging.getLogger(__name__)

EVERY_S = 3600.0


@contextlib.contextmanager
def removing_old_jobs(store: ServiceStore, keep_s: float, every_s: float = EVERY_S) -> Iterator[None]:
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


def remove_old_searches(store: ServiceStore, ended_before_s: float) -> list[str]:
    """Removes the searches of jobs that ended before a time, studies included.

    Args:
        store: the service's database; it is in others' way for a moment at a time only.
        ended_before_s: seconds since the epoch.

    Returns:
        The jobs that have no search any more; a search that somebody has gone on with since is in use.
    """
    return [name for name in store.old_searches(ended_before_s) if _is_gone(store, name, ended_before_s)]


def _is_gone(store: ServiceStore, name: str, ended_before_s: float) -> bool:
    record = store.job(name)
    searches = Store(store.database.url, engine=store.database.engine)
    try:
        found = searches.searches(name)
        if record is None or not found or not is_own_search(record, found[0]):
            return True
        if (searches.last_heartbeat_s(name) or 0.0) >= ended_before_s:
            return False
        with searches.lock(name):
            record = store.job(name)
            if record is not None and not record.state.has_ended():
                return False
            # In this order: a search without a study is removed the next time.
            remove_study(store.database.url, name)
            searches.delete_search()
    except StorageUnavailableError:
        raise
    except BadInputError as error:
        logger.warning("the search %s is not forgotten: %s", name, error)
        return False
    return True
