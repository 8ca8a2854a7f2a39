"""Folders that a script fills and reads itself, as parts of a checkpoint that may be on a remote file system."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from typing import Any

from dike.exceptions import BadInputError


@contextlib.contextmanager
def to_fill(path: str) -> Iterator[str]:
    """An empty local folder; what it holds at the end is at `path`.

    Raises:
        BadInputError: if `path` is remote and TensorFlow is not installed.
    """
    if not _is_remote(path):
        os.makedirs(path, exist_ok=True)
        yield path
        return
    gfile = _gfile(path)
    with tempfile.TemporaryDirectory(prefix="dike-checkpoint-") as folder:
        yield folder
        _copy(gfile, folder, path)


@contextlib.contextmanager
def to_read(path: str) -> Iterator[str]:
    """A local folder that holds what is at `path`.

    Raises:
        BadInputError: if `path` is remote and TensorFlow is not installed.
    """
    if not _is_remote(path):
        yield path
        return
    gfile = _gfile(path)
    with tempfile.TemporaryDirectory(prefix="dike-checkpoint-") as folder:
        _copy(gfile, path, folder)
        yield folder


def _copy(gfile: Any, source: str, target: str) -> None:
    for folder, _, files in gfile.walk(source):
        place = target + folder[len(source) :].rstrip("/")
        gfile.makedirs(place)
        for file in files:
            gfile.copy(f"{folder.rstrip('/')}/{file}", f"{place}/{file}", overwrite=True)


def _is_remote(path: str) -> bool:
    return "://" in path


def _gfile(path: str) -> Any:
    try:
        import tensorflow as tf
    except ImportError:
        raise BadInputError(
            f"Checkpoints go to '{path}', which TensorFlow would reach, but it is not installed; name a local folder "
            "with --checkpoint-dir."
        ) from None
    return tf.io.gfile
