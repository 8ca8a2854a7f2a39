"""The folders of runs below `dike-runs/` or a service's checkpoint root: which are in use, and how they are cleaned.

Scripts write there, so the contents are untrusted, and no link is followed on the way to a file to be removed.
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
"""File in a folder made by `dike run`; contains the run's name and is locked while the run is active."""
TRASH = ".dike-removed"
"""Folder beside the runs into which checkpoints are moved before removal, so that no partial one is ever found."""
_RESULTS = re.compile(rf"{outputs.FOLDER}|{re.escape(outputs.RECORD)}|failed|run-\d+\.log")
"""Outputs and logs of scripts in a folder of a run or trial; all other files there are checkpoints."""
_SMALL_BYTES = 1 << 16
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW


@dataclass(frozen=True)
class Content:
    """The removable files of a folder.

    Attributes:
        size_bytes: of all files; hard links count once.
        changed_s: Unix time of the last modification.
    """

    size_bytes: int
    changed_s: float


class RunFolders:
    """The runs below a folder. A `path` is that of a run, `NAME`, or of a trial, `NAME` and `trial-3`.

    Args:
        results_too: whether outputs and logs of scripts are removed with the checkpoints.

    Raises:
        OSError: from every method, if a file cannot be read or removed, or a folder is replaced by a link.
    """

    def __init__(self, root: Path, *, results_too: bool = False) -> None:
        self._root = root
        self._results_too = results_too

    def names(self) -> list[str]:
        """The subfolders, without links and hidden ones."""
        with os.scandir(self._root) as entries:
            found = [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
        return sorted(name for name in found if not name.startswith("."))

    def parts(self, *path: str) -> list[str]:
        """The names in a folder; empty if it does not exist."""
        try:
            with self._opened(*path) as folder:
                return sorted(os.listdir(folder))
        except FileNotFoundError:
            return []

    def content(self, *path: str) -> Content | None:
        """What `remove` would remove; None for nothing."""
        with self._opened(*path) as folder:
            removable = self._removable(folder)
            linked: set[tuple[int, int]] = set()
            size_bytes, changed_s = 0, 0.0
            for found in (each for name in removable for _, _, each in plain_files.walk(folder, name)):
                if stat.S_ISDIR(found.st_mode):
                    continue
                changed_s = max(changed_s, found.st_mtime)
                if found.st_nlink > 1:
                    if (found.st_dev, found.st_ino) in linked:
                        continue
                    linked.add((found.st_dev, found.st_ino))
                size_bytes += found.st_size
        return Content(size_bytes, changed_s) if removable else None

    def remove(self, *path: str) -> None:
        """Removes the checkpoints in a folder, and the folder if it is then empty."""
        with self._opened() as root, self._opened(*path) as folder, _locked_trash(root) as trash:
            place = secrets.token_hex(8)
            os.mkdir(place, 0o700, dir_fd=trash)
            for name in self._removable(folder):
                os.rename(name, f"{place}/{name}", src_dir_fd=folder, dst_dir_fd=trash)
            plain_files.remove(trash, place)
        for end in range(len(path), 0, -1):
            with self._opened(*path[: end - 1]) as above, contextlib.suppress(OSError):
                os.rmdir(path[end - 1], dir_fd=above)  # Unless something is left in it.

    def empty_trash(self) -> None:
        """Completes earlier removals that were interrupted."""
        failure: OSError | None = None
        with self._opened() as root:
            if TRASH in os.listdir(root):
                with _locked_trash(root) as trash:
                    for place in os.listdir(trash):
                        try:
                            plain_files.remove(trash, place)
                        except OSError as error:
                            failure = error  # Raised after the others are removed.
        if failure is not None:
            raise failure

    def last_owner(self, name: str) -> str | None:
        """The last job whose chief owned a run's folder; None if there is none, or it cannot be read."""
        try:
            with self._opened(name) as folder:
                return str(plain_files.parse_json(plain_files.read_below(folder, OWNER_FILE, _SMALL_BYTES))["job"])
        except (OSError, KeyError, TypeError, ValueError):
            return None

    @contextlib.contextmanager
    def lock_idle(self, name: str) -> Iterator[str | None]:
        """Prevents `dike run` from using a folder that it has made, within the context.

        Yields:
            The name of the last run there; None if one is active.

        Raises:
            FileNotFoundError: `dike run` has not made it.
        """
        with self._opened(name) as folder, contextlib.ExitStack() as stack:
            file = os.open(LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)
            stack.callback(os.close, file)
            run = None
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                run = os.read(file, _SMALL_BYTES).decode(errors="replace").strip()
            yield run

    def _removable(self, folder: int) -> list[str]:
        names = sorted(os.listdir(folder))
        if not self._results_too:
            # The record of outputs exists even without outputs.
            has_outputs = outputs.FOLDER in names
            checkpoints = [
                name for name in names if not _RESULTS.fullmatch(name) or (name == outputs.RECORD and not has_outputs)
            ]
            if checkpoints != names:
                # The lock identifies the folder's run until everything is removed.
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
def mark_in_use(folder: Path, run: str, *, make: bool) -> Iterator[None]:
    """Marks a folder as used by an active run, within the context.

    Without `make` the folder is the user's, and is marked only if an earlier run has made it.

    Raises:
        BadInputError: the folder is not writable.
    """
    with contextlib.ExitStack() as stack:
        try:
            if make:
                make_private(str(folder))
            with contextlib.suppress(FileNotFoundError):
                # A link in its place might lead to another file.
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
    # Waits for `dike clean` to finish.
    if _lock(file, fcntl.LOCK_SH):
        os.ftruncate(file, 0)
        os.write(file, f"{run}\n".encode())
    else:
        # Without locks `dike clean` could not see that the run is active; it skips folders without this file.
        path.unlink(missing_ok=True)


@contextlib.contextmanager
def _folder_in(folder: int, name: str) -> Iterator[int]:
    opened = os.open(name, _FOLDER, dir_fd=folder)
    try:
        yield opened
    finally:
        os.close(opened)


@contextlib.contextmanager
def _locked_trash(root: int) -> Iterator[int]:
    """The trash of a folder, made if necessary and locked; removed afterwards if empty."""
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
    """Locks an open file; returns whether its file system supports that."""
    try:
        fcntl.flock(file, how)
    except OSError as error:
        if error.errno not in (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP):
            raise
        return False
    return True


def new_job_id(script: Path) -> str:
    """Creates a job id that is unique without coordination: script, time and six random digits."""
    stem = "".join(c if c.isalnum() or c in "-_" else "-" for c in script.stem)
    return f"{stem}-{datetime.datetime.now():%Y%m%d-%H%M%S}-{secrets.token_hex(3)}"


def absolute_folder(path: str) -> str:
    """Makes a folder's path absolute; URLs such as `gs://bucket/x` are unchanged."""
    return path if "://" in path else str(Path(path).absolute())
