"""Checkpoint folders of trials, on a local disk or any file system of `tf.io.gfile`.

A checkpoint is complete once its folder contains `dike-trial.json`, written last. On a local disk that file records the
size and checksum of all others, after an fsync of them. A checkpoint that does not match is damaged, and an older one
is used instead. Remote storage is trusted to keep files intact. Local paths do not need TensorFlow.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from dike import plain_files
from dike.checkpoints import checksum_of, file_checksum, make_private, shown, sync
from dike.exceptions import BadInputError
from dike.trial.spec import TrialSpec

META = "dike-trial.json"
"""File whose presence makes a checkpoint complete. Its `needs` names sibling folders that the checkpoint depends on."""
_SUMS = "sums"
"""Key in `META`: path in the folder -> size and CRC-32 of the file. Local disks only."""
COPIED = "copied"
"""Key in `META` of a checkpoint that another trial wrote, with other parameters."""

META_LIMIT_BYTES = 16 * 2**20
"""Maximum size of `META`, which lists every file."""
FILE_LIMIT_BYTES = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
"""Maximum size of a file that is read into memory."""

MODEL = "model"
"""Kind of a checkpoint that holds a model only: no run resumes from it."""
TENSORFLOW = "checkpoint"
"""Kind of a model that is a TensorFlow checkpoint, given by its prefix, instead of a folder of ours."""

Reader = Callable[[str], bytes]
"""Content of a checkpoint's file, by name."""

_NAME = re.compile(r"run-(\d+)-step-(\d+)")
_BEST = re.compile(r"best-run-(\d+)-step-(\d+)")
"""Model of the best epoch. Runs never resume from it, and `prune` does not delete it."""


def write(path: str, files: Mapping[str, bytes], meta: Mapping[str, Any]) -> None:
    """Writes a checkpoint. `path` may exist and contain other files; it is incomplete during the write.

    `meta` are JSON values, including `kind` (the format of the files), `step` and `train_s`.
    """
    if _is_remote(path):
        import tensorflow as tf

        tf.io.gfile.makedirs(path)
    else:
        make_private(path)
    _make_incomplete(path)
    if _is_remote(path):
        for name, content in files.items():
            _write_file(f"{path}/{name}", content)
        _write_file(f"{path}/{META}", json.dumps(meta).encode())
        return
    try:
        _write_locally(path, files, meta)
    except OSError:
        # On a full disk a partial checkpoint would leave no space for the next one.
        shutil.rmtree(path, ignore_errors=True)
        raise


def _write_locally(path: str, files: Mapping[str, bytes], meta: Mapping[str, Any]) -> None:
    for name, content in files.items():
        _write_file(f"{path}/{name}", content)
    text = json.dumps({**meta, _SUMS: _checksums(path)}).encode()
    temporary = f"{path}/.{META}.{os.getpid()}"
    _write_file(temporary, text)
    sync(temporary)
    os.replace(temporary, f"{path}/{META}")
    sync(path)
    sync(os.path.dirname(path.rstrip("/")) or ".")


def read(path: str) -> tuple[dict[str, Any], Reader]:
    """Returns the metadata, and a function that reads the files.

    Raises:
        BadInputError: if the checkpoint is not complete.
    """
    meta = _meta(path)
    if meta is None:
        raise BadInputError(f"There is no complete checkpoint in '{shown(path)}'; name another one.")
    meta.pop(_SUMS, None)
    return meta, lambda name: _read_file(path, name)


def newest(folder: str) -> str | None:
    """Returns the undamaged checkpoint with the highest step; None if there is none."""
    for _, _, name in sorted(_checkpoints(folder), key=lambda found: (found[1], found[0]), reverse=True):
        path = f"{folder.rstrip('/')}/{name}"
        if not problem(path):
            return path
    return None


