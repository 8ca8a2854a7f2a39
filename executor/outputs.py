"""What a script writes below its working folder comes back to its run's folder, and is there again after a restart.

The run's folder is a job's checkpoint folder, or a trial's: any path `tf.io.gfile` understands, reached by every agent.
It gets a folder `outputs/`, and a record of who writes there and of what was left behind.
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
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from dike import plain_files
from dike.checkpoints import OWNER_FILE, make_private

logger = logging.getLogger(__name__)

OUTPUT_DIR_VARIABLE = "DIKE_OUTPUT_DIR"
"""Names a script's working folder to the script: what it writes there is brought back."""
LIMIT_VARIABLE = "DIKE_OUTPUTS_LIMIT"
"""How much is brought back, as `read_limit` reads it."""
DEFAULT_LIMIT = "1G"
FOLDER = "outputs"
RECORD = "dike-outputs.json"
"""File beside that folder: an `OutputsRecord`."""
RECORD_LIMIT_BYTES = 64 * 2**20
"""Of a larger one nothing is read: a script may have written it."""
REMOTE_TIMEOUT_S = 600.0
"""How long a copy to or from a remote file system may take."""

KILLED_SAVE_S = 10.0
"""How long the outputs of something that is killed are waited for."""

_SIZE = re.compile(r"(?P<number>\d+(\.\d+)?)\s*(?P<unit>[KMGT]?)(i?B)?", re.IGNORECASE)
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_NOT_OUTPUTS = ("__pycache__", ".ipynb_checkpoints")
_MAX_NUMBER = 2**63
"""Below it are times in nanoseconds and sizes in bytes."""

Stamp = tuple[int, int]
"""Time of a file's last change (ns) and its size (bytes)."""


def read_limit(text: str) -> int | None:
    """Reads a size such as `500M` or `1.5GiB`, in bytes; None for `none`.

    Raises:
        ValueError: if it is something else.
    """
    if text.strip().lower() == "none":
        return None
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ValueError("write a size such as 500M or 20G, or none")
    return int(float(match["number"]) * _UNITS[match["unit"].upper()])


@dataclass(frozen=True)
class OutputsRecord:
    """What is known of a run's outputs.

    Attributes:
        owner, number: who writes them: a job and its attempt, or a search and the run of the trial.
        kept: path -> stamp of the files in `outputs/` that were brought back; others there are somebody else's.
        limit_bytes: how much is brought back at most; None for all.
        left_behind: path -> why it was not brought back.
        deleted: path -> stamp of what has travelled with the script, and the script has removed.
    """

    owner: str
    number: int
    kept: dict[str, Stamp] = field(default_factory=dict)
    limit_bytes: int | None = None
    left_behind: dict[str, str] = field(default_factory=dict)
    deleted: dict[str, Stamp] = field(default_factory=dict)

    @property
    def size_bytes(self) -> int:
        """The size of all that was brought back."""
        return sum(size for _, size in self.kept.values())

    def dumps(self) -> str:
        """The record as JSON text."""
        return json.dumps(dataclasses.asdict(self)) + "\n"

    @classmethod
    def loads(cls, content: bytes) -> OutputsRecord:
        """Reads what `dumps` wrote.

        Raises:
            ValueError: if it is something else.
        """
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
    """Whether a path stays in the folder that it is to be in."""
    return bool(path) and not path.startswith("/") and ".." not in path.split("/")


class _Store(Protocol):
    """The run's folder; every method raises OSError if it cannot."""

    def read(self, name: str) -> bytes | None:
        """The content of a file; None if there is none."""

    def write(self, name: str, text: str) -> None:
        """Writes a small file at once."""

    def fetch(self, path: str, target: Path) -> None:
        """Copies one of the outputs to a local path."""

    def put(self, source: Path, path: str, stamp: Stamp) -> bool:
        """Copies a local file there; another of that name is replaced at once, unless this one has changed meanwhile.

        Returns whether it was copied as it was.
        """

    def remove(self, path: str) -> None:
        """Removes one of them."""


