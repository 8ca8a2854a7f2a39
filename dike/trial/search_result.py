"""What a search has found, as `dike.tune` returns it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dike.trial.spec import Value


@dataclass(frozen=True)
class TrialResult:
    """One trial.

    Attributes:
        number: its number in the search, from 0.
        parameters: name -> value.
        state: `finished`, `stopped` (for good, by `stop=`), `failed`, or where it stood when the search ended early.
        step: training steps done.
        loss: its last training loss; None if it reported none.
        value: the objective; None if it reported none.
        metrics: the newest value of each metric.
        checkpoint: path of its newest checkpoint; None if it has none.
        train_s: seconds trained.
        slot_s: seconds for which it held a slot.
        runs: how often it was started.
        error: why it failed; empty if it did not.
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

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> TrialResult:
        """Reads a trial as `dike tune --format json` prints it."""
        return cls(
            number=values["number"],
            parameters=dict(values["parameters"]),
            state=values["state"],
            step=values["step"],
            loss=_number(values["loss"]),
            value=_number(values["value"]),
            metrics={name: float(value) for name, value in values["metrics"].items()},
            checkpoint=values["checkpoint"],
            train_s=values["train_s"],
            slot_s=values["slot_s"],
            runs=values["runs"],
            error=values["error"],
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
            best=TrialResult.from_json(values["best"]),
            trials=tuple(map(TrialResult.from_json, values["trials"])),
            checkpoint_dir=values["checkpoint_dir"],
        )


def _number(value: float | str | None) -> float | None:
    """Numbers that JSON cannot hold are text."""
    return None if value is None else float(value)
