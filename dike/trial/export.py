"""Exports a stored model: as a Keras file, a TensorFlow checkpoint, or the files that a script's `save` wrote.

It neither runs the script nor builds the Keras model, so the model's classes need not be importable.
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
"""File of a checkpoint: a `.keras` archive without the weights, plus `WEIGHT_MAP`."""
VARIABLES = "variables.npz"
"""File of a checkpoint: values of all variables by name."""
WEIGHT_MAP = "dike-places.json"
"""Positions in Keras' weights file: group path -> key -> variable name, or None for one of `ARRAYS`. Also why there is
no configuration, if so."""
ARRAYS = "arrays.npz"
"""Arrays that layers compute when the model is saved, by path and key."""
SCRIPT = "script"
"""Folder of a checkpoint that the script's own `save` wrote (`dike.checkpoint`)."""

KERAS, WEIGHTS = ".keras", ".weights.h5"
_DTYPE = "dtype"


@dataclass(frozen=True)
class OptionNames:
    """How the caller writes the options of an export, for messages.

    Attributes:
        target: the file or folder to write.
        overwrite: overwrites existing files.
        last_epoch: selects the last epoch.
        checkpoint_dir: the option of a search that sets the folder of its checkpoints.
    """

    target: str
    overwrite: str
    last_epoch: str
    checkpoint_dir: str


COMMAND_LINE = OptionNames("-o", "--force", "--epoch last", "--checkpoint-dir")
PYTHON = OptionNames("path", "force=True", "epoch='last'", "checkpoint_dir")
"""Arguments of `TrialResult.export`, `TrialResult.load_into` and `dike.tune`."""


@dataclass(frozen=True)
class StoredModel:
    """A model that a trial or a job has stored.

    Attributes:
        path: folder of the checkpoint.
        meta: its metadata.
        newer_step: of a job, the step of a newer checkpoint without a model; None if there is none.
    """

    path: str
    meta: dict[str, Any]
    newer_step: int | None = None

    @property
    def step(self) -> int:
        return int(self.meta["step"])

    @property
    def value(self) -> float | None:
        """Objective, if the model was stored because it was the best; else None."""
        return self.meta.get("value")

    @property
    def suffix(self) -> str:
        """File name suffix of the exported model; empty if it is exported as a folder."""
        return "" if self.meta["kind"] in ("graph", "script", folders.TENSORFLOW) else KERAS


def pick_checkpoint(names: Iterable[str], epoch: str | None, best_step: int | None) -> str | None:
    """Returns the name of the checkpoint with the wanted model; None if there is none.

    Args:
        names: names of a trial's complete checkpoints.
        epoch: `best` or `last`; None for the best, or the last if no best model was stored.
        best_step: step of the trial's best value; None if unknown.
    """
    names = list(names)
    last = max((folders.checkpoint_number(name), name) for name in [*names, ""])[1] or None
    # The one of the newest run, unless another has exactly that step.
    known = sorted((folders.best_number(name), name) for name in names)
    bests = [(step, name) for (run, step), name in known if run >= 0]
    best = next((name for step, name in reversed(bests) if step == best_step), None)
    # A trial always writes a checkpoint at its end.
    if best is None and last is not None and folders.checkpoint_number(last)[0] == best_step:
        best = last
    if best is None and bests:
        best = bests[-1][1]
    return last if epoch == "last" else best or (last if epoch is None else None)


