"""Which model a checkpoint folder belongs to. Needs no TensorFlow where the folder is a local one."""

from __future__ import annotations

import hashlib
import json
import os

from dike.exceptions import BadInputError
from dike.profile import ModelProfile
from dike.task import TaskSpec

MARKER = "dike-model.json"
"""File in a checkpoint folder that holds the fingerprint of its model."""


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
    text = _read(_marker_path(path))
    if text is None:
        return
    try:
        found = json.loads(text)["fingerprint"]
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise BadInputError(
            f"Checkpoint folder '{path}' has a damaged {MARKER}; name another folder with --checkpoint-dir."
        ) from error
    if found != expected:
        raise BadInputError(
            f"Checkpoint folder '{path}' holds checkpoints of another model; name another folder with --checkpoint-dir."
        )


def mark_folder(path: str, value: str) -> None:
    """Writes the fingerprint `value` into the folder, which is made if it does not exist."""
    text = json.dumps({"fingerprint": value}) + "\n"
    if _is_remote(path):
        import tensorflow as tf

        tf.io.gfile.makedirs(path)
        with tf.io.gfile.GFile(_marker_path(path), "w") as file:
            file.write(text)
        return
    os.makedirs(path, exist_ok=True)
    temporary = f"{_marker_path(path)}.{os.getpid()}"
    with open(temporary, "w", encoding="utf-8") as file:
        file.write(text)
    os.replace(temporary, _marker_path(path))


def claim_folder(task: TaskSpec) -> None:
    """Called by a chief before it reads or writes checkpoints: checks the folder, then marks it.

    Raises:
        BadInputError: if another model's checkpoints are in the folder.
    """
    if task.fingerprint:
        check_fingerprint(task.checkpoint_dir, task.fingerprint)
        mark_folder(task.checkpoint_dir, task.fingerprint)


def _is_remote(path: str) -> bool:
    return "://" in path


def _marker_path(path: str) -> str:
    return f"{path.rstrip('/')}/{MARKER}"


def _read(path: str) -> str | None:
    """The file's text; None where there is no such file."""
    if _is_remote(path):
        import tensorflow as tf

        if not tf.io.gfile.exists(path):
            return None
        with tf.io.gfile.GFile(path) as file:
            return str(file.read())
    try:
        with open(path, encoding="utf-8") as file:
            return file.read()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise BadInputError(f"Checkpoint file '{path}' cannot be read: {error.strerror}.") from error
