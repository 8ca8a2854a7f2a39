"""Accepts clients' requests from any thread: writes them to the database, then notifies the service's loop."""

from __future__ import annotations

import dataclasses
import os
import posixpath
import queue
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from dike.exceptions import BadInputError
from framework.mesos import events
from framework.project.bundle import check, new_token
from framework.project.run_folders import new_job_id
from framework.scheduler.queue_options import QueueOptions
from framework.scheduler.records import NEWEST, JobKind, JobRecord
from framework.search.policy import earlier_trials
from framework.search.records import SearchSpec
from framework.search.recovery import SearchState
from framework.search.space import MORE_TRIALS, extended
from framework.search.store import Store
from framework.service.mounts import NO_CONTAINERS, Mounts
from framework.service.queries import checkpoint_folders
from framework.service.requests import Resumption, SearchJobRequest, TrainingRequest, is_own_search, stored_request
from framework.service.store import ServiceStore
from framework.service.users import OverLimitError


class Submissions:
    """Accepts jobs and requests to resume or kill them; `inbox` is the event queue of the service's loop."""

    def __init__(
        self,
        store: ServiceStore,
        inbox: queue.SimpleQueue[events.Event],
        mounts: Mounts = NO_CONTAINERS,
    ) -> None:
        self.store = store
        self._inbox = inbox
        self._mounts = mounts
        # Serializes the check of checkpoint folders: two users may name the same one at the same time.
        self._folder_lock = threading.Lock()

    @property
    def has_containers(self) -> bool:
        """Whether tasks run in an image, without access to the agents' own files."""
        return self._mounts.image is not None

    def submit(self, request: TrainingRequest | SearchJobRequest, bundle: bytes, user: str) -> JobRecord:
        """Accepts a job; it is durable when this returns.

        Raises:
            BadInputError: if the name is invalid or taken, the bundle is malformed, or folders are not allowed.
            OverLimitError: if the job exceeds a limit of the user.
        """
        asked = request.to_spec() if isinstance(request, SearchJobRequest) else request
        if isinstance(asked, SearchSpec):
            self._check_trials(asked.trial_count, user)
            if asked.warm_start_from:
                earlier_trials(asked, Store(self.store.database.url, engine=self.store.database.engine))
        script, name = asked.script, asked.name
        self._check_queue_options(request, user)
        check(bundle, script)
        self._mounts.check(request)
        if name == NEWEST:
            raise BadInputError(f"'{NEWEST}' is what commands call your newest job; choose another --name.")
        record = JobRecord(
            id=name or new_job_id(Path(script)),
            kind=JobKind(request.kind),
            user=user,
            script=script,
            request=request.to_json(),
            constraints=tuple(request.constraints),
            submitted_s=time.time(),
            bundle_token=new_token(),
            priority=request.priority,
        )
        with self._folder_lock:
            self._check_folder(asked.checkpoint_dir, user)
            self.store.add_job(record, bundle)
        self._inbox.put(events.JobSubmitted(record.id))
        return record

    def _check_folder(self, named: str | None, user: str) -> None:
        """Refuses a checkpoint folder of another user: a folder belongs to the user of the first job in it."""
        if not named:
            return
        root = _resolve(self._mounts.checkpoint_root)
        with self.store.database.reading() as connection:
            own, others = checkpoint_folders(connection, user, self._mounts.checkpoint_root.rstrip("/"))
        folder = _resolve(named)
        is_own = any(_is_in(folder, _resolve(each)) for each in own)
        is_others = any(_is_in(folder, each) or _is_in(each, folder) for each in map(_resolve, others))
        # A deleted job may have left the folder behind.
        is_left_over = root != "" and _is_in(folder, root) and not is_own and os.path.exists(folder)
        if is_others or (is_left_over and others):
            raise BadInputError(
                f"The checkpoint folder {named} is not yours: a job of another user, or a forgotten one, has used it "
                "or a folder in it; name another."
            )

    def _check_queue_options(self, options: QueueOptions, user: str) -> None:
        for dependency in options.dependencies:
            if self.store.job(dependency.job_id) is None:
                raise BadInputError(f"--after {dependency}: there is no job '{dependency.job_id}'.")
        highest = self.store.limits(user).priority
        if options.priority.rank < highest.rank:
            raise OverLimitError(
                f"The highest priority that the service's operator has set for {user} is {highest}; submit with "
                f"--priority {highest}, or ask for more."
            )

    def _check_trials(self, count: int, user: str) -> None:
        limit = self.store.limits(user).trials
        if limit is not None and count > limit:
            raise OverLimitError(
                f"The limit of trials in a search that the service's operator has set for {user} is {limit}, and this "
                f"one has {count}; search with fewer, or ask for more."
            )

    def resume(self, record: JobRecord, user: str, resumption: Resumption) -> None:
        """Resumes a search that has ended, durably; see `reopen_search`."""
        reopen_search(self.store, record, user, resumption, lambda spec: self._check_trials(spec.trial_count, user))
        self._inbox.put(events.JobSubmitted(record.id))

    def release(self, record: JobRecord) -> None:
        """Lets a held job start.

        Raises:
            BadInputError: if it is not held.
        """
        if record.state.has_ended() or not record.request["hold"]:
            raise BadInputError(f"The job '{record.id}' is not held: it {record.state.verb}.")
        self.store.change_job(record.id, request={**record.request, "hold": False})
        self._inbox.put(events.JobReleased(record.id))

    def kill(self, record: JobRecord, user: str = "") -> None:
        """Requests a job's end on behalf of a user; no-op for a job that has ended."""
        if not record.state.has_ended():
            self.store.change_job(record.id, kill_requested=True)
            self._inbox.put(events.KillRequested(record.id, user))


