"""Rules that stop trials (`--stop`): Optuna's pruners, and patience as in Keras."""

from __future__ import annotations

import difflib
import math
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dike.exceptions import BadInputError
from framework.search.records import Mode

if TYPE_CHECKING:
    import optuna
    from optuna.pruners import BasePruner
    from optuna.trial import FrozenTrial

_KINDS = ("asha", "median", "patience", "threshold")
_FORMS = "asha, asha=N, median, patience=N or threshold=X"
MEDIAN_MIN_TRIALS = 5
"""Finished trials before the median rule applies; Optuna's default."""


@dataclass(frozen=True)
class Stop:
    """A rule that stops trials.

    Attributes:
        kind: asha, median, patience or threshold.
        number: N or X; None if the rule has none.
    """

    kind: str
    number: float | None = None

    @property
    def compares(self) -> bool:
        """Whether a trial is compared with others after as many reports."""
        return self.kind in ("asha", "median")


def parse_stop(text: str) -> Stop:
    """Parses `asha`, `asha=4`, `median`, `patience=10` or `threshold=2.5`.

    Raises:
        BadInputError: if the text is none of these.
    """
    kind, equals, value = (part.strip() for part in text.partition("="))
    if kind not in _KINDS:
        near = difflib.get_close_matches(kind, _KINDS, n=1)
        hint = f"did you mean {near[0]}?" if near else f"write {_FORMS}."
        raise BadInputError(f"--stop '{text}' is not a rule that stops trials; {hint}")
    if kind == "median":
        if equals:
            raise BadInputError(f"--stop '{text}': median takes no number; write --stop median.")
        return Stop(kind)
    if kind == "asha" and not equals:
        return Stop(kind, 1)
    if kind == "threshold":
        try:
            number = float(value)
        except ValueError:
            number = math.nan
        if not math.isfinite(number):
            raise BadInputError(
                f"--stop '{text}' needs a number that no trial may be worse than; write --stop threshold=2.5."
            )
        return Stop(kind, number)
    if not re.fullmatch(r"[0-9]{1,9}", value) or int(value) < 1:
        raise BadInputError(f"--stop '{text}' needs a whole number of reports from 1 on; write --stop {kind}=10.")
    return Stop(kind, int(value))


class Pruner:
    """Decides which trials are stopped."""

    def __init__(self, stop: Stop, mode: Mode) -> None:
        self._stop = stop
        self._mode = mode
        self._best: dict[int, tuple[float, int]] = {}
        """Trial -> its best value, and the index of that value or of a later one that is not stored."""
        self._pruner = self._make()

    def prune(
        self,
        study: optuna.Study,
        number: int,
        count: int,
        value: float,
        stored: Callable[[], FrozenTrial],
        *,
        is_kept: bool,
    ) -> bool:
        """Takes a trial's newest value into account, and returns whether the trial is stopped.

        Args:
            study: its study.
            number: its number.
            count: number of values reported.
            value: the last of them.
            stored: loads the trial from the study.
            is_kept: whether the study stores this value; it stores the same ones of all trials.
        """
        if self._stop.kind == "patience":
            return self._values_without_better(number, count, value, stored) >= (self._stop.number or 1)
        if not self._stop.compares:
            return self._prunes(study, _running({count: value}))
        return is_kept and self._prunes(study, stored())

    def forget(self, number: int) -> None:
        self._best.pop(number, None)

    def _make(self) -> BasePruner:
        from optuna.pruners import MedianPruner, NopPruner, SuccessiveHalvingPruner, ThresholdPruner

        number = self._stop.number
        match self._stop.kind:
            case "asha":
                return SuccessiveHalvingPruner(min_resource=int(number or 1))
            case "median":
                return MedianPruner(n_startup_trials=MEDIAN_MIN_TRIALS)
            case "patience":
                # Optuna's never stops a trial whose value is constant or NaN.
                return NopPruner()
        return ThresholdPruner(upper=number) if self._mode == "min" else ThresholdPruner(lower=number)

    def _prunes(self, study: optuna.Study, trial: FrozenTrial) -> bool:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "All-NaN", RuntimeWarning)
            return self._pruner.prune(study, trial)

    def _values_without_better(self, number: int, count: int, value: float, stored: Callable[[], FrozenTrial]) -> int:
        """Returns how many values followed a trial's best one; NaN is the worst, and equal is not better."""
        best, at = self._best.get(number, (math.nan, 0))
        if number not in self._best:
            # The trial may have started under another process, and the study stores only some values of a long one.
            known = stored().intermediate_values
            for each in range(1, count):
                if each not in known:
                    at = each
                elif self._is_better(known[each], best):
                    best, at = known[each], each
        if self._is_better(value, best):
            best, at = value, count
        self._best[number] = best, at
        return count - at

    def _is_better(self, value: float, best: float) -> bool:
        if math.isnan(value) or math.isnan(best):
            return math.isnan(best) and not math.isnan(value)
        return value < best if self._mode == "min" else value > best


def _running(values: dict[int, float]) -> FrozenTrial:
    from optuna.trial import TrialState, create_trial

    return create_trial(state=TrialState.RUNNING, intermediate_values=values)