def check_meta(meta: Any, path: str) -> dict[str, Any]:
    """Checks the fields that an export needs: a script may have written something else.

    Raises:
        BadInputError: if one is missing or has another type.
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
        raise BadInputError(f"The checkpoint in '{path}' is damaged: {folders.META} has unexpected content.")
    return meta


def find_model(
    folder: str, epoch: str | None, best_step: int | None, *, option_names: OptionNames = COMMAND_LINE
) -> StoredModel:
    """Finds a stored model in a trial's folder; see `pick_checkpoint`.

    Raises:
        BadInputError: if there is none.
    """
    names = folders.checkpoint_names(folder)
    while (name := pick_checkpoint(names, epoch, best_step)) is not None:
        path = f"{folder.rstrip('/')}/{name}"
        try:
            if not folders.problem(path):
                return StoredModel(path, check_meta(folders.read(path)[0], path))
        except OSError as error:
            raise BadInputError(f"The checkpoint in '{path}' cannot be read: {error.strerror}.") from error
        names.remove(name)
    if epoch == "best" and pick_checkpoint(names, None, None) is not None:
        raise BadInputError(
            f"No model of a best epoch is stored in '{folder}': the script reports only losses of batches, or cannot "
            f"be saved where it reports; select the last one with {option_names.last_epoch}."
        )
    raise BadInputError(
        f"There is no whole checkpoint in '{folder}': none was written yet, it was deleted, or it is on an agent's "
        "local disk; see docs/suspend-resume.md for which scripts have checkpoints, and set "
        f"{option_names.checkpoint_dir} to a folder that this machine can read."
    )


def find_job_model(folder: str) -> StoredModel:
    """Finds the stored Keras model of a training job, or the newest TensorFlow checkpoint in its folder.

    Raises:
        BadInputError: if there is none.
    """
    try:
        stored = find_model(folder, "last", None)
    except BadInputError:
        inside = glob.escape(folder)
        if "://" not in folder and not any(map(glob.glob, (f"{inside}/*.index", f"{inside}/fit-*/*.index"))):
            raise
        from dike.checkpoints import newest_intact  # imports TensorFlow

        found = glob.glob(f"{glob.escape(folder)}/fit-*")
        inner = sorted((path for path in found if not os.path.islink(path)), key=step_of)
        path = next(filter(None, map(newest_intact, [folder, *reversed(inner)])), None)
        if path is None:
            raise
        return StoredModel(path, {"kind": folders.TENSORFLOW, "step": step_of(path)})
    # A model is stored at the end of a fit; the job may have trained since.
    checkpoints = glob.glob(f"{glob.escape(folder)}/fit-*/*.index")
    newest = max((step_of(path.removesuffix(".index")) for path in checkpoints), default=0)
    is_newer = newest > max(stored.step, stored.meta.get("checkpoint") or 0)
    return dataclasses.replace(stored, newer_step=newest if is_newer else None)


def export(stored: StoredModel, target: str, *, force: bool = False, option_names: OptionNames = COMMAND_LINE) -> None:
    """Writes a stored model to a file `*.keras` or `*.weights.h5`, or to a folder if it is not a Keras model.

    Raises:
        BadInputError: if it cannot be written in this form, or the target exists and `force` is not set.
    """
    _check_source(stored)
    is_file = target.endswith((KERAS, WEIGHTS))
    if stored.suffix and not is_file:
        raise BadInputError(f"'{target}' is not a file name of a Keras model; end it in .keras or .weights.h5.")
    if is_file and not stored.suffix:
        what = "files that the script saved" if stored.meta["kind"] == "script" else "a checkpoint of TensorFlow"
        raise BadInputError(f"'{stored.path}' holds {what}, not a Keras model; name a folder to export it to.")
    _check_target(target, is_file=is_file, force=force, option_names=option_names)
    try:
        if is_file:
            with _readable(stored):
                content = _keras_file(stored) if target.endswith(KERAS) else _weights(stored)
            _write_file(target, content)
            return
        _write_folder(target.rstrip("/"), stored)
    except plain_files.NotPlainError as error:
        raise _damaged(stored, str(error)) from error
    except OSError as error:
        _check_source(stored)
        raise BadInputError(f"The model cannot be written to '{target}': {_reason(error)}.") from error


def _damaged(stored: StoredModel, why: str) -> BadInputError:
    return BadInputError(f"The checkpoint in '{stored.path}' cannot be exported: {why}; nothing is written.")


@contextlib.contextmanager
def _readable(stored: StoredModel) -> Iterator[None]:
    """Converts errors of reading a checkpoint, which a script may have written, to BadInputError."""
    try:
        yield
    except (zipfile.BadZipFile, zlib.error, EOFError, LookupError, TypeError, ValueError, AttributeError) as error:
        raise _damaged(stored, f"it is damaged ({one_line(error)})") from error
    except (NotImplementedError, RuntimeError, MemoryError) as error:
        # Unsupported archive formats, and arrays that claim to be larger than memory.
        raise _damaged(stored, one_line(error)) from error


def _check_source(stored: StoredModel) -> None:
    """Raises if a trial's checkpoint does not exist any more: newer ones replace it."""
    if stored.meta["kind"] != folders.TENSORFLOW and (problem := folders.problem(stored.path)):
        raise BadInputError(f"It cannot be exported: {problem}.")


