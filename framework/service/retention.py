"""Deletes jobs that ended long ago, and their checkpoints, so that database and disk do not grow without bound."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from dike.exceptions import BadInputError
from framework.project.run_folders import RunFolders
from framework.scheduler.journal import ServiceLeaseLostError, StorageUnavailableError
from framework.scheduler.records import JobKind, JobRecord
from framework.search.optuna_study import remove_study
from framework.search.records import SearchOutcome
from framework.search.store import Store
from framework.service import queries
from framework.service.requests import is_own_search
from framework.service.store import ServiceStore
from framework.training.state import stored_checkpoint_dir
from solver.units import format_bytes

logger = logging.getLogger(__name__)

INTERVAL_S = 3600.0
SHUTDOWN_TIMEOUT_S = 10.0
"""Maximum wait for a running removal at shutdown; the next service continues it."""
_SUBMITTED = re.compile(r"-\d{8}-\d{6}$")
"""The suffix that `JobRecord.folder_name` adds to a name."""


@dataclass(frozen=True)
class RetentionPolicy:
    """How long a service keeps jobs that have ended and their checkpoints, in seconds; None for ever.

    Checkpoints are kept at most as long as jobs, as the database knows their owners. They are in folders below `root`.
    """

    jobs_s: float | None = None
    checkpoints_s: float | None = None
    root: Path = Path()


@contextlib.contextmanager
def removing_old_jobs(store: ServiceStore, policy: RetentionPolicy, interval_s: float = INTERVAL_S) -> Iterator[None]:
    """Removes what is old immediately and at each interval, on a thread, inside the context."""
    ending = threading.Event()
    thread = threading.Thread(
        target=_remove_periodically, args=(store, policy, interval_s, ending), name="dike-retention", daemon=True
    )
    thread.start()
    try:
        yield
    finally:
        ending.set()
        thread.join(SHUTDOWN_TIMEOUT_S)


def _remove_periodically(
    store: ServiceStore, policy: RetentionPolicy, interval_s: float, ending: threading.Event
) -> None:
    while True:
        try:
            _remove(store, policy, ending)
        except (StorageUnavailableError, ServiceLeaseLostError, OSError) as error:
            logger.warning("old jobs are not removed this time: %s", error)
        except Exception:
            # Any error: if the thread died, database and disk would grow without bound.
            logger.exception("old jobs are not removed this time")
        if ending.wait(interval_s):
            return


def _remove(store: ServiceStore, policy: RetentionPolicy, ending: threading.Event) -> None:
    now_s = time.time()
    checkpoints = None
    if policy.checkpoints_s is not None:
        checkpoints = Checkpoints(store, policy.root, now_s - policy.checkpoints_s)
        checkpoints.remove_old(ending.is_set)
    if policy.jobs_s is not None and not ending.is_set():
        ended_before_s = now_s - policy.jobs_s
        count = store.delete_jobs(ended_before_s, remove_old_searches(store, ended_before_s, checkpoints), ending)
        if count:
            logger.info("%d jobs deleted that ended more than %g days ago", count, policy.jobs_s / 86400)


class Checkpoints:
    """The checkpoints of a service's jobs, in the folders that the service created below `root`.

    They are old if job and last write ended before `before_s`, in seconds since the epoch.
    """

    def __init__(self, store: ServiceStore, root: Path, before_s: float) -> None:
        self._store = store
        self._root = root
        self._before_s = before_s
        self._folders = RunFolders(root)

    def remove_old(self, is_ending: Callable[[], bool]) -> None:
        """Removes old checkpoints, except those of resumable trials and of the best trial of each search."""
        if not self._root.exists():
            return
        try:
            self._folders.empty_trash()
        except OSError as error:
            logger.warning("leftovers of an earlier removal in %s are not removed: %s", self._root, error)
        for name in self._folders.names():
            if is_ending():
                return
            record = self._owner_of(name)
            if record is None:
                continue
            try:
                size_bytes = self._remove_search(record) if record.kind is JobKind.SEARCH else self._remove_job(record)
            except StorageUnavailableError:
                raise
            except BadInputError as error:
                logger.warning("the checkpoints of job %s are not removed: %s", record.id, error)
                continue
            if size_bytes is not None:
                self._record_removal(record, size_bytes)

    def remove_trials(self, record: JobRecord, searches: Store, *, may_resume: bool) -> int | None:
        """Removes old checkpoints of a search whose lease the caller owns; returns the bytes, None if nothing was
        removed.
        """
        spec = searches.spec
        folder = Path(spec.checkpoint_dir).name
        if folder != self._own_folder(record) or spec.checkpoint_dir.rstrip("/") != f"{self._root}/{folder}":
            return None
        try:
            existing = set(self._folders.parts(folder))
        except OSError as error:
            logger.warning("the checkpoints of job %s are not removed: %s", record.id, error)
            return None
        trials = searches.load_trials(readings=False)
        result = SearchOutcome(spec.name, False, trials, spec.mode, spec.checkpoint_dir)
        sizes = [
            self._remove_if_old(folder, f"trial-{trial.number}")
            for trial in result.dispensable(may_resume=may_resume)
            if f"trial-{trial.number}" in existing
        ]
        removed = [size for size in sizes if size is not None]
        return sum(removed) if removed else None

    def _owner_of(self, name: str) -> JobRecord | None:
        """The old job for which the service created a folder; None if there is none or it is not old."""
        for job_id in dict.fromkeys((name, _SUBMITTED.sub("", name))):
            record = self._store.old_job(job_id, self._before_s)
            if record is not None and name == self._own_folder(record):
                return record
        return None

    def _own_folder(self, record: JobRecord) -> str | None:
        """The name of the folder that the service chose for a job below this root; None if it chose none there."""
        name = record.folder_name
        if record.kind is JobKind.SEARCH:
            return None if (record.request.get("spec") or {}).get("checkpoint_dir") else name
        chosen = stored_checkpoint_dir(record.state_data)
        return name if not record.request.get("checkpoint_dir") and chosen == f"{self._root}/{name}" else None

    def _remove_job(self, record: JobRecord) -> int | None:
        name = record.folder_name
        if self._folders.last_owner(name) not in (None, name):
            return None  # A later job has resumed from them.
        return self._remove_if_old(name)

    def _remove_search(self, record: JobRecord) -> int | None:
        searches = Store(self._store.database.url, engine=self._store.database.engine)
        found = searches.searches(record.id)
        if not found or not is_own_search(record, found[0]):
            return None
        last_heartbeat_s = searches.last_heartbeat_s(record.id) or 0.0
        if last_heartbeat_s >= self._before_s:
            return None
        # Keeps the old heartbeat: this lock does not make the search younger.
        with searches.lock(record.id, last_sign_s=last_heartbeat_s):
            # Checked again under the lock: the search may have been resumed meanwhile.
            if self._store.old_job(record.id, self._before_s) is None:
                return None
            return self.remove_trials(record, searches, may_resume=True)

    def _remove_if_old(self, *path: str) -> int | None:
        if self._is_in_use(*path):
            return None
        try:
            content = self._folders.content(*path)
            # Checked again: reading the folder may have taken long.
            if content is None or content.changed_s >= self._before_s or self._is_in_use(*path):
                return None
            self._folders.remove(*path)
        except OSError as error:
            logger.warning("the checkpoints in %s are not removed: %s", self._root.joinpath(*path), error)
            return None
        return content.size_bytes

    def _is_in_use(self, *path: str) -> bool:
        """Whether an open job's user named this folder, a parent or a folder inside it."""
        root = Path(os.path.realpath(self._root))
        folder = root.joinpath(*path)
        with self._store.database.reading() as connection:
            named = [text for text in queries.named_folders(connection) if "://" not in text]
        used = (Path(os.path.realpath(text)) for text in named)
        # A job whose folder is the root has its own folders there.
        return any(
            one.is_relative_to(folder) or (folder.is_relative_to(one) and not root.is_relative_to(one)) for one in used
        )

    def _record_removal(self, record: JobRecord, size_bytes: int) -> None:
        size = format_bytes(size_bytes)
        logger.info("checkpoints of job %s removed: %s", record.id, size)
        removed = "checkpoints of its trials" if record.kind is JobKind.SEARCH else "its checkpoints"
        self._store.history.add_events(record.id, [("note", f"{removed} are removed, {size}: they were old")])
        self._store.history.close(record.id)


def remove_old_searches(
    store: ServiceStore, ended_before_s: float, checkpoints: Checkpoints | None = None
) -> list[str]:
    """Deletes the searches, with studies and checkpoints, of jobs that ended before a time; returns the jobs without a
    search.

    Keeps the checkpoints of the best trials, and searches that were resumed since.
    """
    names = store.old_searches(ended_before_s)
    return [name for name in names if remove_search(store, name, ended_before_s, checkpoints)]


def remove_search(store: ServiceStore, name: str, ended_before_s: float, checkpoints: Checkpoints | None) -> bool:
    """Deletes a search unless it is in use; returns whether the job has none now."""
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
            if checkpoints is not None and record is not None:
                size_bytes = checkpoints.remove_trials(record, searches, may_resume=False)
                if size_bytes is not None:
                    logger.info("checkpoints of job %s removed: %s", name, format_bytes(size_bytes))
            # In this order: a failure in between leaves a search without a study, which the next removal deletes.
            remove_study(store.database.url, name)
            searches.delete_search()
    except StorageUnavailableError:
        raise
    except BadInputError as error:
        logger.warning("the search %s is not deleted: %s", name, error)
        return False
    return True
