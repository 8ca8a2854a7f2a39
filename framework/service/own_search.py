"""Which search in the database is a job's, how it is removed with the job, and how it is gone on with."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Sequence
from typing import Any

from dike.exceptions import BadInputError
from framework.search.database import StorageUnavailableError
from framework.search.inheritance import SearchState
from framework.search.removal import remove_study
from framework.search.store import SearchSummary, Store
from framework.service.records import JobKind, JobRecord
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


def reopen_search(store: ServiceStore, record: JobRecord, user: str, constraints: Sequence[str] | None) -> None:
    """Lets the job of a search that has ended wait for its turn again, with all trials that there are.

    Args:
        store: the service's database.
        record: the job.
        user: who asks for it.
        constraints: which agents it may use from now on; None for those that it might use before.

    Raises:
        BadInputError: if it is no search, has not ended, has nothing left to run, or somebody else runs it.
    """
    name = record.id
    if record.kind is not JobKind.SEARCH:
        raise BadInputError(
            f"Job '{name}' is a training job: it goes on from its checkpoints when it is submitted again with "
            "--checkpoint-dir."
        )
    if not record.state.has_ended():
        then = "ask again when it has ended" if record.kill_requested else "it goes on by itself"
        raise BadInputError(f"The search '{name}' is {record.state}; {then}.")
    changes: dict[str, Any] = {}
    if constraints is not None:
        allowed = list(constraints)
        changes = {"constraints": allowed, "request": {**record.request, "constraints": allowed}}
    searches = Store(store.url, engine=store.engine)
    if record.state_data is None and not searches.searches(name):
        # The job has ended before its search was made; that is done when the job is taken up.
        _reopen(store, name, user, changes)
        return
    # Nobody runs it meanwhile, and nobody removes it.
    with searches.lock(name):
        (search,) = searches.searches(name)
        if not is_own(record, search):
            raise BadInputError(f"The search '{name}' in the database is another than the job's, which has left none.")
        ended = sum(count for state, count in search.states.items() if state.has_ended())
        if ended >= search.spec.trial_count:
            raise BadInputError(f"The search '{name}' is complete; nothing is left to run.")
        if record.state_data is not None:
            left = SearchState.from_json(record.state_data)
            begun = dataclasses.replace(
                left, began_s=time.time(), ending=None, cancelled=False, slots=(), first_slot_s=None
            )
            changes["state_data"] = begun.to_json()
        _reopen(store, name, user, changes)


def _reopen(store: ServiceStore, name: str, user: str, changes: dict[str, Any]) -> None:
    if not store.reopen_job(name, f"{user} has asked that it goes on", **changes):
        raise BadInputError(f"The search '{name}' goes on already.")


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
    searches = Store(store.url, engine=store.engine)
    try:
        found = searches.searches(name)
        if record is None or not found or not is_own(record, found[0]):
            return True
        if (searches.last_heartbeat_s(name) or 0.0) >= ended_before_s:
            return False
        with searches.lock(name):
            record = store.job(name)
            if record is not None and not record.state.has_ended():
                return False
            # In this order: a search without a study is removed the next time.
            remove_study(store.url, name)
            searches.delete_search()
    except StorageUnavailableError:
        raise
    except BadInputError as error:
        logger.warning("the search %s is not forgotten: %s", name, error)
        return False
    return True
