"""The folders of runs below `dike-runs/` or a service's checkpoint root: who uses one, and what is removed of it.

Scripts write there, so nothing in them is believed, and no link is followed on the way to what is removed.
"""

from __future__ import annotations

import contextlib
import datetime
import errno
import fcntl
import os
import re
import secrets
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from dike import plain_files
from dike.checkpoints import OWNER_FILE, make_private
from dike.exceptions import BadInputError
from executor import outputs

LOCK = "dike-run.lock"
"""File in a folder that `dike run` has made; it names the run, and is locked as long as that goes on."""
TRASH = ".dike-removed"
"""Folder beside the runs' that checkpoints are moved into before they are removed: none is found there in part."""
_RESULTS = re.compile(rf"{outputs.FOLDER}|{re.escape(outputs.RECORD)}|failed|run-\d+\.log")
"""What scripts have written and printed, in a run's folder or a trial's; all else there is checkpoints."""
_SMALL_BYTES = 1 << 16
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW


@dataclass(frozen=True)
class Content:
    """What would be removed of a folder.

    Attributes:
        size_bytes: of all files; one that has several names counts once.
        changed_s: when the last of them was written, seconds since the epoch.
    """

    size_bytes: int
    changed_s: float


class RunFolders:
    """The runs below a folder. A `path` is that of a run below it, `NAME`, or of a trial, `NAME` and `trial-3`.

    Args:
        root: that folder.
        results_too: whether what scripts have written and printed goes with the checkpoints.

    Raises:
        OSError: from every method, if something cannot be read or removed, or a link stands in the place of a folder.
    """

    def __init__(self, root: Path, *, results_too: bool = False) -> None:
        self._root = root
        self._results_too = results_too

    def names(self) -> list[str]:
        """The folders directly below, without links and hidden ones."""
        with os.scandir(self._root) as entries:
            found = [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
        return sorted(name for name in found if not name.startswith("."))

    def parts(self, *path: str) -> list[str]:
        """What is in a folder, by name; nothing where there is no such folder."""
        try:
            with self._opened(*path) as folder:
                return sorted(os.listdir(folder))
        except FileNotFoundError:
            return []

    def content(self, *path: str) -> Content | None:
        """What `remove` would remove; None if there is nothing."""
        with self._opened(*path) as folder:
            doomed = self._doomed(folder)
            linked: set[tuple[int, int]] = set()
            size_bytes, changed_s = 0, 0.0
            for found in (each for name in doomed for _, _, each in plain_files.walk(folder, name)):
                if stat.S_ISDIR(found.st_mode):
                    continue
                changed_s = max(changed_s, found.st_mtime)
                if found.st_nlink > 1:
                    if (found.st_dev, found.st_ino) in linked:
                        continue
                    linked.add((found.st_dev, found.st_ino))
                size_bytes += found.st_size
        return Content(size_bytes, changed_s) if doomed else None

    def remove(self, *path: str) -> None:
        """Removes the checkpoints in a folder, and the folder where nothing else is in it."""
        with self._opened() as root, self._opened(*path) as folder, _trash_in(root) as trash:
            place = secrets.token_hex(8)
            os.mkdir(place, 0o700, dir_fd=trash)
            for name in self._doomed(folder):
                os.rename(name, f"{place}/{name}", src_dir_fd=folder, dst_dir_fd=trash)
            plain_files.remove(trash, place)
        for end in range(len(path), 0, -1):
            with self._opened(*path[: end - 1]) as above, contextlib.suppress(OSError):
                os.rmdir(path[end - 1], dir_fd=above)  # Unless something is left in it.

    def empty_trash(self) -> None:
        """Removes what an earlier removal has moved and not come to remove."""
        failure: OSError | None = None
        with self._opened() as root:
            if TRASH in os.listdir(root):
                with _trash_in(root) as trash:
                    for place in os.listdir(trash):
                        try:
                            plain_files.remove(trash, place)
                        except OSError as error:
                            failure = error  # The others' are removed first.
        if failure is not None:
            raise failure

    def claimed_by(self, name: str) -> str | None:
        """The job whose chief has last claimed a run's folder; None if none has, or that cannot be read."""
        try:
            with self._opened(name) as folder:
                return str(plain_files.parse_json(plain_files.read_below(folder, OWNER_FILE, _SMALL_BYTES))["job"])
        except (OSError, KeyError, TypeError, ValueError):
            return None

    @contextlib.contextmanager
    def idle(self, name: str) -> Iterator[str | None]:
        """Keeps `dike run` from going on in a folder that it has made, while the context lasts.

        Yields:
            The name of the run that was there last; None if one goes on.

        Raises:
            FileNotFoundError: if `dike run` has not made it.
        """
        with self._opened(name) as folder, contextlib.ExitStack() as stack:
            file = os.open(LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)
            stack.callback(os.close, file)
            run = None
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                run = os.read(file, _SMALL_BYTES).decode(errors="replace").strip()
            yield run

    def _doomed(self, folder: int) -> list[str]:
        names = sorted(os.listdir(folder))
        if not self._results_too:
            # The record of outputs is there without any, too.
            has_outputs = outputs.FOLDER in names
            checkpoints = [
                name for name in names if not _RESULTS.fullmatch(name) or (name == outputs.RECORD and not has_outputs)
            ]
            if checkpoints != names:
                # Whose the folder is has to be known until all is gone.
                checkpoints = [name for name in checkpoints if name != LOCK]
            names = checkpoints
        return sorted(names, key=lambda name: name == LOCK)

    @contextlib.contextmanager
    def _opened(self, *path: str) -> Iterator[int]:
        with contextlib.ExitStack() as stack:
            here = os.open(self._root, os.O_RDONLY | os.O_DIRECTORY)
            stack.callback(os.close, here)
            for name in path:
                here = stack.enter_context(_folder_in(here, name))
            yield here


@contextlib.contextmanager
def in_use(folder: Path, run: str, *, make: bool) -> Iterator[None]:
    """Marks a folder as one in which a run goes on, while the context lasts.

    Args:
        folder: where its checkpoints are.
        run: its name.
        make: whether the folder is the run's own; else only one that an earlier run has made is marked.

    Raises:
        BadInputError: if nothing can be written there.
    """
    with contextlib.ExitStack() as stack:
        try:
            if make:
                make_private(str(folder))
            with contextlib.suppress(FileNotFoundError):
                # A link in its place leads to a file of somebody's.
                flags = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | (os.O_CREAT if make else 0)
                file = os.open(folder / LOCK, flags, 0o644)
                stack.callback(os.close, file)
                _mark(file, folder / LOCK, run)
        except OSError as error:
            raise BadInputError(
                f"Checkpoints cannot be written to {folder}: {error.strerror}; name another folder with "
                "--checkpoint-dir."
            ) from error
        try:
            yield
        finally:
            with contextlib.suppress(OSError):
                if make and os.listdir(folder) == [LOCK]:
                    os.unlink(folder / LOCK)
                    os.rmdir(folder)


def _mark(file: int, path: Path, run: str) -> None:
    # Waits for `dike clean` to come to its end.
    if _lock(file, fcntl.LOCK_SH):
        os.ftruncate(file, 0)
        os.write(file, f"{run}\n".encode())
    else:
        # `dike clean` could not see that the run goes on, and leaves folders without such a file alone.
        path.unlink(missing_ok=True)


@contextlib.contextmanager
def _folder_in(folder: int, name: str) -> Iterator[int]:
    opened = os.open(name, _FOLDER, dir_fd=folder)
    try:
        yield opened
    finally:
        os.close(opened)


@contextlib.contextmanager
def _trash_in(root: int) -> Iterator[int]:
    """The trash of a folder, made if need be, for one process at a time; removed afterwards if it is empty."""
    while True:
        with contextlib.suppress(FileExistsError):
            os.mkdir(TRASH, 0o700, dir_fd=root)
        with contextlib.ExitStack() as stack:
            try:
                trash = stack.enter_context(_folder_in(root, TRASH))
                _lock(trash, fcntl.LOCK_EX)
                is_there = os.stat(TRASH, dir_fd=root).st_ino == os.fstat(trash).st_ino
            except FileNotFoundError:
                is_there = False
            if is_there:
                yield trash
                with contextlib.suppress(OSError):
                    os.rmdir(TRASH, dir_fd=root)
                return
        # Another process has removed it between two of these steps.


def _lock(file: int, how: int) -> bool:
    """Locks an open file; whether its file system can do that."""
    try:
        fcntl.flock(file, how)
    except OSError as error:
        if error.errno not in (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP):
            raise
        return False
    return True


def new_job_id(script: Path) -> str:
    """A name for a job, unique without asking anyone: script, time and six random digits."""
    stem = "".join(c if c.isalnum() or c in "-_" else "-" for c in script.stem)
    return f"{stem}-{datetime.datetime.now():%Y%m%d-%H%M%S}-{secrets.token_hex(3)}"


def absolute_folder(path: str) -> str:
    """A folder's path as any process understands it; URLs such as `gs://bucket/x` stay as they are."""
    return path if "://" in path else str(Path(path).absolute())
