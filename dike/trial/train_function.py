"""Calls the function given to `dike.tune` with a trial's parameters."""

from __future__ import annotations

import difflib
import functools
import inspect
import os
from collections.abc import Callable, Collection, Mapping
from typing import Any

from dike.exceptions import BadInputError
from dike.main_script import become_main, call_script, cell_content, nested_code
from dike.trial import pickled
from dike.trial.runtime import TrialRuntime
from dike.trial.spec import Value

TrainFunction = Callable[..., Any]
"""Returns the objective's value, a mapping that may contain it, or None."""

_is_called = False


def is_called() -> bool:
    """Whether the function has been called in this process."""
    return _is_called


def arguments_for(
    train_fn: TrainFunction, parameters: Mapping[str, Value], conditional: Collection[str] = ()
) -> dict[str, Value]:
    """Selects the parameters that a function takes; '-' in a parameter's name becomes '_'.

    Args:
        train_fn: the function.
        parameters: those of a trial, or of the space.
        conditional: those that not all trials have.

    Raises:
        BadInputError: if an argument without a default is missing, or the function takes no parameter of a given name.
    """
    by_argument = {name.replace("-", "_"): value for name, value in parameters.items()}
    try:
        wanted = inspect.signature(train_fn).parameters.values()
    except ValueError:
        return by_argument  # a C function without a signature
    always = by_argument.keys() - {name.replace("-", "_") for name in conditional}
    by_name = {each.name for each in wanted if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)}
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    for each in wanted:
        if each.default is each.empty and each.kind not in variadic and each.name not in by_name & always:
            lacks = "which the search space does not have; add it to the space, or"
            if each.name in by_argument:
                lacks = "which not all trials have;"
            raise BadInputError(f"The function given to dike.tune needs '{each.name}', {lacks} give it a default.")
    takes_all = any(each.kind is each.VAR_KEYWORD for each in wanted)
    if not takes_all and not _may_read_params(train_fn):
        for name in by_argument.keys() - by_name:
            near = difflib.get_close_matches(name, by_name, n=1)
            hint = f"did you mean '{near[0]}'?" if near else f"it takes {', '.join(sorted(by_name)) or 'none'}."
            raise BadInputError(f"The function given to dike.tune takes no parameter '{name}'; {hint}")
    return {name: value for name, value in by_argument.items() if takes_all or name in by_name}


def _may_read_params(train_fn: TrainFunction) -> bool:
    """Returns whether a function, or one that it refers to, may call `dike.params`. True if not written in Python."""
    function = inspect.unwrap(train_fn)
    while isinstance(function, functools.partial):
        function = inspect.unwrap(function.func)
    if not inspect.isroutine(function):
        function = function.__init__ if inspect.isclass(function) else type(function).__call__
    function = getattr(function, "__func__", function)
    if not inspect.isfunction(function):
        return True
    functions, codes = [function], set()
    while functions:
        one = functions.pop()
        if one.__code__ in codes:
            continue
        own = list(nested_code(one.__code__))
        codes |= set(own)
        # Attribute names are also looked up among the globals; at worst this lets a wrong parameter name pass.
        values = [one.__globals__.get(name) for code in own for name in code.co_names]
        values += [cell_content(cell) for cell in one.__closure__ or ()]
        members = [member for value in values if inspect.isclass(value) for member in vars(value).values()]
        functions += [value for value in (*values, *members) if inspect.isfunction(value)]
    return any("params" in code.co_names for code in codes)


def train_from_file(trial: TrialRuntime, path: str) -> None:
    """Runs a trial of a pickled function, where there is no script to run.

    Raises:
        BadInputError, ScriptFailedError: see `train`.
    """
    become_main([""], os.getcwd())
    with open(path, "rb") as file:
        train(trial, pickled.load_function(file.read()))


def train(trial: TrialRuntime, train_fn: TrainFunction) -> None:
    """Calls a function with the trial's parameters and reports what it returns.

    Raises:
        BadInputError: if its parameters differ from the trial's, or its return value is not an objective.
        ScriptFailedError: if it raises.
    """
    global _is_called
    _is_called = True
    arguments = arguments_for(train_fn, trial.spec.parameters)
    returned = call_script(lambda: train_fn(**arguments))
    if returned is None:
        return
    if not isinstance(returned, Mapping):
        trial.result(_number(returned), {})
        return
    values = {str(name): _number(value) for name, value in returned.items()}
    if trial.spec.metric in values:
        trial.result(values[trial.spec.metric], values)
    else:
        trial.progress(trial.step, metrics=values)


def _number(value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        raise BadInputError(
            f"The function given to dike.tune returned a {type(value).__name__}; it may return a number, a dictionary "
            "of numbers or None."
        ) from None
