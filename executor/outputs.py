"""Output files: saves what a script writes below its working folder to its run's folder, and restores it for a restart.

The run's folder is a job's checkpoint folder, or a trial's: any path of `tf.io.gfile` that every agent can reach. It
gets a folder `outputs/` and an `OutputsRecord`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import glob
import json
import logging
import os
import re
import secrets
import select
import shutil
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from dike import plain_files
from dike.checkpoints import OWNER_FILE, make_private

logger = logging.getLogger(__name__)

OUTPUT_DIR_VARIABLE = "DIKE_OUTPUT_DIR"
"""Variable for the script: its working folder, whose new files are saved."""
LIMIT_VARIABLE = "DIKE_OUTPUTS_LIMIT"
"""Variable of the process: maximum size of all saved files (`read_limit`)."""
DEFAULT_LIMIT = "1G"
FOLDER = "outputs"
RECORD = "dike-outputs.json"
"""File beside that folder: an `OutputsRecord`."""
RECORD_LIMIT_BYTES = 64 * 2**20
"""Maximum size of a record that is read: a script may have written it."""
REMOTE_TIMEOUT_S = 600.0
"""Maximum time of a copy to or from a remote file system."""

KILLED_SAVE_TIMEOUT_S = 10.0
"""Maximum wait for the outputs of a process that is killed."""

_SIZE = re.compile(r"(?P<number>\d+(\.\d+)?)\s*(?P<unit>[KMGT]?)(i?B)?", re.IGNORECASE)
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_IGNORED_FOLDERS = ("__pycache__", ".ipynb_checkpoints")
_MAX_NUMBER = 2**63
"""Exclusive maximum of times in nanoseconds and sizes in bytes."""

Stamp = tuple[int, int]
"""Modification time (ns) and size (bytes) of a file."""


def read_limit(text: str) -> int | None:
    """Parses a size such as `500M` or `1.5GiB` into bytes; None for `none`. Raises ValueError."""
    if text.strip().lower() == "none":
        return None
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ValueError("write a size such as 500M or 20G, or none")
    return int(float(match["number"]) * _UNITS[match["unit"].upper()])


@dataclass(frozen=True)
class OutputsRecord:
    """Which outputs of a run are saved.

    Attributes:
        owner, number: the writer: a job and its attempt, or a search and the run of the trial.
        kept: path -> stamp of the saved files; other files in `outputs/` belong to other owners.
        limit_bytes: maximum size of all saved files; None for no limit.
        left_behind: path -> why it was not saved.
        deleted: path -> stamp of files of the bundle that the script has removed.
    """

    owner: str
    number: int
    kept: dict[str, Stamp] = field(default_factory=dict)
    limit_bytes: int | None = None
    left_behind: dict[str, str] = field(default_factory=dict)
    deleted: dict[str, Stamp] = field(default_factory=dict)

    @property
    def size_bytes(self) -> int:
        return sum(size for _, size in self.kept.values())

    def dumps(self) -> str:
        return json.dumps(dataclasses.asdict(self)) + "\n"

    @classmethod
    def loads(cls, content: bytes) -> OutputsRecord:
        """Raises ValueError if it is something else."""
        try:
            values = plain_files.parse_json(content)
            return cls(
                owner=str(values["owner"]),
                number=int(values["number"]),
                kept=_stamps(values["kept"]),
                limit_bytes=None if values["limit_bytes"] is None else int(values["limit_bytes"]),
                left_behind={str(path): str(reason) for path, reason in values["left_behind"].items()},
                deleted=_stamps(values["deleted"]),
            )
        except (AttributeError, KeyError, OverflowError, TypeError) as error:
            raise ValueError(f"not a record of outputs: {error!r}") from error


def _stamps(values: Any) -> dict[str, Stamp]:
    found = {str(path): (int(time_ns), int(size)) for path, (time_ns, size) in values.items() if _is_inside(str(path))}
    if not all(-_MAX_NUMBER <= time_ns < _MAX_NUMBER and 0 <= size < _MAX_NUMBER for time_ns, size in found.values()):
        raise ValueError("a time or a size that no file has")
    return found


def _is_inside(path: str) -> bool:
    """Whether a relative path stays inside its folder."""
    return bool(path) and not path.startswith("/") and ".." not in path.split("/")


class _Store(Protocol):
    """The run's folder. Every method raises OSError on failure."""

    def read(self, name: str) -> bytes | None:
        """Returns the content of a file; None if there is none."""

    def write(self, name: str, text: str) -> None:
        """Writes a small file atomically."""

    def fetch(self, path: str, target: Path) -> None:
        """Copies an output file to a local path."""

    def put(self, source: Path, path: str, stamp: Stamp) -> bool:
        """Copies a local file to the outputs, atomically; not if it changes meanwhile. Returns whether it did."""

    def remove(self, path: str) -> None:
        """Removes an output file."""


