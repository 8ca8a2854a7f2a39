"""Checkpoint folders: their model, their owner, and which checkpoints in them are intact.

For local folders only `newest_intact` needs TensorFlow.
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

SHOWN_FOLDER_VARIABLE = "DIKE_SHOWN_FOLDER"
"""Variable of a process that works in a copy of its run's folder: the copy, and the folder, separated like PATH."""
FINGERPRINT_FILE = "dike-model.json"
"""Fingerprint of the folder's model."""

OWNER_FILE = "dike-claim.json"
"""Job and attempt that may write to the folder."""

FIRST_STEP_FILE = "dike-job.json"
"""Step at which the job began to train."""

JOB_CHECKPOINT_PATTERNS = ("fit-*/*.index", "model.ckpt-*.index")
"""File names of checkpoints of jobs with parameter servers."""

CHECKSUMS_FILE = "dike-sums.json"
"""Size and CRC-32 of each checkpoint file."""
_READ_BLOCK_BYTES = 1 << 20
_MAX_SMALL_FILE_BYTES = 1 << 24
"""Limit for the JSON files above, which scripts can write too."""
_DISK_FULL = re.compile(r"no space left|quota", re.IGNORECASE)
DISK_FULL_TIMEOUT_S = 600.0
DISK_FULL_RETRY_S = 5.0


def shown(path: str) -> str:
    """A path as the user knows it: in place of this machine's copy of a run's folder, the folder itself."""
    copy, _, folder = os.environ.get(SHOWN_FOLDER_VARIABLE, "").partition(os.pathsep)
    return f"{folder}{path[len(copy) :]}" if copy and f"{path}/".startswith(f"{copy}/") else path


def fingerprint(profile: ModelProfile) -> str:
    """Hash of names, shapes and types of the model's variables, and of nothing else."""
    return fingerprint_of(profile.variables)


def fingerprint_of(variables: Iterable[VariableSpec]) -> str:
    described = sorted((variable.name, list(variable.shape), variable.dtype) for variable in variables)
    return hashlib.sha256(json.dumps(described).encode()).hexdigest()


def check_folder(path: str, profile: ModelProfile) -> None:
    """Raises BadInputError if a local checkpoint folder is another model's, or a file. The chief checks remote ones."""
    if not _is_remote(path):
        check_fingerprint(path, fingerprint(profile))


def check_fingerprint(path: str, expected: str) -> None:
    """Does what `check_folder` does, for a known fingerprint."""
    if not _is_remote(path) and os.path.exists(path) and not os.path.isdir(path):
        raise BadInputError(f"Checkpoint folder '{shown(path)}' is a file; name a folder with --checkpoint-dir.")
    text = _read(_file_path(path, FINGERPRINT_FILE))
    if text is None:
        return
    try:
        found = json.loads(text)["fingerprint"]
    except (KeyError, RecursionError, TypeError, ValueError) as error:
        raise BadInputError(
            f"Checkpoint folder '{shown(path)}' has a damaged {FINGERPRINT_FILE}; name another folder with "
            "--checkpoint-dir."
        ) from error
    if found != expected:
        raise BadInputError(
            f"Checkpoint folder '{shown(path)}' holds checkpoints of another model; name another folder with "
            "--checkpoint-dir."
        )


def mark_folder(path: str, value: str) -> None:
    """Writes the fingerprint `value` into the folder, which is created if missing."""
    retry_while_disk_full(lambda: _write(path, FINGERPRINT_FILE, {"fingerprint": value}))


def check_model(task: TaskSpec) -> None:
    """Writes the model's fingerprint into the task's folder; raises BadInputError if another model's is in it."""
    if task.fingerprint:
        check_fingerprint(task.checkpoint_dir, task.fingerprint)
        mark_folder(task.checkpoint_dir, task.fingerprint)


def write_owner(task: TaskSpec) -> None:
    """Makes the task's attempt the owner of its folder (see `dike.roles.fencing`)."""
    owner = {"job": task.job_id, "attempt": task.attempt}
    retry_while_disk_full(lambda: _write(task.checkpoint_dir, OWNER_FILE, owner))


def checkpoint_owner(task: TaskSpec) -> tuple[str, int] | None:
    """Job and attempt that own the task's folder; None if there is no owner or its file is damaged."""
    text = _read(_file_path(task.checkpoint_dir, OWNER_FILE))
    try:
        owner = json.loads(text) if text is not None else {}
        return str(owner["job"]), int(owner["attempt"])
    except (KeyError, OverflowError, RecursionError, TypeError, ValueError):
        return None


