"""Checkpoint folders of trials: files, and at last the one that makes the checkpoint complete.

Any path that `tf.io.gfile` understands will do; for a local one TensorFlow is not needed.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from typing import Any

from dike.exceptions import BadInputError
from dike.trial.spec import step_of_checkpoint

META = "dike-trial.json"
KEPT = 3
"""How many checkpoints of a trial are kept: the newest, and those that a slow report may still name."""

Reader = Callable[[str], bytes]


def write(path: str, files: Mapping[str, bytes], meta: Mapping[str, Any]) -> None:
    """Writes files into a checkpoint folder, which may hold others already, and completes it.

    Args:
        path: the folder; made if it does not exist.
        files: name -> content.
        meta: JSON values, `kind`, `step` and `train_s` among them.
    """
    _make_folder(path)
    for name, content in files.items():
        _write(f"{path}/{name}", content)
    _write(f"{path}/{META}", json.dumps(meta).encode())


def read(path: str) -> tuple[dict[str, Any], Reader]:
    """What `write` was given as `meta`, and a function that reads a file of the checkpoint by its name.

    Raises:
        BadInputError: if there is no complete checkpoint.
    """
    try:
        meta = json.loads(_read(f"{path}/{META}"))
    except (OSError, ValueError) as error:
        raise BadInputError(f"There is no complete checkpoint in '{path}' ({error}).") from error
    return meta, lambda name: _read(f"{path}/{name}")


def is_complete(path: str) -> bool:
    """Whether `path` is a checkpoint whose last file was written."""
    if _is_remote(path):
        return bool(_gfile().exists(f"{path}/{META}"))
    return os.path.exists(f"{path}/{META}")


def newest(folder: str) -> str | None:
    """The complete checkpoint with the most steps in a trial's folder; None if there is none."""
    complete = [path for path in _checkpoints(folder) if is_complete(path)]
    return max(complete, key=step_of_checkpoint, default=None)


def prune(folder: str, keep: int = KEPT) -> None:
    """Deletes all but the newest complete checkpoints of a trial's folder."""
    complete = sorted((path for path in _checkpoints(folder) if is_complete(path)), key=step_of_checkpoint)
    for path in complete[: max(0, len(complete) - keep)]:
        if _is_remote(path):
            _gfile().rmtree(path)
        else:
            # First the file that makes it complete: a half-deleted checkpoint must not look like one.
            os.remove(f"{path}/{META}")
            shutil.rmtree(path)


def _checkpoints(folder: str) -> list[str]:
    if _is_remote(folder):
        names = _gfile().listdir(folder) if _gfile().exists(folder) else []
    else:
        names = os.listdir(folder) if os.path.isdir(folder) else []
    return [f"{folder.rstrip('/')}/{name.rstrip('/')}" for name in names if name.startswith("run-")]


def _make_folder(path: str) -> None:
    if _is_remote(path):
        _gfile().makedirs(path)
    else:
        os.makedirs(path, exist_ok=True)


def _write(path: str, content: bytes) -> None:
    if _is_remote(path):
        with _gfile().GFile(path, "wb") as file:
            file.write(content)
        return
    with tempfile.NamedTemporaryFile(dir=os.path.dirname(path), delete=False) as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(file.name, path)


def _read(path: str) -> bytes:
    if _is_remote(path):
        with _gfile().GFile(path, "rb") as file:
            return bytes(file.read())
    with open(path, "rb") as file:
        return file.read()


def _is_remote(path: str) -> bool:
    return "://" in path


def _gfile() -> Any:
    import tensorflow as tf

    return tf.io.gfile