@dataclass
class _State:
    """What is known between two saves.

    Attributes:
        bundle_files: path -> stamp of the files of the bundle; they are no outputs while unchanged.
        kept: path -> stamp of the saved files.
        left: path -> why it was not saved.
    """

    bundle_files: dict[str, Stamp] = field(default_factory=dict)
    kept: dict[str, Stamp] = field(default_factory=dict)
    left: dict[str, str] = field(default_factory=dict)

    def dumps(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def loads(cls, text: str) -> _State:
        values = json.loads(text)
        return cls(_stamps(values["bundle_files"]), _stamps(values["kept"]), values["left"])


@dataclass(frozen=True)
class _Task:
    """The outputs' owner, working folder and run folder."""

    workspace: Path
    folder: str
    owner: str
    number: int
    limit_bytes: int | None


class Outputs:
    """The output files of one process. `save_soon` is thread-safe; all else belongs to one thread.

    Args:
        workspace: the working folder of the process; holds the bundle.
        folder: the run's folder.
        owner, number: see `OutputsRecord`.
        environment: of the process; sets the maximum size.
        after_save: called after each save, on its thread.
    """

    def __init__(
        self,
        workspace: Path,
        folder: str,
        owner: str,
        number: int,
        environment: Mapping[str, str],
        after_save: Callable[[], None] | None = None,
    ) -> None:
        try:
            limit_bytes = read_limit(environment.get(LIMIT_VARIABLE, DEFAULT_LIMIT))
        except ValueError as error:
            logger.warning("%s: %s; the limit is %s", LIMIT_VARIABLE, error, DEFAULT_LIMIT)
            limit_bytes = read_limit(DEFAULT_LIMIT)
        self._task = _Task(workspace, folder, owner, number, limit_bytes)
        self._environment = dict(environment)
        self._after_save = after_save
        self._state = _State()
        self._lock = threading.Lock()
        self._saver_lock = threading.Lock()
        self._is_saving = self._is_save_requested = False

    @property
    def left_behind(self) -> bool:
        """Whether something that the script has written is in its working folder only."""
        return bool(self._state.left)

    def restore(self, bundle_files: Mapping[str, Stamp] | None = None) -> None:
        """Restores the files that earlier attempts or runs wrote, and removes those that they removed.

        Files of the bundle that are newer stay. `bundle_files` (`list_files`) defaults to all files in the workspace.
        """
        self._state = _State(dict(list_files(self._task.workspace) if bundle_files is None else bundle_files))
        self._run_action("restore")

    def assign_to(self, number: int, after_save: Callable[[], None] | None) -> None:
        """Assigns later output to the next attempt or run, which continues in the same working folder."""
        self._task = dataclasses.replace(self._task, number=number)
        self._after_save = after_save

    def save(self) -> None:
        """Saves what has changed since the last time."""
        self._run_action("save")
        if self._after_save is not None:
            self._after_save()

    def finish(self, *, is_killed: bool) -> None:
        """Saves after the end of the process, for at most `KILLED_SAVE_TIMEOUT_S` if it was killed."""
        saver = threading.Thread(target=self.save, name="outputs", daemon=True)
        saver.start()
        saver.join(KILLED_SAVE_TIMEOUT_S if is_killed else None)
        if saver.is_alive():
            logger.error("some outputs of %s are not saved: it was killed", self._task.owner)

    def save_soon(self) -> None:
        """Saves in a thread, after a checkpoint. During a save it requests one more."""
        with self._saver_lock:
            self._is_save_requested = True
            if self._is_saving:
                return
            self._is_saving = True
        threading.Thread(target=self._save_while_requested, name="outputs", daemon=True).start()

    def _save_while_requested(self) -> None:
        while True:
            with self._saver_lock:
                if not self._is_save_requested:
                    self._is_saving = False
                    return
                self._is_save_requested = False
            self.save()

    def _run_action(self, action: str) -> None:
        """Runs an action. Failures are logged, and recorded where possible: outputs matter less than the run."""
        with self._lock:
            try:
                if is_remote(self._task.folder):
                    self._state = remote_copier.run(action, self._task, self._state, self._environment)
                else:
                    _ACTIONS[action](self._task, self._state, _LocalStore(Path(self._task.folder), self._task.owner))
            except (OSError, ValueError) as error:
                logger.error("%s of outputs of %s failed: %s", action, self._task.owner, error)


def is_remote(folder: str) -> bool:
    """Whether only TensorFlow can access a folder."""
    return "://" in folder


def read_record(folder: str, limit_bytes: int = RECORD_LIMIT_BYTES) -> OutputsRecord | None:
    """Reads the record in a run's folder; None if there is none, it is larger, or the folder cannot be read here."""
    if is_remote(folder):
        return None
    try:
        run_folder = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:
        return None
    try:
        return _record_in(run_folder, limit_bytes)
    finally:
        os.close(run_folder)


def _record_in(run_folder: int, limit_bytes: int) -> OutputsRecord | None:
    """Reads the record in an open folder, without trust: a script may have put anything in its place."""
    try:
        return OutputsRecord.loads(plain_files.read_below(run_folder, RECORD, limit_bytes))
    except (OSError, ValueError):
        return None


def open_output(folder: str, path: str, owner: str, limit_bytes: int = RECORD_LIMIT_BYTES) -> BinaryIO:
    """Opens an output file in a run's local folder. Follows no links: the script may have made them.

    Raises:
        FileNotFoundError: if there is no such file, or the outputs have another owner.
    """
    here = -1
    try:
        here = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        record = _record_in(here, limit_bytes)
        if record is None or record.owner != owner or path not in record.kept:
            raise FileNotFoundError(path)
        *folders, name = [FOLDER, *path.split("/")]
        for part in folders:
            above = here
            here = os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=above)
            os.close(above)
        return plain_files.open_plain(name, here)
    except (OSError, ValueError) as error:
        raise FileNotFoundError(path) from error
    finally:
        if here >= 0:
            os.close(here)