def first_step(task: TaskSpec, step: int) -> int:
    """The step at which the job's first attempt began; the first chief that asks records the current step."""
    if task.attempt:
        text = _read(_file_path(task.checkpoint_dir, FIRST_STEP_FILE))
        try:
            noted = json.loads(text) if text is not None else {}
            if noted.get("job") == task.job_id:
                return int(noted["step"])
        except (AttributeError, KeyError, OverflowError, RecursionError, TypeError, ValueError):
            pass  # damaged: the job counts from here
    if task.is_chief:
        retry_while_disk_full(lambda: _write(task.checkpoint_dir, FIRST_STEP_FILE, {"job": task.job_id, "step": step}))
    return step


def write_checkpoint(write: Callable[[], object], *, is_last: bool) -> bool:
    """Calls `write` and returns whether it succeeded; on a full disk the last checkpoint waits, others are skipped."""
    if not is_last:
        return skip_if_disk_full(write)
    retry_while_disk_full(write)
    return True


def skip_if_disk_full(write: Callable[[], object]) -> bool:
    """Calls `write`; returns False if the disk is full."""
    try:
        write()
    except Exception as error:
        if not _is_full(error):
            raise
        _log_disk_full(error, "training continues, and the next checkpoint is written when it is due")
        return False
    return True


def retry_while_disk_full(write: Callable[[], object]) -> None:
    """Calls `write`; on a full disk, retries for `DISK_FULL_TIMEOUT_S`, then raises its error."""
    deadline, is_logged = time.monotonic() + DISK_FULL_TIMEOUT_S, False
    while True:
        try:
            write()
            return
        except Exception as error:
            if not _is_full(error) or time.monotonic() > deadline:
                raise
            if not is_logged:
                _log_disk_full(error, f"retrying for {DISK_FULL_TIMEOUT_S:g} s")
            is_logged = True
        time.sleep(DISK_FULL_RETRY_S)


def _log_disk_full(error: Exception, consequence: str) -> None:
    print(f"dike: no room for a checkpoint ({_first_line(error)}); {consequence}.", file=sys.stderr, flush=True)


def _is_full(error: Exception) -> bool:
    if isinstance(error, OSError):
        return error.errno in (errno.ENOSPC, errno.EDQUOT)
    if "tensorflow" not in sys.modules:
        return False
    import tensorflow as tf

    # TensorFlow raises the same error when a GPU's memory is full.
    return isinstance(error, tf.errors.ResourceExhaustedError) and bool(_DISK_FULL.search(str(error)))


def _first_line(error: Exception) -> str:
    return (getattr(error, "strerror", None) or str(error)).partition("\n")[0]


def forget_checksums(path: str) -> None:
    """Must be called before a checkpoint is overwritten."""
    folder, name = os.path.split(path)
    if not _is_remote(path) and (sums := _checksums(folder)):
        kept = {file: noted for file, noted in sums.items() if not file.startswith(f"{name}.")}
        if kept != sums:
            _write(folder, CHECKSUMS_FILE, kept)


def record_checksums(path: str) -> None:
    """Flushes a local checkpoint, named without `.index`, to the disk and records its files' checksums."""
    if _is_remote(path):
        return
    folder = os.path.dirname(path)
    sums = {name: noted for name, noted in _checksums(folder).items() if os.path.exists(_file_path(folder, name))}
    sums |= {os.path.basename(file): file_checksum(file, sync=True) for file in _files(path)}
    _write(folder, CHECKSUMS_FILE, sums)
    sync(folder)


def has_checkpoints(folder: str) -> bool:
    """Whether a job with parameter servers has written checkpoints to the folder, intact or damaged."""
    if not _is_remote(folder):
        return any(glob.glob(f"{glob.escape(folder.rstrip('/'))}/{pattern}") for pattern in JOB_CHECKPOINT_PATTERNS)
    import tensorflow as tf

    return any(tf.io.gfile.glob(_file_path(folder, pattern)) for pattern in JOB_CHECKPOINT_PATTERNS)


def newest_intact(folder: str) -> str | None:
    """Path of the newest undamaged TensorFlow checkpoint in a job's folder, or None. Logs damaged ones."""
    problem = ""
    for path in _newest_first(folder):
        found = _damage_of(path)
        if not found:
            if problem:
                print(f"dike: {problem}; resuming from '{path}'.", file=sys.stderr, flush=True)
            return path
        problem = problem or found
    if problem:
        print(f"dike: {problem}; starting over.", file=sys.stderr, flush=True)
    return None


def make_private(folder: str) -> None:
    """Creates a local folder and its missing parents, readable by this account only."""
    above = os.path.dirname(os.path.abspath(folder))
    if not os.path.isdir(above):
        make_private(above)
    with contextlib.suppress(FileExistsError):
        os.mkdir(folder, 0o700)


def file_checksum(path: str, *, sync: bool = False) -> tuple[int, int]:
    """Size and CRC-32 of a local file, which is flushed to the disk first if `sync`."""
    with open(path, "rb") as file:
        if sync:
            os.fsync(file.fileno())
        return checksum_of(file)