def last_written(folder: str) -> tuple[str | None, int]:
    """Returns the complete checkpoint with the highest step, and the number of runs that wrote to the folder.

    The checkpoint may be damaged. One of kind `MODEL` counts for the number of runs, but is never returned.
    """
    found = _checkpoints(folder)
    runs = max((run for run, _, _ in found), default=-1) + 1
    for _, _, name in sorted(found, key=lambda each: (each[1], each[0]), reverse=True):
        path = f"{folder.rstrip('/')}/{name}"
        if (meta := _meta(path)) is not None and meta.get("kind") != MODEL:
            return path, runs
    return None, runs


def checkpoint_to_resume(spec: TrialSpec) -> str | None:
    """Returns the checkpoint in the spec, or the newest undamaged one if that is damaged; None to start over."""
    path = spec.resume_from
    if path is None or not (why := problem(path)):
        return path
    other = newest(spec.folder)
    instead = f"resuming from '{shown(other)}'" if other else "starting over"
    print(f"dike: {why}; {instead}.", file=sys.stderr, flush=True)
    return other


def adopt(spec: TrialSpec) -> TrialSpec:
    """Copies the checkpoint of another trial that a run resumes from into the trial's own folder.

    What the checkpoint needs is copied too, and the other trial's best model. Then the trial's own checkpoints are
    deleted.

    Returns:
        The run, which resumes from the copy; unchanged if the checkpoint is the trial's own or cannot be used.
    """
    if spec.resume_from is None or not spec.copies or problem(spec.resume_from):
        return spec
    source, _, name = spec.resume_from.rstrip("/").rpartition("/")
    own = spec.folder.rstrip("/")
    needed = [name]
    for other in needed:
        needed += [each for each in (_meta(f"{source}/{other}") or {}).get("needs", ()) if each not in needed]
    copied = [*reversed(needed), *(best for _, _, best in _checkpoints(source, _BEST))]
    for other in copied:
        _copy_checkpoint(f"{source}/{other}", f"{own}/{other}")
    for other in checkpoint_names(own):
        if other not in copied:
            _remove(f"{own}/{other}")
    return dataclasses.replace(spec, resume_from=f"{own}/{name}")


def _copy_checkpoint(source: str, target: str) -> None:
    meta = _meta(source)
    if meta is None:
        return  # incomplete
    meta.pop(_SUMS, None)
    if _is_remote(source) or _is_remote(target):
        gfile = _gfile(target)
        if gfile.isdir(target):
            gfile.rmtree(target)
        _copy(gfile, source, target)
    else:
        make_private(os.path.dirname(target))
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(source, target, symlinks=True)
    write(target, {}, {**meta, COPIED: True})


def prune(path: str, keep: int = 3) -> None:
    """Deletes checkpoints that the complete one at `path` supersedes; `keep` remain, including it, and those they need.

    Checkpoints of later runs are not touched: a run that lost its connection must not delete what its successor needs.
    """
    folder, _, name = path.rstrip("/").rpartition("/")
    match = _NAME.fullmatch(name)
    if match is None:
        return
    own = (int(match[1]), int(match[2]))
    older = sorted((run, step, other) for run, step, other in _checkpoints(folder) if (run, step) <= own)
    kept = {other for run, step, other in _checkpoints(folder) if (run, step) > own}
    kept.update(other for _, _, other in older[-keep:])
    for other in list(kept):
        kept.update((_meta(f"{folder}/{other}") or {}).get("needs", ()))
    for _, _, other in older:
        if other not in kept:
            _remove(f"{folder}/{other}")


def checkpoint_names(folder: str) -> list[str]:
    """Lists the checkpoints in a trial's folder, complete or not, and the models of its best epochs."""
    return [name for pattern in (_NAME, _BEST) for _, _, name in _checkpoints(folder, pattern)]


def checkpoint_number(name: str) -> tuple[int, int]:
    """Returns step and run, as a sort key; (-1, -1) if it is not a checkpoint."""
    match = _NAME.fullmatch(name)
    return (-1, -1) if match is None else (int(match[2]), int(match[1]))


