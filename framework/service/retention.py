"""Forgets jobs that ended long ago, and removes their checkpoints.

So neither the database nor the disk of a service that is left running grows for ever.
"""

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
from framework.search.records import SearchResult
from framework.search.store import Store
from framework.service import queries
from framework.service.requests import is_own_search
from framework.service.store import ServiceStore
from framework.training.state import stored_checkpoint_dir
from solver.units import format_bytes

logger = logging.getLogger(__name__)

EVERY_S = 3600.0
END_S = 10.0
"""How long a removal that goes on is waited for at the end; the next service takes it up where it was."""
_SUBMITTED = re.compile(r"-\d{8}-\d{6}$")
"""What `JobRecord.folder_name` adds to a name."""


@dataclass(frozen=True)
class Keeping:
    """How long a service keeps what is left of jobs that have ended.

    Attributes:
        jobs_s: what the database has of them, in seconds; None for ever.
        checkpoints_s: their checkpoints; None for ever. Not longer than `jobs_s`: whose they are is in the database.
        root: the folder that the service makes checkpoint folders in.
    """

    jobs_s: float | None = None
    checkpoints_s: float | None = None
    root: Path = Path()


@contextlib.contextmanager
def removing_old_jobs(store: ServiceStore, keeping: Keeping, every_s: float = EVERY_S) -> Iterator[None]:
    """Removes what is old at once and now and then, on a thread of its own, while the context lasts.

    Args:
        store: the service's database.
        keeping: how long what is kept.
        every_s: how often is looked for what is older.
    """
    ending = threading.Event()
    thread = threading.Thread(
        target=_remove_now_and_then, args=(store, keeping, every_s, ending), name="dike-keeping", daemon=True
    )
    thread.start()
    try:
        yield
    finally:
        ending.set()
        thread.join(END_S)


def _remove_now_and_then(store: ServiceStore, keeping: Keeping, every_s: float, ending: threading.Event) -> None:
    while True:
        try:
            _remove(store, keeping, ending)
        except (StorageUnavailableError, ServiceLeaseLostError, OSError) as error:
            logger.warning("what is left of old jobs is not removed this time: %s", error)
        except Exception:
            # Whatever it is: the thread would be gone, and database and disk grow from now on.
            logger.exception("what is left of old jobs is not removed this time")
        if ending.wait(every_s):
            return


def _remove(store: ServiceStore, keeping: Keeping, ending: threading.Event) -> None:
    now_s = time.time()
    checkpoints = None
    if keeping.checkpoints_s is not None:
        checkpoints = Checkpoints(store, keeping.root, now_s - keeping.checkpoints_s)
        checkpoints.remove_old(ending.is_set)
    if keeping.jobs_s is not None and not ending.is_set():
        ended_before_s = now_s - keeping.jobs_s
        count = store.delete_jobs(ended_before_s, remove_old_searches(store, ended_before_s, checkpoints), ending)
        if count:
            logger.info("%d jobs forgotten that ended more than %g days ago", count, keeping.jobs_s / 86400)


