"""Importance of each parameter of a search for its objective."""

from __future__ import annotations

import math
import random
import threading
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING

from dike.trial.spec import Value
from framework.search.optuna_study import load_optuna
from framework.search.records import Parameter, SearchSpec, TrialRecord, TrialState
from framework.search.samplers import distribution_of

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution

MIN_TRIALS = 5
"""Minimum number of finished trials to compare."""
MAX_COMPARED = 2000
"""Maximum number of trials to compare: a fraction of a second."""
_import_lock = threading.Lock()
"""Concurrent first imports of Optuna's module could see it half loaded."""


def finished_trials(trials: Sequence[TrialRecord]) -> list[TrialRecord]:
    return [
        trial
        for trial in trials
        if trial.state is TrialState.FINISHED and trial.value is not None and math.isfinite(trial.value)
    ]


def importances(spec: SearchSpec, trials: Sequence[TrialRecord]) -> dict[str, float]:
    """Returns the importance of each parameter that all finished trials have, by Optuna's PED-ANOVA.

    The shares sum to 1, the greatest first; empty with too few finished trials. Of many, `MAX_COMPARED` are compared,
    chosen at random.
    """
    compared = finished_trials(trials)
    if len(compared) < MIN_TRIALS:
        return {}
    if len(compared) > MAX_COMPARED:
        compared = random.Random(0).sample(compared, MAX_COMPARED)  # noqa: S311
    names = [name for name in compared[0].parameters if all(name in trial.parameters for trial in compared)]
    known = {parameter.name: parameter for parameter in spec.space}
    distributions = {
        name: _distribution(known.get(name), [trial.parameters[name] for trial in compared]) for name in names
    }
    if not names:
        return {}
    # Loads scikit-learn if it is installed: 100 MB that most services never need.
    with _import_lock:
        load_optuna()
        import optuna
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
    """Describes a parameter's values; one that the space does not define is a choice of its observed values."""
    from optuna.distributions import CategoricalDistribution

    return CategoricalDistribution(tuple(dict.fromkeys(values))) if parameter is None else distribution_of(parameter)
