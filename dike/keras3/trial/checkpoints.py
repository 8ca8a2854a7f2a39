"""Checkpoints of trials that train with Keras 3 `fit`."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from typing import Any

from dike.arrays import dump_arrays, load_arrays
from dike.keras3.data import DataPosition
from dike.plain_values import dump_groups, load_groups
from dike.trial import folders
from dike.trial.export import LAYOUT, VARIABLES
from dike.trial.spec import TrialSpec

KIND = "keras"
_STATE, _ARRAYS = "state.json", "arrays.npz"


@dataclass
class FitState:
    """Position of a script in a `fit`.

    Attributes:
        fit: index of the call of `fit` in the script.
        is_finished: whether it has returned.
        epoch: current or next epoch.
        batch: finished batches of that epoch.
        step: batches trained by all `fit`s.
        evaluations: number of iterators over the validation data.
        logs: the last step's logs.
        callbacks: type name and packed attributes of each callback.
        finished: index of each earlier `fit` -> name of the checkpoint at its end.
        standing: the trial's objective (`Standing.to_json`).
        epochs: number of epochs that the `fit` was asked for.
        lost: names of changed attributes that could not be saved.
    """

    fit: int
    is_finished: bool
    epoch: int
    batch: int
    step: int
    data: DataPosition
    evaluations: int = 0
    logs: dict[str, float] = field(default_factory=dict)
    callbacks: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    randomness: dict[str, Any] = field(default_factory=dict)
    finished: dict[str, str] = field(default_factory=dict)
    standing: dict[str, Any] = field(default_factory=dict)
    epochs: int = 0
    lost: list[str] = field(default_factory=list)

    def can_extend(self, epochs: int) -> bool:
        """Returns whether it has trained all its epochs, and more are requested now."""
        return self.is_finished and 0 < self.epochs <= self.epoch < epochs


@dataclass(frozen=True)
class FitCheckpoint:
    """A checkpoint.

    Attributes:
        train_s: seconds of training before it.
        values: name of a variable -> its value.
        layout: other parts of Keras' model files (`dike.keras3.model_files`); empty after reading.
        is_copy: whether another trial wrote it, with other parameters.
        arrays: arrays that the callbacks' attributes refer to.
        data_arrays: arrays that the data's attributes refer to.
        iterator_files: state of the current data iterator; empty if not needed.
    """

    path: str
    train_s: float
    state: FitState
    values: dict[str, Any]
    arrays: list[Any]
    data_arrays: list[Any]
    iterator_files: dict[str, bytes]
    layout: bytes = b""
    is_copy: bool = False


def write(checkpoint: FitCheckpoint) -> None:
    """Writes a checkpoint, and deletes those it supersedes."""
    state = checkpoint.state
    files = {
        _STATE: json.dumps(dataclasses.asdict(state)).encode(),
        VARIABLES: dump_arrays(checkpoint.values),
        LAYOUT: checkpoint.layout,
        _ARRAYS: dump_groups({"callbacks": checkpoint.arrays, "data": checkpoint.data_arrays}),
        **checkpoint.iterator_files,
    }
    meta = {
        "kind": KIND,
        "step": state.step,
        "train_s": checkpoint.train_s,
        "needs": list(state.finished.values()),
        "iterator": sorted(checkpoint.iterator_files),
    }
    folders.write(checkpoint.path, files, meta)
    folders.prune(checkpoint.path)


def find(spec: TrialSpec) -> FitCheckpoint | None:
    path = folders.checkpoint_to_resume(spec)
    return None if path is None else read(path)


def read(path: str) -> FitCheckpoint | None:
    """Returns None if the checkpoint is of another kind of script.

    Raises:
        BadInputError: if it is not complete.
    """
    meta, content = folders.read(path)
    if meta["kind"] != KIND:
        return None
    saved = json.loads(content(_STATE))
    state = FitState(**{**saved, "data": DataPosition(**saved["data"])})
    groups = load_groups(content(_ARRAYS))
    values = load_arrays(content(VARIABLES))
    iterator_files = {name: content(name) for name in meta["iterator"]}
    return FitCheckpoint(
        path,
        meta["train_s"],
        state,
        values,
        groups["callbacks"],
        groups["data"],
        iterator_files,
        is_copy=meta.get(folders.COPIED, False),
    )