def list_files(folder: Path) -> Iterator[tuple[str, Stamp]]:
    """Yields the regular files below a folder, sorted by path; none if there is no such folder."""
    for parent, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if name not in _IGNORED_FOLDERS)
        for name in sorted(names):
            path = Path(parent, name)
            with contextlib.suppress(OSError):  # deleted meanwhile
                found = path.lstat()
                if stat.S_ISREG(found.st_mode) and not name.endswith(".pyc"):
                    yield path.relative_to(folder).as_posix(), (found.st_mtime_ns, found.st_size)


def printable(path: str) -> str:
    """Escapes a file's name, which may be any bytes, for terminals and JSON."""
    return path.encode("utf-8", "backslashreplace").decode()


def restore_into(workspace: Path, folder: str) -> None:
    """Restores a run's local outputs into a copy of the bundle; raises OSError."""
    record = read_record(folder)
    if record is not None:
        task = _Task(workspace, folder, record.owner, record.number, None)
        _restore(task, _State(dict(list_files(workspace))), _LocalStore(Path(folder), record.owner))


def _restore(task: _Task, state: _State, store: _Store) -> None:
    state.kept, state.left = {}, {}
    record = _load_record(store)
    if record is None:
        return
    for path, stamp in record.deleted.items():
        try:
            if _is_unchanged(task.workspace / path, stamp):
                (task.workspace / path).unlink()
        except FileNotFoundError:
            continue  # not in the bundle any more
        except OSError as error:
            state.left[path] = f"could not be removed again: {error.strerror or error}"
    for path, stamp in sorted(record.kept.items()):
        target = task.workspace / path
        bundled = state.bundle_files.get(path)
        if bundled is not None and bundled[0] > stamp[0]:
            continue
        if path in record.left_behind and _is_newer(target, stamp):
            # The same working folder still has the newer version, which could not be saved.
            state.kept[path] = stamp
            continue
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            partial = target.with_name(f".{target.name}.dike")
            store.fetch(path, partial)
            os.utime(partial, ns=(stamp[0], stamp[0]))
            partial.replace(target)
        except FileNotFoundError:
            continue  # the saved file was deleted
        except OSError as error:
            state.left[path] = f"could not be restored: {error.strerror or error}"
            continue
        state.kept[path] = (stamp[0], target.stat().st_size)


