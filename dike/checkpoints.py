"""Which model a checkpoint folder belongs to, and which checkpoints in it are whole.

Needs no TensorFlow where the folder is a local one, `newest_whole` excepted.
"""

from __future__ import annotations

import contextlib
import errno
import glob
import hashlib
import json
import os
import re
import sys
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, BinaryIO

from dike import plain_files
from dike.exceptions import BadInputError
from dike.profile import ModelProfile, VariableSpec
from dike.task import TaskSpec

MARKER = "dike-model.json"
"""File in a checkpoint folder that holds the fingerprint of its model."""

CLAIM = "dike-claim.json"
"""File in a checkpoint folder that says which attempt of which job may write there."""

JOB = "dike-job.json"
"""File in a checkpoint folder that says at which step the last job began that trained there."""

JOB_CHECKPOINTS = ("fit-*/*.index", "model.ckpt-*.index")
"""What such a job's checkpoints are named like, in its folder."""

SUMS = "dike-sums.json"
"""File in a checkpoint folder that notes size and CRC-32 of the files of each of the job's checkpoints."""
_READ_BYTES = 1 << 20
_SMALL_BYTES = 1 << 24
"""More than any of these files has; scripts can write them."""
_FULL = re.compile(r"no space left|quota", re.IGNORECASE)
ROOM_TIMEOUT_S = 600.0
ROOM_POLL_S = 5.0
"""How long something is waited for on a full disk, and how often it is tried."""


def fingerprint(profile: ModelProfile) -> str:
    """Depends on names, shapes and types of the model's variables, and on nothing else."""
    return fingerprint_of(profile.variables)


def fingerprint_of(variables: Iterable[VariableSpec]) -> str:
    """The fingerprint of a model that has these variables."""
    described = sorted((variable.name, list(variable.shape), variable.dtype) for variable in variables)
    return hashlib.sha256(json.dumps(described).encode()).hexdigest()


def check_folder(path: str, profile: ModelProfile) -> None:
    """Refuses a local checkpoint folder that another model has written to; the chief looks at those elsewhere.

    Raises:
        BadInputError: if the folder's marker names another model, or `path` is no folder.
    """
    if not _is_remote(path):
        check_fingerprint(path, fingerprint(profile))


def check_fingerprint(path: str, expected: str) -> None:
    """As `check_folder`, for a fingerprint that is already known.

    Raises:
        BadInputError: if the folder's marker names another model, or `path` is no folder.
    """
    if not _is_remote(path) and os.path.exists(path) and not os.path.isdir(path):
        raise BadInputError(f"Checkpoint folder '{path}' is a file; name a folder with --checkpoint-dir.")
    text = _read(_file_path(path, MARKER))
    if text is None:
        return
    try:
        found = json.loads(text)["fingerprint"]
    except (KeyError, RecursionError, TypeError, ValueError) as error:
        raise BadInputError(
            f"Checkpoint folder '{path}' has a damaged {MARKER}; name another folder with --checkpoint-dir."
        ) from error
    if found != expected:
        raise BadInputError(
            f"Checkpoint folder '{path}' holds checkpoints of another model; name another folder with --checkpoint-dir."
        )


def mark_folder(path: str, value: str) -> None:
    """Writes the fingerprint `value` into the folder, which is made if it does not exist."""
    wait_for_room(lambda: _write(path, MARKER, {"fingerprint": value}))


def check_model(task: TaskSpec) -> None:
    """Checks that a task's checkpoint folder may hold its model's checkpoints, then marks it.

    Raises:
        BadInputError: if another model's checkpoints are in the folder.
    """
    if task.fingerprint:
        check_fingerprint(task.checkpoint_dir, task.fingerprint)
        mark_folder(task.checkpoint_dir, task.fingerprint)


def claim_folder(task: TaskSpec) -> None:
    """Says that this attempt of the task's job writes to the folder from now on (see `dike.roles.fencing`)."""
    claim = {"job": task.job_id, "attempt": task.attempt}
    wait_for_room(lambda: _write(task.checkpoint_dir, CLAIM, claim))


def holder(task: TaskSpec) -> tuple[str, int] | None:
    """Job and attempt that have claimed a task's checkpoint folder last; None if nobody has."""
    text = _read(_file_path(task.checkpoint_dir, CLAIM))
    try:
        claim = json.loads(text) if text is not None else {}
        return str(claim["job"]), int(claim["attempt"])
    except (KeyError, OverflowError, RecursionError, TypeError, ValueError):
        return None  # damaged: as if nobody had


def first_step(task: TaskSpec, step: int) -> int:
    """The step at which the job began to train, in whichever attempt: noted in its folder by the first chief that asks.

    Args:
        task: the process' task.
        step: where the training is now.
    """
    if task.attempt:
        text = _read(_file_path(task.checkpoint_dir, JOB))
        try:
            noted = json.loads(text) if text is not None else {}
            if noted.get("job") == task.job_id:
                return int(noted["step"])
        except (AttributeError, KeyError, OverflowError, RecursionError, TypeError, ValueError):
            pass  # damaged: as if the job began here
    if task.is_chief:
        wait_for_room(lambda: _write(task.checkpoint_dir, JOB, {"job": task.job_id, "step": step}))
    return step


