"""A kept model as files that others read: Keras' own, a TensorFlow checkpoint, or what a script's `save` wrote.

The script is not run, and a Keras model not made: its classes need not be known here.
"""

from __future__ import annotations

import contextlib
import dataclasses
import glob
import io
import os
import shutil
import tempfile
import warnings
import zipfile
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from dike import plain_files
from dike.checkpoints import step_of
from dike.exceptions import BadInputError
from dike.main_script import one_line
from dike.trial import folders, session_export

LAYOUT = "model.zip"
"""File of a checkpoint: a `.keras` file less its weights, and `PLACES`."""
VARIABLES = "variables.npz"
"""File of a checkpoint: the values of all variables by name."""
PLACES = "dike-places.json"
"""Where in Keras' file of weights the variables go: path of a group -> its key -> a variable's name, or None for one of
`ARRAYS`; and why there is no configuration."""
ARRAYS = "arrays.npz"
"""What layers have computed to be saved, by path and key."""
SCRIPT = "script"
"""Folder of a checkpoint that the script's own `save` has filled (`dike.checkpoint`)."""

KERAS, WEIGHTS = ".keras", ".weights.h5"
_DTYPE = "dtype"


@dataclass(frozen=True)
class Kept:
    """A model that a trial or a job has kept.

    Attributes:
        path: folder of the checkpoint.
        meta: what its writer noted.
        newer_step: of a job, the step of a newer checkpoint, which holds no model; None if there is none.
    """

    path: str
    meta: dict[str, Any]
    newer_step: int | None = None

    @property
    def step(self) -> int:
        """Steps done then."""
        return int(self.meta["step"])

    @property
    def value(self) -> float | None:
        """The objective's value, if it was kept because that was the best."""
        return self.meta.get("value")

    @property
    def suffix(self) -> str:
        """What the name of an exported file ends in; empty for a folder."""
        return "" if self.meta["kind"] in ("graph", "script", folders.TENSORFLOW) else KERAS


def pick(names: Iterable[str], epoch: str | None, best_step: int | None) -> str | None:
    """The folder that holds the wanted model, by the names of a trial's whole checkpoints; None if none does.

    Args:
        names: of the folders.
        epoch: `best` or `last`; None for the best, or the last where no best one was kept.
        best_step: step of the trial's best value; None if that is not known.
    """
    names = list(names)
    last = max((folders.checkpoint_number(name), name) for name in [*names, ""])[1] or None
    # Of the newest run, unless another is of the very step.
    known = sorted((folders.best_number(name), name) for name in names)
    bests = [(step, name) for (run, step), name in known if run >= 0]
    best = next((name for step, name in reversed(bests) if step == best_step), None)
    # At its end a trial has a checkpoint in any case.
    if best is None and last is not None and folders.checkpoint_number(last)[0] == best_step:
        best = last
    if best is None and bests:
        best = bests[-1][1]
    return last if epoch == "last" else best or (last if epoch is None else None)


def check_meta(meta: Any, path: str) -> dict[str, Any]:
    """What a checkpoint's writer has noted, if it is what an export needs; a script may have written something else.

    Args:
        meta: what was read.
        path: the checkpoint's folder.

    Raises:
        BadInputError: if it is not.
    """

    def is_a(value: Any, kind: type | tuple[type, ...]) -> bool:
        return isinstance(value, kind) and not isinstance(value, bool)

    if (
        not isinstance(meta, dict)
        or not isinstance(meta.get("kind"), str)
        or not is_a(meta.get("step"), int)
        or not (meta.get("value") is None or is_a(meta["value"], (int, float)))
        or not (meta.get("checkpoint") is None or is_a(meta["checkpoint"], int))
    ):
        raise BadInputError(f"The checkpoint in '{path}' is damaged: {folders.META} holds something else.")
    return meta


def choose(folder: str, epoch: str | None, best_step: int | None) -> Kept:
    """The model of a trial, or of a job, that is wanted; see `pick`.

    Args:
        folder: the trial's folder.
        epoch: `best`, `last` or None.
        best_step: step of the trial's best value; None if it had none.

    Raises:
        BadInputError: if there is none.
    """
    names = folders.names(folder)
    while (name := pick(names, epoch, best_step)) is not None:
        path = f"{folder.rstrip('/')}/{name}"
        try:
            if not folders.problem(path):
                return Kept(path, check_meta(folders.read(path)[0], path))
        except OSError as error:
            raise BadInputError(f"The checkpoint in '{path}' cannot be read: {error.strerror}.") from error
        names.remove(name)
    if epoch == "best" and pick(names, None, None) is not None:
        raise BadInputError(
            f"No best epoch was kept in '{folder}': the script reports nothing but losses of batches, or cannot be "
            "saved where it reports; export the last one with --epoch last."
        )
    raise BadInputError(
        f"There is no whole checkpoint in '{folder}': none was written yet, it was removed, or it lies on an agent's "
        "own disk; see docs/suspend-resume.md for which scripts have checkpoints, and --checkpoint-dir for where."
    )