class Checkpoints:
    """The checkpoints of a service's jobs, in the folders that it has made for them.

    Args:
        store: the service's database.
        root: where these folders are, an absolute path.
        before_s: what ended, and was written to for the last time, before this time (seconds since the epoch) is old.
    """

    def __init__(self, store: ServiceStore, root: Path, before_s: float) -> None:
        self._store = store
        self._root = root
        self._before_s = before_s
        self._folders = RunFolders(root)

    def remove_old(self, is_ending: Callable[[], bool]) -> None:
        """Removes all that are old, but those of trials that may go on and of the best trial of each search.

        Args:
            is_ending: whether to stop before the next job.

        Raises:
            OSError: if the root cannot be read.
        """
        if not self._root.exists():
            return
        try:
            self._folders.empty_trash()
        except OSError as error:
            logger.warning("what an earlier removal has left in %s is not removed: %s", self._root, error)
        for name in self._folders.names():
            if is_ending():
                return
            record = self._maker(name)
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
                self._tell(record, size_bytes)

    def remove_trials(self, record: JobRecord, searches: Store, *, may_go_on: bool) -> int | None:
        """Removes those of a search that nobody runs and whose lease we hold.

        Args:
            record: its job.
            searches: has the search open.
            may_go_on: whether somebody may go on with it.

        Returns:
            How many bytes; None if there were none to remove.
        """
        spec = searches.spec
        folder = Path(spec.checkpoint_dir).name
        if folder != self._own_folder(record) or spec.checkpoint_dir.rstrip("/") != f"{self._root}/{folder}":
            return None
        try:
            there = set(self._folders.parts(folder))
        except OSError as error:
            logger.warning("the checkpoints of job %s are not removed: %s", record.id, error)
            return None
        trials = searches.load_trials(readings=False)
        result = SearchResult(spec.name, False, trials, spec.mode, spec.checkpoint_dir)
        sizes = [
            self._remove_if_old(folder, f"trial-{trial.number}")
            for trial in result.dispensable(may_resume=may_go_on)
            if f"trial-{trial.number}" in there
        ]
        removed = [size for size in sizes if size is not None]
        return sum(removed) if removed else None

    def _maker(self, name: str) -> JobRecord | None:
        """The old job that the service has made a folder for; None if there is none, or it is not old."""
        for job_id in dict.fromkeys((name, _SUBMITTED.sub("", name))):
            record = self._store.old_job(job_id, self._before_s)
            if record is not None and name == self._own_folder(record):
                return record
        return None

    def _own_folder(self, record: JobRecord) -> str | None:
        """What the folder is called that the service has chosen for a job, below this root; None if it has not."""
        name = record.folder_name
        if record.kind is JobKind.SEARCH:
            return None if (record.request.get("spec") or {}).get("checkpoint_dir") else name
        chosen = stored_checkpoint_dir(record.state_data)
        return name if not record.request.get("checkpoint_dir") and chosen == f"{self._root}/{name}" else None

    def _remove_job(self, record: JobRecord) -> int | None:
        name = record.folder_name
        if self._folders.last_owner(name) not in (None, name):
            return None  # Somebody has gone on with them.
        return self._remove_if_old(name)

    def _remove_search(self, record: JobRecord) -> int | None:
        searches = Store(self._store.database.url, engine=self._store.database.engine)
        found = searches.searches(record.id)
        if not found or not is_own_search(record, found[0]):
            return None
        last_sign_s = searches.last_heartbeat_s(record.id) or 0.0
        if last_sign_s >= self._before_s:
            return None
        # Nobody has gone on with it: it is as old afterwards as before.
        with searches.lock(record.id, last_sign_s=last_sign_s):
            # Nobody goes on with it from now on; somebody may have until then.
            if self._store.old_job(record.id, self._before_s) is None:
                return None
            return self.remove_trials(record, searches, may_go_on=True)

    def _remove_if_old(self, *path: str) -> int | None:
        if self._is_named(*path):
            return None
        try:
            content = self._folders.content(*path)
            # Asked again: to look at all files may have taken long.
            if content is None or content.changed_s >= self._before_s or self._is_named(*path):
                return None
            self._folders.remove(*path)
        except OSError as error:
            logger.warning("the checkpoints in %s are not removed: %s", self._root.joinpath(*path), error)
            return None
        return content.size_bytes

    def _is_named(self, *path: str) -> bool:
        """Whether a user has named this folder, or one in it, or one that it is in, for a job that has not ended."""
        root = Path(os.path.realpath(self._root))
        folder = root.joinpath(*path)
        with self._store.database.reading() as connection:
            named = [text for text in queries.named_folders(connection) if "://" not in text]
        used = (Path(os.path.realpath(text)) for text in named)
        # A job in the root itself has folders of its own there.
        return any(
            one.is_relative_to(folder) or (folder.is_relative_to(one) and not root.is_relative_to(one)) for one in used
        )

    def _tell(self, record: JobRecord, size_bytes: int) -> None:
        size = format_bytes(size_bytes)
        logger.info("checkpoints of job %s removed: %s", record.id, size)
        whose = "checkpoints of its trials" if record.kind is JobKind.SEARCH else "its checkpoints"
        self._store.history.add_events(record.id, [("note", f"{whose} are removed, {size}: they were old")])
        self._store.history.close(record.id)


def remove_old_searches(
    store: ServiceStore, ended_before_s: float, checkpoints: Checkpoints | None = None
) -> list[str]:
    """Removes the searches of jobs that ended before a time, studies included.

    Args:
        store: the service's database; it is in others' way for a moment at a time only.
        ended_before_s: seconds since the epoch.
        checkpoints: theirs are removed, too, but the best trials'; None to leave them alone.

    Returns:
        The jobs that have no search any more; a search that somebody has gone on with since is in use.
    """
    names = store.old_searches(ended_before_s)
    return [name for name in names if _is_gone(store, name, ended_before_s, checkpoints)]


def _is_gone(store: ServiceStore, name: str, ended_before_s: float, checkpoints: Checkpoints | None) -> bool:
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
                size_bytes = checkpoints.remove_trials(record, searches, may_go_on=False)
                if size_bytes is not None:
                    logger.info("checkpoints of job %s removed: %s", name, format_bytes(size_bytes))
            # In this order: a search without a study is removed the next time.
            remove_study(store.database.url, name)
            searches.delete_search()
    except StorageUnavailableError:
        raise
    except BadInputError as error:
        logger.warning("the search %s is not forgotten: %s", name, error)
        return False
    return True