def checksum_of(file: BinaryIO) -> tuple[int, int]:
    """Size and CRC-32 of an open file, from its current position."""
    size, checksum = 0, 0
    while block := file.read(_READ_BLOCK_BYTES):
        size += len(block)
        checksum = zlib.crc32(block, checksum)
    return size, checksum


def sync(path: str) -> None:
    """Flushes a file or folder to the disk, where its file system supports that."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS):
            raise
    finally:
        os.close(descriptor)


def _newest_first(folder: str) -> Iterator[str]:
    import tensorflow as tf

    state = None
    with contextlib.suppress(UnicodeDecodeError, BadInputError):  # damaged
        # TensorFlow would block on a pipe that a script has left there, and read a device forever.
        if _is_remote(folder) or _read(_file_path(folder, "checkpoint")) is not None:
            state = tf.train.get_checkpoint_state(folder)
    if state is not None:
        listed = state.all_model_checkpoint_paths or [state.model_checkpoint_path]
        # Checkpoints in other folders are not this job's.
        own = [path for path in reversed(listed) if _is_remote(folder) or _is_in(folder, path)]
        yield from own
        if own:
            return
    # TensorFlow's own list is missing or damaged.
    found = [path.removesuffix(".index") for path in tf.io.gfile.glob(_file_path(folder, "*.index"))]
    yield from sorted(found, key=step_of, reverse=True)


def _is_in(folder: str, path: str) -> bool:
    return os.path.realpath(os.path.dirname(path)) == os.path.realpath(folder)


def step_of(path: str) -> int:
    """The step in a checkpoint's file name; 0 if the name has none."""
    step = path.rpartition("-")[2]
    return int(step) if step.isdecimal() else 0


def _damage_of(path: str) -> str:
    """Why a checkpoint cannot be restored; empty if it can. Raises if the storage is unavailable."""
    import tensorflow as tf

    files, damaged = _files(path), f"checkpoint '{path}' is damaged"
    sums = {} if _is_remote(path) else _checksums(os.path.dirname(path))
    noted = {name: value for name, value in sums.items() if name.startswith(f"{os.path.basename(path)}.")}
    try:
        if noted:
            for name, value in noted.items():
                with plain_files.open_below(os.path.dirname(path), name) as file:
                    if os.fstat(file.fileno()).st_size != value[0] or checksum_of(file) != value:
                        return f"{damaged}: {name} is not what was written"
            return ""
        for name in files:
            plain_files.open_plain(name).close()
        # Written by the script itself, or remote: reading verifies the checksum that TensorFlow keeps for each tensor.
        reader = tf.train.load_checkpoint(path)
        for name in reader.get_variable_to_shape_map() if files else ():
            reader.get_tensor(name)
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError, plain_files.NotPlainError) as error:
        return f"{damaged}: {error.filename}: {error.strerror}"
    except (tf.errors.OpError, ValueError) as error:
        unavailable = (
            tf.errors.UnavailableError,
            tf.errors.DeadlineExceededError,
            tf.errors.AbortedError,
            tf.errors.ResourceExhaustedError,
            tf.errors.PermissionDeniedError,
            tf.errors.UnauthenticatedError,
        )
        if isinstance(error, unavailable):
            raise  # the next attempt may be able to read it
        return f"{damaged}: {_first_line(error)}"
    return ""


def _files(path: str) -> list[str]:
    if _is_remote(path):
        return []
    return glob.glob(f"{glob.escape(path)}.index") + glob.glob(f"{glob.escape(path)}.data-*")


def _checksums(folder: str) -> dict[str, tuple[int, int]]:
    """Empty if the file is missing or damaged."""
    text = _read(_file_path(folder, CHECKSUMS_FILE))
    try:
        return {str(name): (int(size), int(crc)) for name, (size, crc) in json.loads(text or "{}").items()}
    except (AttributeError, OverflowError, RecursionError, TypeError, ValueError):
        return {}


def _write(folder: str, name: str, values: dict[str, Any]) -> None:
    """Writes a small file atomically, into a folder that may be missing."""
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
    """Empty if it is not text, None if there is no such file."""
    if _is_remote(path):
        import tensorflow as tf

        if not tf.io.gfile.exists(path):
            return None
        with tf.io.gfile.GFile(path, "rb") as file:
            return _text(file.read())
    try:
        with plain_files.open_plain(path) as file:
            return _text(plain_files.read(file, path, _MAX_SMALL_FILE_BYTES))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise BadInputError(f"Checkpoint file '{path}' cannot be read: {error.strerror}.") from error


def _text(content: bytes) -> str:
    try:
        return content.decode()
    except UnicodeDecodeError:
        return ""
