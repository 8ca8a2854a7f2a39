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
    """Where a script is in a `fit`.

    Attributes:
        fit: which call of `fit` in the script, from 0.
        is_finished: whether it has returned.
        epoch: the epoch that is running, or the next.
        batch: batches of that epoch that are done.
        step: batches trained by all `fit`s.
        data: where it is in its data.
        evaluations: iterators made over its validation data.
        logs: the last step's figures.
        callbacks: of each callback its type's name and its attributes, packed.
        randomness: the random state.
        finished: earlier `fit`s by number, and the name of the checkpoint at the end of each.
        standing: what the trial's numbers came to (`Standing.to_json`).
        epochs: how many the `fit` was asked for.
        lost: names of what has changed and could not be saved.
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
        """Whether it has returned because all epochs were done, and more are asked for now."""
        return self.is_finished and 0 < self.epochs <= self.epoch < epochs


@dataclass(frozen=True)
class FitCheckpoint:
    """A checkpoint.

    Attributes:
        path: its folder.
        train_s: seconds of training until then.
        state: where the script was.
        values: name of a variable -> its value.
        layout: what else Keras' files of the model need (`dike.keras3.model_files`); empty when it has been read.
        arrays: those that the callbacks' attributes refer to.
        data_arrays: those that the data's attributes refer to.
        iterator_files: the state of the current iterator over the data; none where that is not needed.
    """

    path: str
    train_s: float
    state: FitState
    values: dict[str, Any]
    arrays: list[Any]
    data_arrays: list[Any]
    iterator_files: dict[str, bytes]
    layout: bytes = b""


def write(checkpoint: FitCheckpoint) -> None:
    """Writes a checkpoint, and removes those it makes superfluous."""
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
    """The checkpoint that a run goes on from; None to begin anew."""
    path = folders.checkpoint_to_resume(spec)
    return None if path is None else read(path)


def read(path: str) -> FitCheckpoint | None:
    """The checkpoint at `path`; None if it is of another kind of script.

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
    return FitCheckpoint(path, meta["train_s"], state, values, groups["callbacks"], groups["data"], iterator_files)