def _save(task: _Task, state: _State, store: _Store) -> None:
    record = _load_record(store)
    if not _may_write(task, record, store):
        logger.warning("the outputs are not saved: %s belongs to a later run or another job now", task.folder)
        return
    found = {
        path: stamp
        for path, stamp in list_files(task.workspace)
        if path in state.kept or state.bundle_files.get(path) != stamp
    }
    deleted = {path: stamp for path, stamp in state.bundle_files.items() if not os.path.lexists(task.workspace / path)}
    if not task.workspace.is_dir():
        # Hardly done by the script, which would lose its own files. Do not delete the saved ones.
        logger.warning("the outputs are not saved: the working folder %s was deleted", task.workspace)
        return
    for path in state.kept.keys() - found.keys():
        store.remove(path)
        del state.kept[path]
    state.left = {}
    total = sum(size for _, size in state.kept.values())
    # Small files first: one large file must not exclude all others.
    for path, stamp in sorted(found.items(), key=lambda item: (item[1][1], item[0])):
        before = state.kept.get(path)
        if before == stamp:
            continue
        grown = total - (before[1] if before else 0) + stamp[1]
        older = "" if before is None else "; an older version is kept"
        if task.limit_bytes is not None and grown > task.limit_bytes:
            state.left[path] = f"{stamp[1]} bytes, over the limit{older}"
            continue
        try:
            if store.put(task.workspace / path, path, stamp):
                state.kept[path] = stamp
                total = grown
        except FileNotFoundError:
            continue  # deleted meanwhile
        except OSError as error:
            state.left[path] = f"{error.strerror or error}{older}"
    # Files of other owners, or saved before a newer version came with the bundle, are not in this record.
    summary = OutputsRecord(task.owner, task.number, dict(state.kept), task.limit_bytes, dict(state.left), deleted)
    if summary != record:
        store.write(RECORD, summary.dumps())


_ACTIONS = {"restore": _restore, "save": _save}


def _may_write(task: _Task, record: OutputsRecord | None, store: _Store) -> bool:
    """Whether a process may still write to its run's folder, which a later attempt or run, or another job, may own."""
    if record is not None and record.owner == task.owner and record.number > task.number:
        return False
    content = store.read(OWNER_FILE)
    try:
        claim = plain_files.parse_json(content) if content is not None else {}
        claimant = (str(claim["job"]), int(claim["attempt"]))
    except (KeyError, OverflowError, TypeError, ValueError):
        return True  # a trial's folder has no claim, or the claim is damaged
    return claimant == (task.owner, task.number) or (claimant[0] == task.owner and claimant[1] < task.number)