def best_number(name: str) -> tuple[int, int]:
    """Returns run and step; (-1, -1) if it is not the model of a best epoch."""
    match = _BEST.fullmatch(name)
    return (-1, -1) if match is None else (int(match[1]), int(match[2]))


def prune_best(path: str) -> None:
    """Deletes earlier best models once the one at `path` is complete, except those of later runs."""
    folder, _, own = path.rstrip("/").rpartition("/")
    match = _BEST.fullmatch(own)
    assert match is not None, path
    run = int(match[1])
    for other_run, _, name in _checkpoints(folder, _BEST):
        if name != own and other_run <= run:
            _remove(f"{folder}/{name}")


def clear_best(folder: str) -> None:
    """Deletes the models of best epochs. Before a trial's first run, existing ones are of an earlier search."""
    with contextlib.suppress(ImportError):  # without TensorFlow nothing was written to remote storage
        for _, _, name in _checkpoints(folder, _BEST):
            _remove(f"{folder.rstrip('/')}/{name}")


@contextlib.contextmanager
def staging_folder(path: str) -> Iterator[str]:
    """Yields an empty local folder to write a part of a checkpoint to; on exit its content is at `path`.

    An existing checkpoint there is incomplete from the start.

    Raises:
        BadInputError: if `path` is remote and TensorFlow is not installed.
    """
    if not _is_remote(path):
        _make_incomplete(os.path.dirname(path.rstrip("/")))
        shutil.rmtree(path, ignore_errors=True)
        make_private(path)
        try:
            yield path
        except BaseException:
            # A partial folder would take the space of the next one.
            shutil.rmtree(path, ignore_errors=True)
            with contextlib.suppress(OSError):
                os.rmdir(os.path.dirname(path.rstrip("/")))
            raise
        return
    gfile = _gfile(path)
    with tempfile.TemporaryDirectory(prefix="dike-checkpoint-") as folder:
        yield folder
        _make_incomplete(path.rstrip("/").rpartition("/")[0])
        if gfile.isdir(path):
            gfile.rmtree(path)
        _copy(gfile, folder, path)


