"""Which search in the database is a job's, and how it is removed with the job."""

from __future__ import annotations

import dataclasses
import logging

from dike.exceptions import BadInputError
from framework.search.database import StorageUnavailableError
from framework.search.removal import remove_study
from framework.search.store import SearchSummary, Store
from framework.service.records import JobRecord
from framework.service.requests import SearchJobRequest, read_request
from framework.service.store import ServiceStore

logger = logging.getLogger(__name__)


def is_own(record: JobRecord, search: SearchSummary) -> bool:
    """Whether a search of a job's name is the job's own, and not one that `dike tune` has made.

    Raises:
        BadInputError: if the job's request cannot be read any more.
    """
    if record.state_data is not None:
        return True
    # A service that was killed may have made it and not come to write down anything of the job.
    request = read_request(record.request)
    assert isinstance(request, SearchJobRequest)
    # Where its checkpoints are the service may have chosen, and each service chooses for itself.
    asked = dataclasses.replace(request.to_spec(), checkpoint_dir=search.spec.checkpoint_dir)
    return search.spec == asked and search.created_s >= record.submitted_s


def remove_old_searches(store: ServiceStore, ended_before_s: float) -> list[str]:
    """Removes the searches of jobs that ended before a time, studies included.

    Args:
        store: the service's database; it is in others' way for a moment at a time only.
        ended_before_s: seconds since the epoch.

    Returns:
        The jobs that have no search any more; a search that somebody has gone on with since is in use.
    """
    names = store.old_searches(ended_before_s)
    searches = (
        {search.spec.name: search for search in Store(store.url, engine=store.engine).searches()} if names else {}
    )
    return [name for name in names if _is_gone(store, name, searches.get(name), ended_before_s)]


def _is_gone(store: ServiceStore, name: str, search: SearchSummary | None, ended_before_s: float) -> bool:
    record = store.job(name)
    if record is None or search is None:
        return True
    searches = Store(store.url, engine=store.engine)
    try:
        if not is_own(record, search):
            return True
        if (searches.last_heartbeat_s(name) or 0.0) >= ended_before_s:
            return False
        with searches.lock(name):
            # In this order: a search without a study is removed the next time.
            remove_study(store.url, name)
            searches.delete_search()
    except StorageUnavailableError:
        raise
    except BadInputError as error:
        logger.warning("the search %s is not forgotten: %s", name, error)
        return False
    return True