def written(write: Callable[[], object], *, is_last: bool) -> bool:
    """Writes a checkpoint, whether it was written: the last one waits for room, after the others comes another one."""
    if not is_last:
        return unless_full(write)
    wait_for_room(write)
    return True


def unless_full(write: Callable[[], object]) -> bool:
    """Writes a checkpoint, if the disk has room for it, and says so where it has none; whether it was written."""
    try:
        write()
    except Exception as error:
        if not _is_full(error):
            raise
        _say_full(error, "the training goes on, and saves when the next one is due")
        return False
    return True


def wait_for_room(write: Callable[[], object]) -> None:
    """Writes what nothing can go on without; waits for room on a full disk, for ten minutes at most.

    Raises:
        OSError, tf.errors.ResourceExhaustedError: there was none.
    """
    deadline, told = time.monotonic() + ROOM_TIMEOUT_S, False
    while True:
        try:
            write()
            return
        except Exception as error:
            if not _is_full(error) or time.monotonic() > deadline:
                raise
            if not told:
                _say_full(error, f"waiting {ROOM_TIMEOUT_S:g} s for some")
            told = True
        time.sleep(ROOM_POLL_S)


def _say_full(error: Exception, then: str) -> None:
    print(f"dike: no room for a checkpoint ({_first_line(error)}); {then}.", file=sys.stderr, flush=True)


def _is_full(error: Exception) -> bool:
    if isinstance(error, OSError):
        return error.errno in (errno.ENOSPC, errno.EDQUOT)
    if "tensorflow" not in sys.modules:
        return False
    import tensorflow as tf

    # The same error stands for the memory of a GPU.
    return isinstance(error, tf.errors.ResourceExhaustedError) and bool(_FULL.search(str(error)))


def _first_line(error: Exception) -> str:
    return (getattr(error, "strerror", None) or str(error)).partition("\n")[0]


def unseal(path: str) -> None:
    """Forgets what is noted of a checkpoint that is about to be written anew under the same name."""
    folder, name = os.path.split(path)
    if not _is_remote(path) and (sums := _sums(folder)):
        kept = {file: noted for file, noted in sums.items() if not file.startswith(f"{name}.")}
        if kept != sums:
            _write(folder, SUMS, kept)


def seal(path: str) -> None:
    """Has a checkpoint that TensorFlow has written outlive the machine, and notes what its files hold.

    Args:
        path: its path, without `.index`. Where it is remote, the storage sees to that.
    """
    if _is_remote(path):
        return
    folder = os.path.dirname(path)
    sums = {name: noted for name, noted in _sums(folder).items() if os.path.exists(_file_path(folder, name))}
    sums |= {os.path.basename(file): file_sum(file, sync=True) for file in _files(path)}
    _write(folder, SUMS, sums)
    sync(folder)


def has_checkpoints(folder: str) -> bool:
    """Whether a job with parameter servers has written checkpoints to a folder, whole or damaged."""
    if not _is_remote(folder):
        return any(glob.glob(f"{glob.escape(folder.rstrip('/'))}/{pattern}") for pattern in JOB_CHECKPOINTS)
    import tensorflow as tf

    return any(tf.io.gfile.glob(_file_path(folder, pattern)) for pattern in JOB_CHECKPOINTS)


def newest_whole(folder: str) -> str | None:
    """Path of the newest checkpoint of TensorFlow in a job's folder that is as it was written; None if there is none.

    Says which are damaged, and what happens instead.
    """
    problem = ""
    for path in _paths(folder):
        found = _problem(path)
        if not found:
            if problem:
                print(f"dike: {problem}; going on from '{path}'.", file=sys.stderr, flush=True)
            return path
        problem = problem or found
    if problem:
        print(f"dike: {problem}; beginning anew.", file=sys.stderr, flush=True)
    return None


def make_private(folder: str) -> None:
    """Makes a local folder and those above, where they are missing; only this account can look into them."""
    above = os.path.dirname(os.path.abspath(folder))
    if not os.path.isdir(above):
        make_private(above)
    with contextlib.suppress(FileExistsError):
        os.mkdir(folder, 0o700)


def file_sum(path: str, *, sync: bool = False) -> tuple[int, int]:
    """Size in bytes and CRC-32 of a local file; with `sync` it is on the disk then."""
    with open(path, "rb") as file:
        if sync:
            os.fsync(file.fileno())
        return sum_of(file)


def sum_of(file: BinaryIO) -> tuple[int, int]:
    """The same of an open file, from where it is on."""
    size, checksum = 0, 0
    while block := file.read(_READ_BYTES):
        size += len(block)
        checksum = zlib.crc32(block, checksum)
    return size, checksum


