"""What ends trials for good where a search is asked to (`--stop`): Optuna's pruners."""

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
        from optuna.exceptions import ExperimentalWarning

        self._stop = stop
        self._mode = mode
        self._newest: dict[int, dict[int, float]] = {}
        """Trial -> its newest values by their count, and the best of those before."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ExperimentalWarning)
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
        if self._stop.compares:
            return is_kept and self._pruner.prune(study, stored())
        if number not in self._newest:
            # The trial may have begun in another process.
            self._newest[number] = dict(stored().intermediate_values)
        return self._pruner.prune(study, self._alone(self._newest[number], count, value))

    def forget(self, number: int) -> None:
        """The trial has ended."""
        self._newest.pop(number, None)

    def _make(self) -> BasePruner:
        from optuna.pruners import MedianPruner, PatientPruner, SuccessiveHalvingPruner, ThresholdPruner

        number = self._stop.number
        match self._stop.kind:
            case "asha":
                return SuccessiveHalvingPruner(min_resource=int(number or 1))
            case "median":
                return MedianPruner(n_startup_trials=MEDIAN_AFTER)
            case "patience":
                # It looks at one value more than it is told.
                return PatientPruner(None, patience=int(number or 1) - 1)
        return ThresholdPruner(upper=number) if self._mode == "min" else ThresholdPruner(lower=number)

    def _alone(self, values: dict[int, float], count: int, value: float) -> FrozenTrial:
        """A trial with what its rule looks at of its values; the others are taken out."""
        from optuna.trial import TrialState, create_trial

        values[count] = value
        length = int(self._stop.number or 1) if self._stop.kind == "patience" else 0
        older = [each for each in values if each <= count - length]
        known = [each for each in older if not math.isnan(values[each])]
        best = (min if self._mode == "min" else max)(known, key=values.__getitem__, default=None)
        for each in older:
            if each not in (best, count):
                del values[each]
        return create_trial(state=TrialState.RUNNING, intermediate_values=dict(values))