def of_job(folder: str) -> Kept:
    """The model that a training job has trained: Keras', or the newest checkpoint of TensorFlow in its folder.

    Raises:
        BadInputError: if there is none.
    """
    try:
        kept = choose(folder, "last", None)
    except BadInputError:
        # Late: it imports TensorFlow.
        inside = glob.escape(folder)
        if "://" not in folder and not any(map(glob.glob, (f"{inside}/*.index", f"{inside}/fit-*/*.index"))):
            raise
        from dike.checkpoints import newest_whole

        found = glob.glob(f"{glob.escape(folder)}/fit-*")
        inner = sorted((path for path in found if not os.path.islink(path)), key=step_of)
        path = next(filter(None, map(newest_whole, [folder, *reversed(inner)])), None)
        if path is None:
            raise
        return Kept(path, {"kind": folders.TENSORFLOW, "step": step_of(path)})
    # A model is kept at the end of a fit; the job may have gone on since.
    checkpoints = glob.glob(f"{glob.escape(folder)}/fit-*/*.index")
    newest = max((step_of(path.removesuffix(".index")) for path in checkpoints), default=0)
    is_newer = newest > max(kept.step, kept.meta.get("checkpoint") or 0)
    return dataclasses.replace(kept, newer_step=newest if is_newer else None)


def export(kept: Kept, target: str, *, force: bool = False) -> None:
    """Writes a kept model.

    Args:
        kept: the model.
        target: a file `*.keras` or `*.weights.h5` for Keras models, else a folder.
        force: whether files that are there may be overwritten.

    Raises:
        BadInputError: if it cannot be written in this form, or something is in the way.
    """
    _check_source(kept)
    is_file = target.endswith((KERAS, WEIGHTS))
    if kept.suffix and not is_file:
        raise BadInputError(f"'{target}' is no name for a Keras model; let it end in .keras or .weights.h5.")
    if is_file and not kept.suffix:
        what = "what the script itself saved" if kept.meta["kind"] == "script" else "a checkpoint of TensorFlow"
        raise BadInputError(f"'{kept.path}' holds {what}, no Keras model; name a folder to export it to.")
    _check_target(target, is_file=is_file, force=force)
    try:
        if is_file:
            with _readable(kept):
                content = _keras_file(kept) if target.endswith(KERAS) else _weights(kept)
            _write_file(target, content)
            return
        _write_folder(target.rstrip("/"), kept)
    except plain_files.NotPlainError as error:
        raise _damaged(kept, str(error)) from error
    except OSError as error:
        _check_source(kept)
        raise BadInputError(f"The model cannot be written to '{target}': {_reason(error)}.") from error


def _damaged(kept: Kept, why: str) -> BadInputError:
    return BadInputError(f"The checkpoint in '{kept.path}' cannot be exported: {why}; nothing is written.")


@contextlib.contextmanager
def _readable(kept: Kept) -> Iterator[None]:
    """For what is read of a checkpoint, which a script may have written.

    Raises:
        BadInputError: if it is something else than what Dike writes.
    """
    try:
        yield
    except (zipfile.BadZipFile, zlib.error, EOFError, LookupError, TypeError, ValueError, AttributeError) as error:
        raise _damaged(kept, f"it is damaged ({one_line(error)})") from error
    except (NotImplementedError, RuntimeError, MemoryError) as error:
        # Archives packed in other ways, and arrays that say they are larger than any memory.
        raise _damaged(kept, one_line(error)) from error


def _check_source(kept: Kept) -> None:
    """Raises BadInputError if a trial's checkpoint is not there, or no longer: newer ones replace it."""
    if kept.meta["kind"] != folders.TENSORFLOW and (problem := folders.problem(kept.path)):
        raise BadInputError(f"It cannot be exported: {problem}.")


def _reason(error: OSError) -> str:
    if isinstance(error, shutil.Error) and error.args and isinstance(error.args[0], list) and error.args[0]:
        return str(error.args[0][0][-1])  # of the first file
    return error.strerror or str(error)