def _resolve(folder: str) -> str:
    """A folder in comparable form: normalized, links resolved on this machine."""
    return posixpath.normpath(folder) if "://" in folder or not folder else os.path.realpath(folder)


def _is_in(folder: str, other: str) -> bool:
    return folder == other or folder.startswith(f"{other.rstrip('/')}/")


def reopen_search(
    store: ServiceStore, record: JobRecord, user: str, resumption: Resumption, check: Callable[[SearchSpec], None]
) -> None:
    """Queues the job of a search that has ended again, with all its trials.

    Raises:
        BadInputError: if the job is no search, has not ended, is complete, another process runs the search, or `check`
            refuses what it is to become.
        OverLimitError: if the job's user has reached the limit of open jobs.
    """
    name = record.id
    if record.kind is not JobKind.SEARCH:
        raise BadInputError(
            f"Job '{name}' is a training job: it resumes from its checkpoints when it is submitted again with "
            "--checkpoint-dir."
        )
    if not record.state.has_ended():
        then = "ask again when it has ended" if record.kill_requested else "it continues automatically"
        raise BadInputError(f"The search '{name}' is {record.state}; {then}.")
    changes: dict[str, Any] = {}
    request = record.request
    if resumption.constraints is not None:
        changes["constraints"] = list(resumption.constraints)
        request = {**request, "constraints": changes["constraints"]}
    searches = Store(store.database.url, engine=store.database.engine)
    if record.state_data is None and not searches.searches(name):
        # The job ended before its search was created; admitting the job creates it.
        asked = stored_request(record)
        assert isinstance(asked, SearchJobRequest)
        spec = extended(asked.to_spec(), resumption.trials, resumption.space)
        check(spec)
        _reopen(store, name, user, {**changes, "request": _with_spec(request, spec)})
        return
    # The lock keeps other processes from running or deleting the search meanwhile.
    with searches.lock(name):
        (search,) = searches.searches(name)
        if not is_own_search(record, search):
            raise BadInputError(
                f"The search '{name}' in the database does not belong to this job, which has none to resume."
            )
        spec = extended(search.spec, resumption.trials, resumption.space)
        check(spec)
        ended = sum(count for state, count in search.states.items() if state.has_ended())
        if ended >= spec.trial_count:
            raise BadInputError(f"The search '{name}' is complete; {MORE_TRIALS}.")
        if spec != search.spec:
            searches.open_search(name)
            searches.change_search(spec, searches.options)
            request = _with_spec(request, spec)
        if record.state_data is not None:
            left = SearchState.from_json(record.state_data)
            begun = dataclasses.replace(
                left, began_s=time.time(), ending=None, cancelled=False, slots=(), first_slot_s=None
            )
            changes["state_data"] = begun.to_json()
        _reopen(store, name, user, {**changes, "request": request})


def _with_spec(request: Mapping[str, Any], spec: SearchSpec) -> dict[str, Any]:
    """Returns a search's request with another number of trials and other values."""
    space = [dataclasses.asdict(parameter) for parameter in spec.space]
    return {**request, "spec": {**request["spec"], "trial_count": spec.trial_count, "space": space}}


def _reopen(store: ServiceStore, name: str, user: str, changes: dict[str, Any]) -> None:
    if not store.reopen_job(name, f"resumed by {user}", **changes):
        raise BadInputError(f"The search '{name}' has been resumed already.")