def sync(path: str) -> None:
    """What a local file or folder holds outlives the machine, where its file system can do that."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS):
            raise
    finally:
        os.close(descriptor)


def _paths(folder: str) -> Iterator[str]:
    """The checkpoints in a folder, newest first."""
    import tensorflow as tf

    state = None
    with contextlib.suppress(UnicodeDecodeError, BadInputError):  # damaged
        # TensorFlow would wait for a pipe that a script has left there, and read a device for ever.
        if _is_remote(folder) or _read(_file_path(folder, "checkpoint")) is not None:
            state = tf.train.get_checkpoint_state(folder)
    if state is not None:
        listed = state.all_model_checkpoint_paths or [state.model_checkpoint_path]
        # What lies elsewhere is none of this job's.
        own = [path for path in reversed(listed) if _is_remote(folder) or _is_in(folder, path)]
        yield from own
        if own:
            return
    # TensorFlow's own list of them is not there, or damaged.
    found = [path.removesuffix(".index") for path in tf.io.gfile.glob(_file_path(folder, "*.index"))]
    yield from sorted(found, key=step_of, reverse=True)


def _is_in(folder: str, path: str) -> bool:
    return os.path.realpath(os.path.dirname(path)) == os.path.realpath(folder)


def step_of(path: str) -> int:
    """The step at which the job wrote the checkpoint `path`; 0 if the name of one from elsewhere does not say."""
    step = path.rpartition("-")[2]
    return int(step) if step.isdecimal() else 0


def _problem(path: str) -> str:
    """Why a checkpoint cannot be gone on from; empty if it can.

    Raises:
        OSError, tf.errors.OpError: if the storage cannot tell.
    """
    import tensorflow as tf

    files, damaged = _files(path), f"checkpoint '{path}' is damaged"
    sums = {} if _is_remote(path) else _sums(os.path.dirname(path))
    noted = {name: value for name, value in sums.items() if name.startswith(f"{os.path.basename(path)}.")}
    try:
        if noted:
            for name, value in noted.items():
                with plain_files.open_below(os.path.dirname(path), name) as file:
                    if os.fstat(file.fileno()).st_size != value[0] or sum_of(file) != value:
                        return f"{damaged}: {name} is not what was written"
            return ""
        for name in files:
            plain_files.open_plain(name).close()
        # The script's own, or one elsewhere than on a disk. Each tensor carries a checksum of TensorFlow's.
        reader = tf.train.load_checkpoint(path)
        for name in reader.get_variable_to_shape_map() if files else ():
            reader.get_tensor(name)
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError, plain_files.NotPlainError) as error:
        return f"{damaged}: {error.filename}: {error.strerror}"
    except (tf.errors.OpError, ValueError) as error:
        away = (
            tf.errors.UnavailableError,
            tf.errors.DeadlineExceededError,
            tf.errors.AbortedError,
            tf.errors.ResourceExhaustedError,
            tf.errors.PermissionDeniedError,
            tf.errors.UnauthenticatedError,
        )
        if isinstance(error, away):
            raise  # The next attempt may read what is there.
        return f"{damaged}: {_first_line(error)}"
    return ""


def _files(path: str) -> list[str]:
    """The files of a local checkpoint."""
    if _is_remote(path):
        return []
    return glob.glob(f"{glob.escape(path)}.index") + glob.glob(f"{glob.escape(path)}.data-*")


def _sums(folder: str) -> dict[str, tuple[int, int]]:
    """File -> size and checksum, as `seal` has noted them; empty where that is damaged too."""
    text = _read(_file_path(folder, SUMS))
    try:
        return {str(name): (int(size), int(crc)) for name, (size, crc) in json.loads(text or "{}").items()}
    except (AttributeError, OverflowError, RecursionError, TypeError, ValueError):
        return {}


def _write(folder: str, name: str, values: dict[str, Any]) -> None:
    """Writes a small file at once; the folder is made if it does not exist."""
    text, path = json.dumps(values) + "\n", _file_path(folder, name)
    if _is_remote(folder):
        import tensorflow as tf

        tf.io.gfile.makedirs(folder)
        with tf.io.gfile.GFile(path, "w") as file:
            file.write(text)
        return
    make_private(folder)
    temporary = f"{path}.{os.getpid()}"
    with open(temporary, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def _is_remote(path: str) -> bool:
    return "://" in path


def _file_path(folder: str, name: str) -> str:
    return f"{folder.rstrip('/')}/{name}"


def _read(path: str) -> str | None:
    """The file's text; empty if it is none; None where there is no such file."""
    if _is_remote(path):
        import tensorflow as tf

        if not tf.io.gfile.exists(path):
            return None
        with tf.io.gfile.GFile(path, "rb") as file:
            return _text(file.read())
    try:
        with plain_files.open_plain(path) as file:
            return _text(plain_files.read(file, path, _SMALL_BYTES))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise BadInputError(f"Checkpoint file '{path}' cannot be read: {error.strerror}.") from error


def _text(content: bytes) -> str:
    try:
        return content.decode()
    except UnicodeDecodeError:
        return ""