@dataclass
class _State:
    """What has to be known from one look to the next.

    Attributes:
        given: path -> stamp of what has travelled with the script: no outputs as long as it is as it was.
        kept: path -> stamp of what was brought back.
        left: path -> why it was not.
    """

    given: dict[str, Stamp] = field(default_factory=dict)
    kept: dict[str, Stamp] = field(default_factory=dict)
    left: dict[str, str] = field(default_factory=dict)

    def dumps(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def loads(cls, text: str) -> _State:
        values = json.loads(text)
        return cls(_stamps(values["given"]), _stamps(values["kept"]), values["left"])


@dataclass(frozen=True)
class _Task:
    """Whose outputs, where they arise and where they go."""

    workspace: Path
    folder: str
    owner: str
    number: int
    limit_bytes: int | None


class Outputs:
    """The outputs of one process of a script. `save_soon` may be called on any thread, the rest on one.

    Args:
        workspace: the working folder of the process; it holds what travelled with the script.
        folder: the run's folder.
        owner, number: see `OutputsRecord`.
        environment: the process' own; says how much is brought back.
    """

    def __init__(self, workspace: Path, folder: str, owner: str, number: int, environment: Mapping[str, str]) -> None:
        try:
            limit_bytes = read_limit(environment.get(LIMIT_VARIABLE, DEFAULT_LIMIT))
        except ValueError as error:
            logger.warning("%s: %s; it is %s", LIMIT_VARIABLE, error, DEFAULT_LIMIT)
            limit_bytes = read_limit(DEFAULT_LIMIT)
        self._task = _Task(workspace, folder, owner, number, limit_bytes)
        self._environment = dict(environment)
        self._state = _State()
        self._lock = threading.Lock()
        self._saver_lock = threading.Lock()
        self._is_saving = self._is_asked = False

    @property
    def left_behind(self) -> bool:
        """Whether something the script has written is in its working folder only."""
        return bool(self._state.left)

    def restore(self, given: Mapping[str, Stamp] | None = None) -> None:
        """Puts what earlier attempts or runs wrote into the workspace, and removes what they removed.

        A file that travelled with the script and is newer stays.

        Args:
            given: what has travelled with the script (`local_files`); None: all that is in the workspace.
        """
        self._state = _State(dict(local_files(self._task.workspace) if given is None else given))
        self._do("restore")

    def belongs_to(self, number: int) -> None:
        """What is written from now on is of another attempt or run, which goes on in the same working folder."""
        self._task = dataclasses.replace(self._task, number=number)

    def save(self) -> None:
        """Brings back what has changed since the last time."""
        self._do("save")

    def finish(self, *, is_killed: bool) -> None:
        """As `save`, after the end of the process.

        Args:
            is_killed: whether somebody waits for the end; then it may be left unfinished.
        """
        saver = threading.Thread(target=self.save, name="outputs", daemon=True)
        saver.start()
        saver.join(KILLED_SAVE_S if is_killed else None)
        if saver.is_alive():
            logger.error("the outputs of %s were not all saved before its end", self._task.owner)

    def save_soon(self) -> None:
        """As `save`, in a thread of its own: a checkpoint was written. While one is at work: once more after it."""
        with self._saver_lock:
            self._is_asked = True
            if self._is_saving:
                return
            self._is_saving = True
        threading.Thread(target=self._save_while_asked, name="outputs", daemon=True).start()

    def _save_while_asked(self) -> None:
        while True:
            with self._saver_lock:
                if not self._is_asked:
                    self._is_saving = False
                    return
                self._is_asked = False
            self.save()

    def _do(self, action: str) -> None:
        """Outputs are worth less than the run: what goes wrong with them is logged, and recorded where that can be."""
        with self._lock:
            try:
                if is_remote(self._task.folder):
                    self._state = remote_copier.do(action, self._task, self._state, self._environment)
                else:
                    _ACTIONS[action](self._task, self._state, _LocalStore(Path(self._task.folder), self._task.owner))
            except (OSError, ValueError) as error:
                logger.error("%s of outputs of %s failed: %s", action, self._task.owner, error)


def is_remote(folder: str) -> bool:
    """Whether only TensorFlow can reach a folder."""
    return "://" in folder


def read_record(folder: str, limit_bytes: int = RECORD_LIMIT_BYTES) -> OutputsRecord | None:
    """What is known of the outputs in a run's folder; None if nothing is, or the folder cannot be read here.

    Args:
        folder: the run's folder.
        limit_bytes: how large the record may be.
    """
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
    """The same, of an open folder. Whoever runs scripts there may have put anything in the record's place."""
    try:
        return OutputsRecord.loads(plain_files.read_below(run_folder, RECORD, limit_bytes))
    except (OSError, ValueError):
        return None


def open_output(folder: str, path: str, owner: str, limit_bytes: int = RECORD_LIMIT_BYTES) -> BinaryIO:
    """Opens one of the outputs in a run's local folder. No link on the way is followed: the script may have made it.

    Args:
        folder: the run's folder.
        path: as the record has it.
        owner: whose outputs they have to be.
        limit_bytes: how large the record may be.

    Raises:
        FileNotFoundError: if there is no such file.
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


def local_files(folder: Path) -> Iterator[tuple[str, Stamp]]:
    """Plain files below a folder, links left out, in the order of their paths; none if there is no such folder."""
    for parent, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if name not in _NOT_OUTPUTS)
        for name in sorted(names):
            path = Path(parent, name)
            with contextlib.suppress(OSError):  # gone meanwhile
                found = path.lstat()
                if stat.S_ISREG(found.st_mode) and not name.endswith(".pyc"):
                    yield path.relative_to(folder).as_posix(), (found.st_mtime_ns, found.st_size)


def shown(path: str) -> str:
    """A file's name as any terminal takes it, and JSON: names may be any bytes."""
    return path.encode("utf-8", "backslashreplace").decode()


def restore_into(workspace: Path, folder: str) -> None:
    """Brings a copy of what travels to where an earlier run left it, by what was brought back to its local folder.

    Raises:
        OSError: if a file cannot be copied, or removed.
    """
    record = read_record(folder)
    if record is not None:
        task = _Task(workspace, folder, record.owner, record.number, None)
        _restore(task, _State(dict(local_files(workspace))), _LocalStore(Path(folder), record.owner))


def _restore(task: _Task, state: _State, store: _Store) -> None:
    state.kept, state.left = {}, {}
    record = _record(store)
    if record is None:
        return
    for path, stamp in record.deleted.items():
        try:
            if _is_still(task.workspace / path, stamp):
                (task.workspace / path).unlink()
        except FileNotFoundError:
            continue  # it does not travel any more
        except OSError as error:
            state.left[path] = f"could not be removed again: {error.strerror or error}"
    for path, stamp in sorted(record.kept.items()):
        target = task.workspace / path
        there = state.given.get(path)
        if there is not None and there[0] > stamp[0]:
            continue
        if path in record.left_behind and _is_newer(target, stamp):
            # The same working folder: what could not be brought back is in it still, and the older version there.
            state.kept[path] = stamp
            continue
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            partial = target.with_name(f".{target.name}.dike")
            store.fetch(path, partial)
            os.utime(partial, ns=(stamp[0], stamp[0]))
            partial.replace(target)
        except FileNotFoundError:
            continue  # somebody has removed it
        except OSError as error:
            state.left[path] = f"could not be restored: {error.strerror or error}"
            continue
        state.kept[path] = (stamp[0], target.stat().st_size)


def _save(task: _Task, state: _State, store: _Store) -> None:
    record = _record(store)
    if not _may_write(task, record, store):
        logger.warning("the outputs in %s belong to somebody else now", task.folder)
        return
    found = {
        path: stamp
        for path, stamp in local_files(task.workspace)
        if path in state.kept or state.given.get(path) != stamp
    }
    deleted = {path: stamp for path, stamp in state.given.items() if not os.path.lexists(task.workspace / path)}
    if not task.workspace.is_dir():
        # Not the script's doing: it would be without its own files from then on.
        logger.warning("the working folder %s is gone; nothing of it is brought back", task.workspace)
        return
    for path in state.kept.keys() - found.keys():
        store.remove(path)
        del state.kept[path]
    state.left = {}
    total = sum(size for _, size in state.kept.values())
    # The small ones first: one file that is too large must not keep out all the others.
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
            continue  # the script has removed it meanwhile
        except OSError as error:
            state.left[path] = f"{error.strerror or error}{older}"
    # What others have in there, or had before a newer file travelled, stays theirs.
    summary = OutputsRecord(task.owner, task.number, dict(state.kept), task.limit_bytes, dict(state.left), deleted)
    if summary != record:
        store.write(RECORD, summary.dumps())


_ACTIONS = {"restore": _restore, "save": _save}


def _may_write(task: _Task, record: OutputsRecord | None, store: _Store) -> bool:
    """Whether a process may write to its run's folder: a later attempt or run, or another job's chief, ends that."""
    if record is not None and record.owner == task.owner and record.number > task.number:
        return False
    content = store.read(OWNER_FILE)
    try:
        claim = plain_files.parse_json(content) if content is not None else {}
        holder = (str(claim["job"]), int(claim["attempt"]))
    except (KeyError, OverflowError, TypeError, ValueError):
        return True  # nobody has claimed it: a trial's, or the claim is damaged
    return holder == (task.owner, task.number) or (holder[0] == task.owner and holder[1] < task.number)


def _record(store: _Store) -> OutputsRecord | None:
    content = store.read(RECORD)
    try:
        return None if content is None else OutputsRecord.loads(content)
    except ValueError as error:
        logger.warning("%s is ignored: %s", RECORD, error)
        return None


class _LocalStore:
    """A run's folder that is on this machine, or looks so."""

    def __init__(self, folder: Path, owner: str) -> None:
        self._folder = folder
        self._outputs = folder / FOLDER
        self._prefix = f".dike-outputs-{owner}-"

    def read(self, name: str) -> bytes | None:
        """See `_Store`."""
        try:
            with plain_files.open_plain(str(self._folder / name)) as file:
                return plain_files.read(file, name, RECORD_LIMIT_BYTES)
        except (FileNotFoundError, NotADirectoryError, plain_files.NotPlainError):
            return None

    def write(self, name: str, text: str) -> None:
        """See `_Store`."""
        make_private(str(self._folder))
        with self._temporary() as temporary:
            temporary.write_text(text, encoding="utf-8")
            temporary.replace(self._folder / name)

    def fetch(self, path: str, target: Path) -> None:
        """See `_Store`."""
        shutil.copyfile(self._outputs / path, target)

    def put(self, source: Path, path: str, stamp: Stamp) -> bool:
        """See `_Store`."""
        target = self._outputs / path
        target.parent.mkdir(parents=True, exist_ok=True)
        # Not in that folder: whoever lists the outputs must not see halves of them.
        with self._temporary() as temporary:
            shutil.copyfile(source, temporary)
            if not _is_still(source, stamp):
                return False
            shutil.copymode(source, temporary)
            os.utime(temporary, ns=(stamp[0], stamp[0]))
            temporary.replace(target)
        return True

    def remove(self, path: str) -> None:
        """See `_Store`."""
        target = self._outputs / path
        target.unlink(missing_ok=True)
        for parent in target.relative_to(self._outputs).parents:
            with contextlib.suppress(OSError):  # it holds others
                if parent != Path():
                    (self._outputs / parent).rmdir()

    @contextlib.contextmanager
    def _temporary(self) -> Iterator[Path]:
        """A name for a file that is about to be renamed; what a process that was killed has left of such is removed."""
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


def _is_still(source: Path, stamp: Stamp) -> bool:
    found = source.stat()
    return (found.st_mtime_ns, found.st_size) == stamp


class _RemoteStore:
    """A run's folder that TensorFlow reaches."""

    def __init__(self, folder: str) -> None:
        import tensorflow as tf

        self._gfile = tf.io.gfile
        self._failure = tf.errors.OpError
        self._folder = folder.rstrip("/")
        self._outputs = f"{self._folder}/{FOLDER}"

    def read(self, name: str) -> bytes | None:
        """See `_Store`."""
        path = f"{self._folder}/{name}"
        with self._os_errors():
            if not self._gfile.exists(path):
                return None
            with self._gfile.GFile(path, "rb") as file:
                return bytes(file.read()) if file.size() <= RECORD_LIMIT_BYTES else None

    def write(self, name: str, text: str) -> None:
        """See `_Store`."""
        with self._os_errors():
            self._gfile.makedirs(self._folder)
            with self._gfile.GFile(f"{self._folder}/{name}", "w") as file:
                file.write(text)

    def fetch(self, path: str, target: Path) -> None:
        """See `_Store`."""
        with self._os_errors():
            if not self._gfile.exists(f"{self._outputs}/{path}"):
                raise FileNotFoundError(path)
            self._gfile.copy(f"{self._outputs}/{path}", str(target), overwrite=True)

    def put(self, source: Path, path: str, stamp: Stamp) -> bool:
        """See `_Store`. What is copied is a copy: the script may go on writing."""
        target = f"{self._outputs}/{path}"
        with tempfile.TemporaryDirectory() as folder:
            copy = shutil.copyfile(source, Path(folder, "copy"))
            if not _is_still(source, stamp):
                return False
            with self._os_errors():
                self._gfile.makedirs(target.rpartition("/")[0])
                self._gfile.copy(str(copy), target, overwrite=True)
        return True

    def remove(self, path: str) -> None:
        """See `_Store`."""
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
    """A process that reaches remote folders in our place: it imports TensorFlow once. Safe from any thread.

    It is started when it is first needed, and ends with us.

    Attributes:
        starting: held while the process is started; whoever holds it can trust `pid`.
    """

    def __init__(self) -> None:
        self.starting = threading.Lock()
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def do(self, action: str, task: _Task, state: _State, environment: Mapping[str, str]) -> _State:
        """Does so; returns the new state.

        Args:
            action: one of `_ACTIONS`.
            task: whose outputs.
            state: what was known of them before.
            environment: the script's own variables, which say how to reach the folder.

        Raises:
            OSError: if it fails, or takes too long.
        """
        values = {**dataclasses.asdict(task), "workspace": str(task.workspace), "state": state.dumps()}
        with self._lock:
            process = self._started(environment)
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
                raise OSError("the process that copies ended" if is_answered else f"no answer in {REMOTE_TIMEOUT_S} s")
        found = json.loads(answer)
        if "error" in found:
            raise OSError(found["error"])
        return _State.loads(found["state"])

    def close(self) -> None:
        """Ends the process."""
        with self._lock:
            if self._process is not None:
                self._process.kill()
                self._process.wait()

    def _started(self, environment: Mapping[str, str]) -> subprocess.Popen[str]:
        if self._process is None or self._process.poll() is not None:
            with self.starting:
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
"""That of this process."""


def main() -> None:
    """The process that copies: reads a task a line from standard input, and answers each in a line."""
    answers = os.fdopen(os.dup(1), "w")
    # What libraries print must not stand between the answers.
    os.dup2(2, 1)
    import tensorflow  # noqa: F401 - not while somebody waits for a copy

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