def _load_record(store: _Store) -> OutputsRecord | None:
    content = store.read(RECORD)
    try:
        return None if content is None else OutputsRecord.loads(content)
    except ValueError as error:
        logger.warning("ignoring %s: %s", RECORD, error)
        return None


class _LocalStore:
    """A run's folder in the local file system, including mounts."""

    def __init__(self, folder: Path, owner: str) -> None:
        self._folder = folder
        self._outputs = folder / FOLDER
        self._prefix = f".dike-outputs-{owner}-"

    def read(self, name: str) -> bytes | None:
        try:
            with plain_files.open_plain(str(self._folder / name)) as file:
                return plain_files.read(file, name, RECORD_LIMIT_BYTES)
        except (FileNotFoundError, NotADirectoryError, plain_files.NotPlainError):
            return None

    def write(self, name: str, text: str) -> None:
        make_private(str(self._folder))
        with self._temporary() as temporary:
            temporary.write_text(text, encoding="utf-8")
            temporary.replace(self._folder / name)

    def fetch(self, path: str, target: Path) -> None:
        shutil.copyfile(self._outputs / path, target)

    def put(self, source: Path, path: str, stamp: Stamp) -> bool:
        target = self._outputs / path
        target.parent.mkdir(parents=True, exist_ok=True)
        # Outside `outputs/`: listings must not show partial files.
        with self._temporary() as temporary:
            shutil.copyfile(source, temporary)
            if not _is_unchanged(source, stamp):
                return False
            shutil.copymode(source, temporary)
            os.utime(temporary, ns=(stamp[0], stamp[0]))
            temporary.replace(target)
        return True

    def remove(self, path: str) -> None:
        target = self._outputs / path
        target.unlink(missing_ok=True)
        for parent in target.relative_to(self._outputs).parents:
            with contextlib.suppress(OSError):  # not empty
                if parent != Path():
                    (self._outputs / parent).rmdir()

    @contextlib.contextmanager
    def _temporary(self) -> Iterator[Path]:
        """Yields the name of a file that is about to be renamed; removes those that killed processes have left."""
        for left in self._folder.glob(f"{glob.escape(self._prefix)}*"):
            left.unlink(missing_ok=True)
        path = self._folder / f"{self._prefix}{secrets.token_hex(8)}"
        try:
            yield path
        finally:
            path.unlink(missing_ok=True)


def _is_newer(file: Path, stamp: Stamp) -> bool:
    try:
        return file.lstat().st_mtime_ns > stamp[0]
    except OSError:
        return False  # it is not there


def _is_unchanged(source: Path, stamp: Stamp) -> bool:
    found = source.stat()
    return (found.st_mtime_ns, found.st_size) == stamp


