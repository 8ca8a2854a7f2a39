"""How much each parameter of a search matters for its objective, as Optuna judges that."""

from __future__ import annotations

import math
import threading
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING

from dike.trial.spec import Value
from framework.search.records import Parameter, SearchSpec, TrialRecord, TrialState

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution

LEAST_TRIALS = 5
"""With fewer finished trials there is nothing to compare."""
_loading = threading.Lock()
"""Of two threads that begin to load Optuna's part, neither may meet it half loaded."""


def finished_trials(trials: Sequence[TrialRecord]) -> list[TrialRecord]:
    """The trials that are compared: finished, with a value."""
    return [
        trial
        for trial in trials
        if trial.state is TrialState.FINISHED and trial.value is not None and math.isfinite(trial.value)
    ]


def importances(spec: SearchSpec, trials: Sequence[TrialRecord]) -> dict[str, float]:
    """The importance of each parameter that all finished trials have, by PED-ANOVA.

    Args:
        spec: the search.
        trials: its trials.

    Returns:
        Name -> share of the importance of all, together 1, the greatest first; empty with too few finished trials.
    """
    compared = finished_trials(trials)
    if len(compared) < LEAST_TRIALS:
        return {}
    names = [name for name in compared[0].parameters if all(name in trial.parameters for trial in compared)]
    known = {parameter.name: parameter for parameter in spec.space}
    distributions = {
        name: _distribution(known.get(name), [trial.parameters[name] for trial in compared]) for name in names
    }
    if not names:
        return {}
    import optuna

    # Where scikit-learn is installed this loads it, 100 MB that most services never need.
    with _loading:
        import optuna.importance

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        study = optuna.create_study(direction="minimize" if spec.mode == "min" else "maximize")
        study.add_trials(
            [
                optuna.trial.create_trial(
                    params={name: trial.parameters[name] for name in names},
                    distributions=distributions,
                    value=trial.value,
                )
                for trial in compared
            ]
        )
        evaluator = optuna.importance.PedAnovaImportanceEvaluator()
        return dict(optuna.importance.get_param_importances(study, evaluator=evaluator))


def _distribution(parameter: Parameter | None, values: Sequence[Value]) -> BaseDistribution:
    """Of a parameter's values; what the space does not name is described by the values that it had."""
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    if parameter is None:
        return CategoricalDistribution(tuple(dict.fromkeys(values)))
    if parameter.choices:
        return CategoricalDistribution(parameter.choices)
    if parameter.is_integer:
        return IntDistribution(int(parameter.low), int(parameter.high), log=parameter.log)
    return FloatDistribution(parameter.low, parameter.high, log=parameter.log)
