"""The result of a search, as `dike.tune` returns it."""

from __future__ import annotations

import html
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from dike.exceptions import BadInputError
from dike.trial import export
from dike.trial.spec import Value

if TYPE_CHECKING:
    import pandas

Model = TypeVar("Model")


@dataclass(frozen=True)
class TrialResult:
    """One trial.

    Attributes:
        number: number in the search, from 0.
        parameters: name -> value.
        state: `finished`, `stopped` (by `stop=`), `failed`, or the state when the search ended early.
        step: training steps done.
        loss: last training loss; None if it reported none.
        value: the objective, last or best as `--value` says; None if it reported none.
        best_value, best_step: the best value reported and its step; None if it reported none.
        metrics: newest value of each metric.
        checkpoint: path of the newest checkpoint; None if there is none.
        train_s: seconds trained.
        slot_s: seconds in a slot.
        runs: number of runs.
        error: why it failed; empty if it did not.
        folder: folder of its checkpoints and of the model of its best epoch.
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
        """Loads the weights of the trial's best epoch into a Keras model that is built as in the script.

        Args:
            model: the model.
            epoch: `best` or `last`; None for the best, or the last if no best model was stored.

        Returns:
            The model. An optimizer that has not trained yet stays unchanged.

        Raises:
            BadInputError: if no such model can be read from this machine.
        """
        export.load_into(_stored_model(self, epoch), model)
        return model

    def export(self, path: str | os.PathLike[str], *, epoch: str | None = None, force: bool = False) -> None:
        """Writes the model of the trial's best epoch, as `dike export` does.

        Args:
            path: a file `*.keras` or `*.weights.h5`; a folder for scripts that do not train with Keras.
            epoch: as in `load_into`.
            force: whether to overwrite existing files.

        Raises:
            BadInputError: if no such model can be read from this machine, or the target exists.
        """
        export.export(_stored_model(self, epoch), os.fspath(path), force=force, option_names=export.PYTHON)

    @classmethod
    def from_json(cls, values: Mapping[str, Any], checkpoint_dir: str) -> TrialResult:
        """Reads a trial in the output of `dike tune --format json`."""
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
        name: the search's name, for `dike trials`, `dike plot` and `dike tune --resume`.
        complete: whether every trial has ended.
        best: the trial with the best value.
        trials: all trials, by number.
        checkpoint_dir: folder of the trials' checkpoints.
    """

    name: str
    complete: bool
    best: TrialResult
    trials: tuple[TrialResult, ...]
    checkpoint_dir: str

    @property
    def best_params(self) -> dict[str, Value]:
        return self.best.parameters

    @property
    def best_value(self) -> float:
        """Objective of the best trial; NaN if it has none."""
        return math.nan if self.best.value is None else self.best.value

    def to_dataframe(self) -> pandas.DataFrame:
        """Returns a row for each trial, the best first, with columns as in Optuna: `value`, `params_lr`, `state` ...

        Raises:
            BadInputError: if pandas is not installed.
        """
        try:
            import pandas
        except ImportError:
            raise BadInputError("to_dataframe needs pandas, which is not installed; pip install pandas.") from None
        return pandas.DataFrame([_row(trial) for trial in self._ranked()])

    def _repr_html_(self) -> str:
        """Called by notebooks."""
        rows = [_row(trial) for trial in self._ranked()]
        names = list(dict.fromkeys(name for row in rows for name, value in row.items() if value not in ("", None)))
        head = "".join(f"<th>{html.escape(name)}</th>" for name in names)
        body = "".join(
            f"<tr>{''.join(f'<td>{html.escape(_shown(row.get(name)))}</td>' for name in names)}</tr>" for row in rows
        )
        return (
            f"<p>Search {html.escape(self.name)}: the best trial is {self.best.number}.</p>"
            f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
        )

    def _ranked(self) -> list[TrialResult]:
        """Returns the best trial, other finished ones by value, and then the rest by number."""
        finished = [trial for trial in self.trials if trial.state == "finished" and trial.value == trial.value]
        values = [trial.value for trial in finished if trial.value is not None]
        # The best one shows whether greater is better.
        sign = -1 if values and self.best.value == max(values) else 1
        order = {trial.number: sign * (trial.value or 0.0) for trial in finished if trial.value is not None}
        best = self.best.number
        return sorted(
            self.trials,
            key=lambda trial: (
                trial.number != best,
                trial.number not in order,
                order.get(trial.number, 0.0),
                trial.number,
            ),
        )

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> SearchResult:
        """Reads the output of `dike tune --format json`; at least one trial must have succeeded."""
        return cls(
            name=values["name"],
            complete=values["complete"],
            best=TrialResult.from_json(values["best"], values["checkpoint_dir"]),
            trials=tuple(TrialResult.from_json(trial, values["checkpoint_dir"]) for trial in values["trials"]),
            checkpoint_dir=values["checkpoint_dir"],
        )


def _row(trial: TrialResult) -> dict[str, Any]:
    return {
        "number": trial.number,
        "value": trial.value,
        **{f"params_{name}": value for name, value in trial.parameters.items()},
        "state": trial.state,
        "best_value": trial.best_value,
        "best_step": trial.best_step,
        "step": trial.step,
        "loss": trial.loss,
        **{f"metrics_{name}": value for name, value in trial.metrics.items()},
        "train_s": trial.train_s,
        "slot_s": trial.slot_s,
        "checkpoint": trial.checkpoint,
        "error": trial.error,
    }


def _shown(value: object) -> str:
    return "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


def _stored_model(trial: TrialResult, epoch: str | None) -> export.StoredModel:
    return export.find_model(trial.folder, epoch, trial.best_step, option_names=export.PYTHON)


def _number(values: Mapping[str, Any], name: str) -> float | None:
    """Reads a number; those that JSON cannot represent are in `not_finite`, as text."""
    value = values["not_finite"].get(name, values[name])
    return None if value is None else float(value)


def _metric(values: Mapping[str, Any], name: str) -> float:
    return float(values["not_finite"].get(f"metrics.{name}", values["metrics"][name]))
