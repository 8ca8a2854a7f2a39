"""Which model a checkpoint folder belongs to. Needs no TensorFlow where the folder is a local one."""

from __future__ import annotations

import hashlib
import json
import os
from typing import Any

from dike.exceptions import BadInputError
from dike.profile import ModelProfile
from dike.task import TaskSpec

MARKER = "dike-model.json"
"""File in a checkpoint folder that holds the fingerprint of its model."""

CLAIM = "dike-claim.json"
"""File in a checkpoint folder that says which attempt of which job may write there."""

JOB = "dike-job.json"
"""File in a checkpoint folder that says at which step the last job began that trained there."""


def fingerprint(profile: ModelProfile) -> str:
    """Depends on names, shapes and types of the model's variables, and on nothing else."""
    variables = sorted((variable.name, list(variable.shape), variable.dtype) for variable in profile.variables)
    return hashlib.sha256(json.dumps(variables).encode()).hexdigest()


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
    _write(path, MARKER, {"fingerprint": value})


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
    _write(task.checkpoint_dir, CLAIM, {"job": task.job_id, "attempt": task.attempt})


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
        _write(task.checkpoint_dir, JOB, {"job": task.job_id, "step": step})
    return step


def _write(folder: str, name: str, values: dict[str, Any]) -> None:
    """Writes a small file at once; the folder is made if it does not exist."""
    text, path = json.dumps(values) + "\n", _file_path(folder, name)
    if _is_remote(folder):
        import tensorflow as tf

        tf.io.gfile.makedirs(folder)
        with tf.io.gfile.GFile(path, "w") as file:
            file.write(text)
        return
    os.makedirs(folder, exist_ok=True)
    temporary = f"{path}.{os.getpid()}"
    with open(temporary, "w", encoding="utf-8") as file:
        file.write(text)
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
        with open(path, "rb") as file:
            return _text(file.read())
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise BadInputError(f"Checkpoint file '{path}' cannot be read: {error.strerror}.") from error


def _text(content: bytes) -> str:
    try:
        return content.decode()
    except UnicodeDecodeError:
        return ""