def load_into(kept: Kept, model: Any) -> None:
    """Gives a Keras model, built as in the script, the weights of a kept one.

    Raises:
        BadInputError: if no Keras model was kept.
    """
    if not kept.suffix:
        raise BadInputError(f"'{kept.path}' holds no Keras model; export it to a folder, and load it from there.")
    with tempfile.TemporaryDirectory(prefix="dike-export-") as folder:
        export(kept, path := os.path.join(folder, f"model{WEIGHTS}"))
        with warnings.catch_warnings():
            # The optimizer of a model that has only been compiled has no variables yet, and needs none of the trial's.
            warnings.filterwarnings("ignore", "Skipping variable loading for optimizer")
            model.load_weights(path)


def _check_target(target: str, *, is_file: bool, force: bool) -> None:
    if os.path.isdir(target) if is_file else os.path.isfile(target):
        other = "folder" if is_file else "file"
        raise BadInputError(f"'{target}' is a {other}; name another with -o.")
    is_there = os.path.exists(target) if is_file else os.path.isdir(target) and bool(os.listdir(target))
    if is_there and not force:
        raise BadInputError(f"'{target}' is there already; name another with -o, or overwrite it with --force.")


def _write_file(target: str, content: bytes) -> None:
    folder = os.path.dirname(target)
    if folder:
        os.makedirs(folder, exist_ok=True)
    partial = f"{target}.part"
    try:
        with open(partial, "wb") as file:
            file.write(content)
        os.replace(partial, target)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.remove(partial)


def _write_folder(target: str, kept: Kept) -> None:
    """Whole or not at all, where the folder is new."""
    above = os.path.dirname(target) or "."
    os.makedirs(above, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".dike-export-", dir=above, ignore_cleanup_errors=True) as folder:
        partial = f"{folder}/model"
        os.mkdir(partial)
        if kept.meta["kind"] == "script":
            with folders.to_read(f"{kept.path}/{SCRIPT}") as source:
                plain_files.copy_tree(source, partial)
        else:
            with _readable(kept):
                session_export.write(kept.path, kept.meta, partial)
        if os.path.isdir(target) and (os.path.islink(target) or os.listdir(target)):
            shutil.copytree(partial, target, dirs_exist_ok=True)
        else:
            os.replace(partial, target)


def _keras_file(kept: Kept) -> bytes:
    """A `.keras` file as Keras writes it."""
    with _opened_layout(kept) as layout:
        problem = plain_files.parse_json(layout.read(PLACES))["problem"]
        if problem:
            raise BadInputError(
                f"Keras cannot describe this model in a file ({problem}), so there are its weights alone: export them "
                "with -o best.weights.h5, and load them with model.load_weights into the model that the script builds."
            )
        whole = io.BytesIO()
        with zipfile.ZipFile(whole, "w") as archive:
            for name in layout.namelist():
                if name not in (PLACES, ARRAYS):
                    archive.writestr(name, layout.read(name))
            archive.writestr("model.weights.h5", _weights(kept))
    return whole.getvalue()


def _weights(kept: Kept) -> bytes:
    """A `.weights.h5` file as Keras writes it."""
    try:
        import h5py
    except ImportError:
        raise BadInputError("Exporting a Keras model needs h5py, which comes with Keras; install it here.") from None
    from dike.arrays import load_arrays

    with _opened_layout(kept) as layout:
        known = plain_files.parse_json(layout.read(PLACES))
        arrays = load_arrays(layout.read(ARRAYS)) if ARRAYS in layout.namelist() else {}
    if not known["groups"]:
        raise BadInputError(f"Keras could not say where this model's weights go in a file: {known['problem']}.")
    values = load_arrays(folders.read(kept.path)[1](VARIABLES))
    content = io.BytesIO()
    with h5py.File(content, "w") as file:
        for path, group in known["groups"].items():
            if group["name"] is None and not group["variables"]:
                continue
            place = file.require_group(f"{path}/vars".lstrip("/"))
            if group["name"] is not None:
                place.attrs["name"] = group["name"]
            for key, name in group["variables"].items():
                value = arrays[f"{path}:{key}"] if name is None else values[name]
                dataset = place.create_dataset(key, data=value)
                if value.dtype.name == "bfloat16":
                    dataset.attrs[_DTYPE] = "bfloat16"
    return content.getvalue()


@contextlib.contextmanager
def _opened_layout(kept: Kept) -> Iterator[zipfile.ZipFile]:
    try:
        content = folders.read(kept.path)[1](LAYOUT)
    except FileNotFoundError:
        _check_source(kept)
        raise _damaged(kept, f"it is damaged ({LAYOUT} is not in it)") from None
    with zipfile.ZipFile(io.BytesIO(content)) as layout:
        plain_files.check_archive(layout, len(content))
        yield layout
