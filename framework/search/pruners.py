"""What ends trials for good where a search is asked to (`--stop`): Optuna's pruners, and a patience as Keras has it."""

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
MEDIAN_AFTER = 5
"""So many trials must have finished before others are compared with them; Optuna's own number."""


@dataclass(frozen=True)
class Stop:
    """What ends trials.

    Attributes:
        kind: asha, median, patience or threshold.
        number: N or X; None where there is none.
    """

    kind: str
    number: float | None = None

    @property
    def compares(self) -> bool:
        """Whether a trial is judged by what others had after as many reports."""
        return self.kind in ("asha", "median")


def parse_stop(text: str) -> Stop:
    """Reads `asha`, `asha=4`, `median`, `patience=10` or `threshold=2.5`.

    Raises:
        BadInputError: if it is nothing of that.
    """
    kind, equals, value = (part.strip() for part in text.partition("="))
    if kind not in _KINDS:
        near = difflib.get_close_matches(kind, _KINDS, n=1)
        hint = f"did you mean {near[0]}?" if near else f"write {_FORMS}."
        raise BadInputError(f"--stop '{text}' names nothing that stops trials; {hint}")
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


class Judge:
    """Says which trials are to be stopped.

    Args:
        stop: by what rule.
        mode: whether the least or the greatest value is best.
    """

    def __init__(self, stop: Stop, mode: Mode) -> None:
        self._stop = stop
        self._mode = mode
        self._best: dict[int, tuple[float, int]] = {}
        """Trial -> its best value and which it was; a later one that is not known may have been as good."""
        self._pruner = self._make()

    def is_hopeless(
        self,
        study: optuna.Study,
        number: int,
        count: int,
        value: float,
        stored: Callable[[], FrozenTrial],
        *,
        is_kept: bool,
    ) -> bool:
        """Whether a trial is to be stopped.

        Args:
            study: its study.
            number: its number.
            count: how many values it has stated.
            value: the last of them.
            stored: gets the trial as the study has it.
            is_kept: whether it has this value; it keeps the same ones of all trials.
        """
        if self._stop.kind == "patience":
            return self._values_without_better(number, count, value, stored) >= (self._stop.number or 1)
        if not self._stop.compares:
            return self._prunes(study, _running({count: value}))
        return is_kept and self._prunes(study, stored())

    def forget(self, number: int) -> None:
        """The trial has ended."""
        self._best.pop(number, None)

    def _make(self) -> BasePruner:
        from optuna.pruners import MedianPruner, NopPruner, SuccessiveHalvingPruner, ThresholdPruner

        number = self._stop.number
        match self._stop.kind:
            case "asha":
                return SuccessiveHalvingPruner(min_resource=int(number or 1))
            case "median":
                return MedianPruner(n_startup_trials=MEDIAN_AFTER)
            case "patience":
                # Optuna's goes on for ever with a value that stands still, or is NaN.
                return NopPruner()
        return ThresholdPruner(upper=number) if self._mode == "min" else ThresholdPruner(lower=number)

    def _prunes(self, study: optuna.Study, trial: FrozenTrial) -> bool:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "All-NaN", RuntimeWarning)
            return self._pruner.prune(study, trial)

    def _values_without_better(self, number: int, count: int, value: float, stored: Callable[[], FrozenTrial]) -> int:
        """How many values a trial has stated since its best; NaN is the worst, and as good is not better."""
        best, at = self._best.get(number, (math.nan, 0))
        if number not in self._best:
            # The trial may have begun in another process, and the study keeps only some values of a long one.
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