def _reason(error: OSError) -> str:
    if isinstance(error, shutil.Error) and error.args and isinstance(error.args[0], list) and error.args[0]:
        return str(error.args[0][0][-1])  # the first file's error
    return error.strerror or str(error)


def load_into(stored: StoredModel, model: Any) -> None:
    """Loads stored weights into a Keras model that is built as in the script.

    Raises:
        BadInputError: if the stored model is not a Keras model.
    """
    if not stored.suffix:
        raise BadInputError(f"'{stored.path}' holds no Keras model; export it to a folder, and load it from there.")
    with tempfile.TemporaryDirectory(prefix="dike-export-") as folder:
        export(stored, path := os.path.join(folder, f"model{WEIGHTS}"))
        with warnings.catch_warnings():
            # The optimizer of a model that has not trained has no variables yet, and needs none of the trial's.
            warnings.filterwarnings("ignore", "Skipping variable loading for optimizer")
            model.load_weights(path)


def _check_target(target: str, *, is_file: bool, force: bool, option_names: OptionNames) -> None:
    if os.path.isdir(target) if is_file else os.path.isfile(target):
        other = "folder" if is_file else "file"
        raise BadInputError(f"'{target}' is a {other}; name another with {option_names.target}.")
    is_there = os.path.exists(target) if is_file else os.path.isdir(target) and bool(os.listdir(target))
    if is_there and not force:
        raise BadInputError(
            f"'{target}' exists already; name another with {option_names.target}, or overwrite it with "
            f"{option_names.overwrite}."
        )


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


def _write_folder(target: str, stored: StoredModel) -> None:
    above = os.path.dirname(target) or "."
    os.makedirs(above, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".dike-export-", dir=above, ignore_cleanup_errors=True) as folder:
        partial = f"{folder}/model"
        os.mkdir(partial)
        if stored.meta["kind"] == "script":
            with folders.local_copy(f"{stored.path}/{SCRIPT}") as source:
                plain_files.copy_tree(source, partial)
        else:
            with _readable(stored):
                session_export.write(stored.path, stored.meta, partial)
        if os.path.isdir(target) and (os.path.islink(target) or os.listdir(target)):
            shutil.copytree(partial, target, dirs_exist_ok=True)
        else:
            os.replace(partial, target)


def _keras_file(stored: StoredModel) -> bytes:
    with _opened_layout(stored) as layout:
        problem = plain_files.parse_json(layout.read(WEIGHT_MAP))["problem"]
        if problem:
            raise BadInputError(
                f"Keras cannot describe this model in a file ({problem}), so only its weights are stored: export them "
                "to best.weights.h5, and load them with model.load_weights into the model that the script builds."
            )
        whole = io.BytesIO()
        with zipfile.ZipFile(whole, "w") as archive:
            for name in layout.namelist():
                if name not in (WEIGHT_MAP, ARRAYS):
                    archive.writestr(name, layout.read(name))
            archive.writestr("model.weights.h5", _weights(stored))
    return whole.getvalue()


def _weights(stored: StoredModel) -> bytes:
    try:
        import h5py
    except ImportError:
        raise BadInputError("Exporting a Keras model needs h5py, which comes with Keras; install it here.") from None
    from dike.arrays import load_arrays

    with _opened_layout(stored) as layout:
        known = plain_files.parse_json(layout.read(WEIGHT_MAP))
        arrays = load_arrays(layout.read(ARRAYS)) if ARRAYS in layout.namelist() else {}
    if not known["groups"]:
        raise BadInputError(f"Keras could not say where this model's weights go in a file: {known['problem']}.")
    values = load_arrays(folders.read(stored.path)[1](VARIABLES))
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
def _opened_layout(stored: StoredModel) -> Iterator[zipfile.ZipFile]:
    try:
        content = folders.read(stored.path)[1](LAYOUT)
    except FileNotFoundError:
        _check_source(stored)
        raise _damaged(stored, f"it is damaged ({LAYOUT} is not in it)") from None
    with zipfile.ZipFile(io.BytesIO(content)) as layout:
        plain_files.check_archive(layout, len(content))
        yield layout
