"""What a search has found, as `dike.tune` returns it."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from dike.trial import export
from dike.trial.spec import Value

Model = TypeVar("Model")


@dataclass(frozen=True)
class TrialResult:
    """One trial.

    Attributes:
        number: its number in the search, from 0.
        parameters: name -> value.
        state: `finished`, `stopped` (for good, by `stop=`), `failed`, or where it stood when the search ended early.
        step: training steps done.
        loss: its last training loss; None if it reported none.
        value: the objective, as it was reported last or the best of it (`--value`); None if it reported none.
        best_value, best_step: the best that it ever reported, and after how many steps; None before.
        metrics: the newest value of each metric.
        checkpoint: path of its newest checkpoint; None if it has none.
        train_s: seconds trained.
        slot_s: seconds for which it held a slot.
        runs: how often it was started.
        error: why it failed; empty if it did not.
        folder: its checkpoints, and the model of its best epoch.
    """

    number: int
    parameters: dict[str, Value]
    state: str
    step: int
    loss: float | None
    value: float | None
    metrics: dict[str, float]
    checkpoint: str | None
    train_s: float
    slot_s: float
    runs: int
    error: str
    best_value: float | None = None
    best_step: int | None = None
    folder: str = ""

    def load_into(self, model: Model, *, epoch: str | None = None) -> Model:
        """Gives a Keras model, built as in the script, the weights of the trial's best epoch.

        Args:
            model: the model.
            epoch: `best` or `last`; None for the best, or the last where no best one was kept.

        Returns:
            The model. An optimizer that has not trained yet stays as it was compiled.

        Raises:
            BadInputError: if there is no such model to be had here.
        """
        export.load_into(export.choose(self.folder, epoch, self.best_step), model)
        return model

    def export(self, path: str | os.PathLike[str], *, epoch: str | None = None, force: bool = False) -> None:
        """Writes the model of the trial's best epoch, as `dike export` does.

        Args:
            path: a file `*.keras` or `*.weights.h5`; a folder for scripts that do not train with Keras.
            epoch: as in `load_into`.
            force: whether files that are there may be overwritten.

        Raises:
            BadInputError: if there is no such model to be had here, or something is in the way.
        """
        export.export(export.choose(self.folder, epoch, self.best_step), os.fspath(path), force=force)

    @classmethod
    def from_json(cls, values: Mapping[str, Any], checkpoint_dir: str) -> TrialResult:
        """Reads a trial as `dike tune --format json` prints it.

        Args:
            values: what is printed of the trial.
            checkpoint_dir: folder of the search's checkpoints.
        """
        return cls(
            number=values["number"],
            parameters=dict(values["parameters"]),
            state=values["state"],
            step=values["step"],
            loss=_number(values, "loss"),
            value=_number(values, "value"),
            metrics={name: _metric(values, name) for name in values["metrics"]},
            checkpoint=values["checkpoint"],
            train_s=values["train_s"],
            slot_s=values["slot_s"],
            runs=values["runs"],
            error=values["error"],
            best_value=_number(values, "best_value"),
            best_step=values["best_step"],
            folder=f"{checkpoint_dir.rstrip('/')}/trial-{values['number']}",
        )


@dataclass(frozen=True)
class SearchResult:
    """A search.

    Attributes:
        name: what `dike trials`, `dike plot` and `dike tune --resume` know it by.
        complete: whether every trial has ended.
        best: the trial with the best value.
        trials: all of them, by number.
        checkpoint_dir: folder of the trials' checkpoints.
    """

    name: str
    complete: bool
    best: TrialResult
    trials: tuple[TrialResult, ...]
    checkpoint_dir: str

    @property
    def best_params(self) -> dict[str, Value]:
        """Parameters of the best trial."""
        return self.best.parameters

    @property
    def best_value(self) -> float:
        """The objective's value of the best trial."""
        return math.nan if self.best.value is None else self.best.value

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> SearchResult:
        """Reads what `dike tune --format json` prints of a search in which a trial has succeeded."""
        return cls(
            name=values["name"],
            complete=values["complete"],
            best=TrialResult.from_json(values["best"], values["checkpoint_dir"]),
            trials=tuple(TrialResult.from_json(trial, values["checkpoint_dir"]) for trial in values["trials"]),
            checkpoint_dir=values["checkpoint_dir"],
        )


def _number(values: Mapping[str, Any], name: str) -> float | None:
    """A figure; those that JSON cannot hold are in `not_finite`, as text."""
    value = values["not_finite"].get(name, values[name])
    return None if value is None else float(value)


def _metric(values: Mapping[str, Any], name: str) -> float:
    return float(values["not_finite"].get(f"metrics.{name}", values["metrics"][name]))