class _RemoteStore:
    def __init__(self, folder: str) -> None:
        import tensorflow as tf

        self._gfile = tf.io.gfile
        self._failure = tf.errors.OpError
        self._folder = folder.rstrip("/")
        self._outputs = f"{self._folder}/{FOLDER}"

    def read(self, name: str) -> bytes | None:
        path = f"{self._folder}/{name}"
        with self._os_errors():
            if not self._gfile.exists(path):
                return None
            with self._gfile.GFile(path, "rb") as file:
                return bytes(file.read()) if file.size() <= RECORD_LIMIT_BYTES else None

    def write(self, name: str, text: str) -> None:
        with self._os_errors():
            self._gfile.makedirs(self._folder)
            with self._gfile.GFile(f"{self._folder}/{name}", "w") as file:
                file.write(text)

    def fetch(self, path: str, target: Path) -> None:
        with self._os_errors():
            if not self._gfile.exists(f"{self._outputs}/{path}"):
                raise FileNotFoundError(path)
            self._gfile.copy(f"{self._outputs}/{path}", str(target), overwrite=True)

    def put(self, source: Path, path: str, stamp: Stamp) -> bool:
        """Copies a snapshot of the file: the script may continue to write."""
        target = f"{self._outputs}/{path}"
        with tempfile.TemporaryDirectory() as folder:
            copy = shutil.copyfile(source, Path(folder, "copy"))
            if not _is_unchanged(source, stamp):
                return False
            with self._os_errors():
                self._gfile.makedirs(target.rpartition("/")[0])
                self._gfile.copy(str(copy), target, overwrite=True)
        return True

    def remove(self, path: str) -> None:
        with self._os_errors():
            if self._gfile.exists(f"{self._outputs}/{path}"):
                self._gfile.remove(f"{self._outputs}/{path}")

    @contextlib.contextmanager
    def _os_errors(self) -> Iterator[None]:
        try:
            yield
        except self._failure as error:
            raise OSError(error.message) from error


class RemoteCopier:
    """A subprocess that accesses remote folders, so that TensorFlow is imported there, and once. Thread-safe.

    It starts on first use, and ends with this process.

    Attributes:
        start_lock: locked while the subprocess starts; `pid` is reliable while the caller has it locked.
    """

    def __init__(self) -> None:
        self.start_lock = threading.Lock()
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def run(self, action: str, task: _Task, state: _State, environment: Mapping[str, str]) -> _State:
        """Runs one of `_ACTIONS` in the subprocess; returns the new state.

        `environment` may configure access to the folder.

        Raises:
            OSError: if it fails or times out.
        """
        values = {**dataclasses.asdict(task), "workspace": str(task.workspace), "state": state.dumps()}
        with self._lock:
            process = self._ensure_started(environment)
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(json.dumps({"action": action, **values}) + "\n")
            process.stdin.flush()
            poll = select.poll()  # `select` takes no file descriptors above 1023
            poll.register(process.stdout, select.POLLIN)
            is_answered = bool(poll.poll(1000 * REMOTE_TIMEOUT_S))
            answer = process.stdout.readline() if is_answered else ""
            if not answer:
                process.kill()
                raise OSError("the copying process ended" if is_answered else f"no answer in {REMOTE_TIMEOUT_S} s")
        found = json.loads(answer)
        if "error" in found:
            raise OSError(found["error"])
        return _State.loads(found["state"])

    def close(self) -> None:
        with self._lock:
            if self._process is not None:
                self._process.kill()
                self._process.wait()

    def _ensure_started(self, environment: Mapping[str, str]) -> subprocess.Popen[str]:
        if self._process is None or self._process.poll() is not None:
            with self.start_lock:
                self._process = subprocess.Popen(
                    [sys.executable, "-P", "-m", "executor.outputs"],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    text=True,
                    env={**os.environ, **environment, "CUDA_VISIBLE_DEVICES": "-1"},
                )
        return self._process


remote_copier = RemoteCopier()


def main() -> None:
    """Entry point of the subprocess: reads one task per line from standard input, and answers each in a line."""
    answers = os.fdopen(os.dup(1), "w")
    # Libraries' own output must not mix with the answers.
    os.dup2(2, 1)
    import tensorflow  # noqa: F401 - before the first copy is waited for

    for line in sys.stdin:
        values: dict[str, Any] = json.loads(line)
        action, state = values.pop("action"), _State.loads(values.pop("state"))
        task = _Task(**{**values, "workspace": Path(values["workspace"])})
        try:
            _ACTIONS[action](task, state, _RemoteStore(task.folder))
            answer = {"state": state.dumps()}
        except (OSError, ValueError) as error:
            answer = {"error": f"{task.folder}: {error}"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
