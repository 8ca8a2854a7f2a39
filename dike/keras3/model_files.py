"""Stores what Keras' own model files contain besides the values of variables, for `dike export`.

A `.keras` file is an archive of configuration, assets and weights. Here, the configuration, the assets and the
positions of the variables form one small file (`LAYOUT` of `dike.trial.export`), the same for all checkpoints of a
training. The values are in the checkpoint anyway.
"""

from __future__ import annotations

import io
import json
import warnings
import zipfile
from dataclasses import dataclass
from typing import Any

from dike.arrays import dump_arrays
from dike.keras3.model import named_values, optimizers_of
from dike.trial import folders
from dike.trial.export import ARRAYS, LAYOUT, VARIABLES, WEIGHT_MAP


@dataclass(frozen=True)
class ModelSnapshot:
    """A model's state after a step.

    `value` is the objective if the model is the best, `checkpoint` the number of a job's last checkpoint.
    """

    step: int
    train_s: float
    values: dict[str, Any]
    layout: bytes
    value: float | None = None
    checkpoint: int | None = None

    def write(self, path: str) -> None:
        meta = {name: getattr(self, name) for name in ("step", "train_s", "value", "checkpoint")}
        files = {VARIABLES: dump_arrays(self.values), LAYOUT: self.layout}
        folders.write(path, files, {**meta, "kind": folders.MODEL})


class ModelFiles:
    """A Keras 3 model's files without the values of variables."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._made: tuple[list[str], bytes] | None = None

    def layout(self) -> bytes:
        """Returns the layout file of the built and compiled model; without positions if Keras cannot give them."""
        names = list(named_values(self._model))
        if self._made is not None and self._made[0] == names:
            return self._made[1]
        try:
            content, is_whole = _layout(self._model)
        except Exception as error:  # raised by a model's own methods, or by another version of Keras
            content, is_whole = _refusal(f"{type(error).__name__}: {error}"), True
        # Arrays that a layer computes may change from step to step.
        self._made = (names, content) if is_whole else None
        return content


def _refusal(problem: str) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr(WEIGHT_MAP, json.dumps({"groups": {}, "problem": problem}))
    return file.getvalue()


def _layout(model: Any) -> tuple[bytes, bool]:
    """Returns the file, and whether it contains no values."""
    from keras.src.saving import saving_lib

    class PositionStore(saving_lib.NpzIOStore):
        """Records the positions of the variables instead of writing them."""

        def __init__(self) -> None:
            self.groups: dict[str, dict[str, Any]] = {}
            self.named: dict[str, str] = {}

        def make(self, path: str, metadata: Any = None) -> dict[str, Any]:
            if metadata:
                self.named[path] = metadata["name"]
            return self.groups.setdefault(path, {})

    positions = PositionStore()
    names = {id(variable): name for name, variable in named_values(model).items()}
    arrays: dict[str, Any] = {}
    groups: dict[str, Any] = {}
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        assets = saving_lib.DiskIOStore("assets", archive=archive, mode="w")
        try:
            saving_lib._save_state(model, positions, assets, "", set())
        finally:
            assets.close()
        optimizers = optimizers_of(model)
        for path, stored in positions.groups.items():
            # Optimizers give values instead of variables, in the order of their variables.
            optimizer = next((each for each in optimizers if getattr(model, path, None) is each), None)
            found = dict(enumerate(optimizer.variables)) if optimizer is not None else {}
            group: dict[str, str | None] = {}
            for key, value in stored.items():
                variable = found[int(key)] if found else value
                group[key] = names.get(id(variable))
                if group[key] is None:
                    arrays[f"{path}:{key}"] = _array(value)
            groups[path] = {"name": positions.named.get(path), "variables": group}
        known: dict[str, Any] = {"groups": groups, "problem": ""}
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                config, metadata = saving_lib._serialize_model_as_json(model)
        except Exception as error:  # raised by the script's own get_config
            known["problem"] = f"{type(error).__name__}: {error}".partition("\n")[0]
        else:
            archive.writestr("config.json", config)
            archive.writestr("metadata.json", metadata)
        archive.writestr(WEIGHT_MAP, json.dumps(known))
        if arrays:
            archive.writestr(ARRAYS, dump_arrays(arrays))
    return file.getvalue(), not arrays


def _array(value: Any) -> Any:
    from keras import ops

    return ops.convert_to_numpy(value)
