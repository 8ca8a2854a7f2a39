"""What Keras' own files of a model hold besides the values of its variables: kept in checkpoints, for `dike export`.

A `.keras` file is an archive of the model's configuration, its assets and its weights. Here it is taken apart: the
configuration, the assets and the places of the variables make one small file (`LAYOUT` of `dike.trial.export`), the
same for all checkpoints of a training; the values are in the checkpoint anyway.
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
from dike.trial.export import ARRAYS, LAYOUT, WEIGHT_MAP, VARIABLES


@dataclass(frozen=True)
class ModelSnapshot:
    """A model as it was after a step.

    Attributes:
        step, train_s: steps done and seconds trained then.
        values: name of a variable -> its value.
        layout: `ModelFiles.layout`.
        value: the objective's value then, where that was the best; else None.
        checkpoint: the number of a job's last checkpoint before; None where there is none.
    """

    step: int
    train_s: float
    values: dict[str, Any]
    layout: bytes
    value: float | None = None
    checkpoint: int | None = None

    def write(self, path: str) -> None:
        """Writes it to a folder."""
        meta = {name: getattr(self, name) for name in ("step", "train_s", "value", "checkpoint")}
        files = {VARIABLES: dump_arrays(self.values), LAYOUT: self.layout}
        folders.write(path, files, {**meta, "kind": folders.MODEL})


class ModelFiles:
    """A model's files, less the values.

    Args:
        model: a Keras 3 model.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._made: tuple[list[str], bytes] | None = None

    def layout(self) -> bytes:
        """The model as it is now, built and compiled; empty where Keras cannot say where its variables go."""
        names = list(named_values(self._model))
        if self._made is not None and self._made[0] == names:
            return self._made[1]
        try:
            content, is_whole = _layout(self._model)
        except Exception as error:  # what a model's own methods raise, or a Keras that is made differently
            content, is_whole = _refusal(f"{type(error).__name__}: {error}"), True
        # Arrays that a layer has computed may change from step to step.
        self._made = (names, content) if is_whole else None
        return content


def _refusal(problem: str) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr(WEIGHT_MAP, json.dumps({"groups": {}, "problem": problem}))
    return file.getvalue()


def _layout(model: Any) -> tuple[bytes, bool]:
    """The file, and whether it holds no values."""
    from keras.src.saving import saving_lib

    class Places(saving_lib.NpzIOStore):
        """Is given variables, and notes where."""

        def __init__(self) -> None:
            self.groups: dict[str, dict[str, Any]] = {}
            self.named: dict[str, str] = {}

        def make(self, path: str, metadata: Any = None) -> dict[str, Any]:
            if metadata:
                self.named[path] = metadata["name"]
            return self.groups.setdefault(path, {})

    places = Places()
    names = {id(variable): name for name, variable in named_values(model).items()}
    arrays: dict[str, Any] = {}
    groups: dict[str, Any] = {}
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        assets = saving_lib.DiskIOStore("assets", archive=archive, mode="w")
        try:
            saving_lib._save_state(model, places, assets, "", set())
        finally:
            assets.close()
        optimizers = optimizers_of(model)
        for path, stored in places.groups.items():
            # Optimizers hand out values, in the order of their variables.
            optimizer = next((each for each in optimizers if getattr(model, path, None) is each), None)
            found = dict(enumerate(optimizer.variables)) if optimizer is not None else {}
            group: dict[str, str | None] = {}
            for key, value in stored.items():
                variable = found[int(key)] if found else value
                group[key] = names.get(id(variable))
                if group[key] is None:
                    arrays[f"{path}:{key}"] = _array(value)
            groups[path] = {"name": places.named.get(path), "variables": group}
        known: dict[str, Any] = {"groups": groups, "problem": ""}
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                config, metadata = saving_lib._serialize_model_as_json(model)
        except Exception as error:  # what a get_config of the script's own raises
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
