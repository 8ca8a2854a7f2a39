"""`dike.tune` and `dike.grid_search`: a search over a function of the script that calls them.

The script's process runs `dike tune` on the script. Each trial runs the script from the top: earlier calls of
`dike.tune` return their results immediately; the call in question runs the function and ends the process. So closures,
lambdas and scripts without `if __name__ == "__main__"` work, and none of them is pickled.

Where there is no script, as in a notebook, `dike tune` gets the pickled function, and each trial calls it.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any

from dike import task as tasks
from dike.exceptions import BadInputError, DikeError
from dike.tracebacks import error_lines
from dike.trial import launch, search_command, search_space, train_function
from dike.trial.runtime import TrialRuntime, runtime
from dike.trial.search_command import SpaceFunction
from dike.trial.search_result import SearchResult
from dike.trial.train_function import TrainFunction

_outcomes: list[dict[str, Any]] = []
"""Outcomes of earlier calls in this process."""


def tune(
    train_fn: TrainFunction,
    space: Mapping[str, Any] | SpaceFunction,
    *,
    metric: str = "loss",
    mode: str | None = None,
    trials: int | None = None,
    **options: object,
) -> SearchResult:
    """Searches the hyper-parameters of a function.

    Args:
        train_fn: what a trial runs.
        space: name -> list of values, or range `(low, high)`, `(low, high, "log")`, `(low, high, "int")`; a range of
            two integers contains integers only; `"step=X"` leaves out what is between. A distribution of
            `optuna.distributions` is a range or a list as well. `{"values": ..., "when": {"layers": [2, 3]}}` is used
            in trials with these values of another parameter, which precedes it; give the argument a default for the
            others. Or KerasTuner's `HyperParameters`. Or a function of an Optuna trial that asks it for parameters
            (`trial.suggest_float("lr", 1e-5, 0.1, log=True)`) and returns them by name; trials may have different ones.
        metric: the objective: `loss` for the training loss, or another name. A number that `train_fn` returns counts as
            the metric, whatever its name; if training reports a loss as well, give the metric another name, because
            policies compare trials by the metric of that name during training.
        mode: `min` or `max`; None for `min`, unless the metric's name is that of an accuracy.
        trials: number of trials; None for all points of a space of lists. With `resume`, the number of further ones.
        options: `sampler`, a name or an object of `optuna.samplers`; `stop`, which ends trials for good; any other
            option of `dike tune`, with '_' for '-': `policy`, `name`, `master`, `storage`, `quantum`, `slots` ...
            `resume`, the name of a search, continues it, with further trials and with the values that its lists do not
            have yet.

    Returns:
        The search's result. In a trial's process the call does not return.

    Raises:
        BadInputError: if an argument is invalid.
        JobFailedError: if the search ends early, or no trial succeeds.
        KeyboardInterrupt: after Ctrl-C, once all trials are suspended.
    """
    own = {"metric": metric, "mode": mode, "trials": trials}
    return _tune(
        train_fn, space, lambda space: space if callable(space) else search_space.to_yaml(space), {**own, **options}
    )


def grid_search(
    train_fn: TrainFunction,
    grid: Mapping[str, Any],
    *,
    metric: str = "loss",
    mode: str | None = None,
    **options: object,
) -> SearchResult:
    """Tries every combination of values; like `tune`, with a list of values for each parameter."""
    own = {"metric": metric, "mode": mode, "sampler": "grid"}
    return _tune(train_fn, grid, search_space.grid_to_yaml, {**own, **options})


def _tune(
    train_fn: TrainFunction,
    space: Mapping[str, Any] | SpaceFunction,
    to_yaml: Callable[[Any], str | SpaceFunction],
    options: Mapping[str, object],
) -> SearchResult:
    trial = runtime()
    if trial is not None:
        return _in_trial(trial, train_fn)
    try:
        outcome = _search(train_fn, space, to_yaml(space), options)
    except (DikeError, KeyboardInterrupt) as error:
        _outcomes.append(search_command.outcome_of(error))
        _show_users_frames_only()
        raise
    _outcomes.append(outcome)
    return SearchResult.from_json(outcome)


@functools.cache
def _show_users_frames_only() -> None:
    """Installs a hook that shows only the script's line for an uncaught error of Dike."""
    otherwise = sys.excepthook

    def show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if isinstance(error, DikeError):
            sys.stderr.write("".join(error_lines(error, is_deliberate=True)))
        else:
            otherwise(kind, error, trace)

    sys.excepthook = show


def _search(
    train_fn: TrainFunction,
    space: Mapping[str, Any] | SpaceFunction,
    as_yaml: str | SpaceFunction,
    options: Mapping[str, object],
) -> dict[str, Any]:
    if tasks.current() is not None:
        raise BadInputError("dike.tune cannot search inside a job of 'dike run'; run the script with 'python'.")
    search_command.check_options(options)
    if not callable(space):
        items = search_space.as_mapping(space)
        conditional = {name for name, item in items.items() if search_space.is_conditional(item)}
        train_function.arguments_for(train_fn, dict.fromkeys(items, 0), conditional)
    return search_command.search(train_fn, as_yaml, options, _outcomes)


def _in_trial(trial: TrialRuntime, train_fn: TrainFunction) -> SearchResult:
    wanted = trial.spec.call
    if wanted is None:
        raise BadInputError("The script calls dike.tune itself; run it with 'python', not with 'dike tune'.")
    if train_function.is_called():
        raise BadInputError("dike.tune is called by the function that it was given; call it outside.")
    call = len(_outcomes)
    _outcomes.append({})
    if call == wanted:
        launch.conclude(trial, lambda: train_function.train(trial, train_fn))
    outcome = trial.spec.earlier_results[call]
    search_command.reraise(outcome)
    return SearchResult.from_json(outcome)