@contextlib.contextmanager
def local_copy(path: str) -> Iterator[str]:
    """Yields a local folder with the content of `path`.

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


def _checkpoints(folder: str, named: re.Pattern[str] = _NAME) -> list[tuple[int, int, str]]:
    """Returns run, step and name of every entry whose name matches."""
    if _is_remote(folder):
        import tensorflow as tf

        names = [name.rstrip("/") for name in tf.io.gfile.listdir(folder)] if tf.io.gfile.isdir(folder) else []
    else:
        names = os.listdir(folder) if os.path.isdir(folder) else []
    matches = [match for name in names if (match := named.fullmatch(name))]
    return [(int(match[1]), int(match[2]), match[0]) for match in matches]


def _meta(path: str) -> dict[str, Any] | None:
    """Returns None if the checkpoint is not complete."""
    try:
        meta = plain_files.parse_json(_read_file(path, META, META_LIMIT_BYTES))
    except (FileNotFoundError, NotADirectoryError, plain_files.NotPlainError, ValueError):
        return None
    return meta if isinstance(meta, dict) else None


def problem(path: str) -> str:
    """Returns why a checkpoint, or one that it needs, cannot be used; empty if it can."""
    folder = path.rstrip("/").rpartition("/")[0]
    pending, seen = [path], set()
    while pending:
        one = pending.pop()
        if one in seen:
            continue
        seen.add(one)
        meta = _meta(one)
        if meta is None:
            return f"there is no complete checkpoint in '{shown(one)}'"
        try:
            noted = {str(name): (int(size), int(crc)) for name, (size, crc) in meta.get(_SUMS, {}).items()}
            needs = [str(name) for name in meta.get("needs", ())]
        except (AttributeError, OverflowError, TypeError, ValueError):
            return f"the checkpoint in '{shown(one)}' is damaged: {META} has unexpected content"
        if not all(_NAME.fullmatch(name) or _BEST.fullmatch(name) for name in needs):
            return f"the checkpoint in '{shown(one)}' is damaged: {META} refers to something that is not a checkpoint"
        for name, sum_noted in noted.items() if not _is_remote(one) else ():
            if why := _file_problem(one, name, sum_noted):
                return f"the checkpoint in '{shown(one)}' is damaged: {why}"
        pending += [f"{folder}/{name}" for name in needs]
    return ""


def _file_problem(path: str, name: str, noted: tuple[int, int]) -> str:
    try:
        with plain_files.open_below(path, name) as file:
            # The size is compared first, so that a file of another size is not read.
            is_other = os.fstat(file.fileno()).st_size != noted[0] or checksum_of(file) != noted
    except OSError as error:
        return f"{name}: {error.strerror}"
    return f"{name} is not what was written" if is_other else ""


def _checksums(path: str) -> dict[str, tuple[int, int]]:
    """Flushes all files of a local folder to the disk; returns their sizes and checksums by relative path."""
    found = {}
    for folder, _, names in os.walk(path):
        for name in names:
            file = os.path.join(folder, name)
            relative = os.path.relpath(file, path)
            # Links that lead out of the folder are not part of the checkpoint.
            if _is_below(path, relative) and not relative.startswith(f".{META}."):
                found[relative] = file_checksum(file, sync=True)
        sync(folder)
    return found


def _is_below(path: str, name: str) -> bool:
    try:
        plain_files.open_below(path, name).close()
    except plain_files.NotPlainError:
        return False
    except FileNotFoundError:
        return False  # a dangling link
    return True


def _remove(path: str) -> None:
    _make_incomplete(path)
    if _is_remote(path):
        import tensorflow as tf

        tf.io.gfile.rmtree(path)
    else:
        # Another process may prune the same folder.
        shutil.rmtree(path, ignore_errors=True)


def _make_incomplete(path: str) -> None:
    if _is_remote(path):
        import tensorflow as tf

        if tf.io.gfile.exists(f"{path}/{META}"):
            tf.io.gfile.remove(f"{path}/{META}")
        return
    with contextlib.suppress(FileNotFoundError):
        os.remove(f"{path}/{META}")


def _write_file(path: str, content: bytes) -> None:
    if _is_remote(path):
        import tensorflow as tf

        with tf.io.gfile.GFile(path, "wb") as remote:
            remote.write(content)
        return
    with open(path, "wb") as file:
        file.write(content)


def _read_file(folder: str, name: str, limit_bytes: int = FILE_LIMIT_BYTES) -> bytes:
    """Raises FileNotFoundError, or NotPlainError if it is not a plain file below the folder or too large."""
    if not _is_remote(folder):
        return plain_files.read_below(folder, name, limit_bytes)
    import tensorflow as tf

    path = f"{folder}/{name}"
    try:
        with tf.io.gfile.GFile(path, "rb") as remote:
            if remote.size() > limit_bytes:
                raise plain_files.NotPlainError(path, f"is larger than {limit_bytes} bytes")
            return bytes(remote.read())
    except tf.errors.NotFoundError as error:
        raise FileNotFoundError(path) from error


def _is_remote(path: str) -> bool:
    return "://" in path


def _copy(gfile: Any, source: str, target: str) -> None:
    for folder, _, files in gfile.walk(source):
        place = target + folder[len(source) :].rstrip("/")
        gfile.makedirs(place)
        for file in files:
            gfile.copy(f"{folder.rstrip('/')}/{file}", f"{place}/{file}", overwrite=True)


def _gfile(path: str) -> Any:
    try:
        import tensorflow as tf
    except ImportError:
        raise BadInputError(
            f"Checkpoints go to '{path}', which TensorFlow would reach, but it is not installed; name a local folder "
            "with --checkpoint-dir."
        ) from None
    return tf.io.gfile
