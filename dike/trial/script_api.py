"""`dike.params`, `dike.report` and `dike.checkpoint`: what a script calls in a trial or a job of one plain task.

Does not need TensorFlow.
"""

from __future__ import annotations

import functools
import json
import operator
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NoReturn

from dike import randomness
from dike.exceptions import BadInputError
from dike.trial import folders
from dike.trial import runtime as runtimes
from dike.trial.export import SCRIPT
from dike.trial.runtime import TrialRuntime, runtime
from dike.trial.spec import PARAMS_VARIABLE, Value

KIND = "script"
"""Kind of the checkpoints of such trials."""

_RANDOMNESS = "randomness.json"
_PARAMS_EXAMPLE = f"""{PARAMS_VARIABLE}='{{"lr": 0.1}}'"""


def params(**defaults: Value) -> dict[str, Value]:
    """Returns the trial's hyper-parameters by name.

    Args:
        defaults: values of parameters that neither the search nor, outside of a search, the environment variable
            DIKE_PARAMS sets: `DIKE_PARAMS='{"lr": 0.1}' python train.py`.

    Raises:
        BadInputError: if DIKE_PARAMS is not a JSON object of numbers, strings, true and false.
    """
    trial = runtime()
    return {**defaults, **(trial.spec.parameters if trial is not None else _given_params())}


def _given_params() -> dict[str, Value]:
    text = os.environ.get(PARAMS_VARIABLE, "")
    try:
        given = json.loads(text or "{}")
    except ValueError as error:
        raise BadInputError(f"{PARAMS_VARIABLE} is not JSON: {error}; write {_PARAMS_EXAMPLE}.") from error
    if not isinstance(given, dict) or not all(isinstance(value, bool | int | float | str) for value in given.values()):
        raise BadInputError(
            f"{PARAMS_VARIABLE} is not a JSON object of numbers, strings, true and false; write {_PARAMS_EXAMPLE}."
        )
    return given


def report(step: int, **metrics: float) -> None:
    """Reports that `step` steps are done, and their metrics. Does nothing under plain `python`.

    A trial may be suspended here. This call then returns once the trial resumes in the same process. If the script has
    called `dike.checkpoint`, the call may also never return and the script runs again later; so it is in a job.

    Args:
        step: steps done since the beginning of the trial or the job, including those before a suspension.
        metrics: numbers by name; `loss` is the training loss. The search's metric should be among them, at least
            sometimes.

    Raises:
        BadInputError: if the step or a metric is not a number.
        SystemExit: if the trial has reached `--max-steps` or `--max-epochs`.
    """
    trial = _script_trial()
    if trial is not None:
        trial.report(_step(step), {name: _metric_value(name, value) for name, value in metrics.items()})


def checkpoint(save: Callable[[str], object], restore: Callable[[str], object]) -> int:
    """Makes the script suspendable at any `dike.report`. Call it once, before the first of them.

    The global random generators of Python, NumPy, TensorFlow and PyTorch are saved and restored as well.

    Args:
        save: called with an empty folder; writes everything that the script needs to resume.
        restore: called immediately with a folder that `save` has written, if the script resumes.

    Returns:
        Steps done: 0 at the beginning, and under plain `python`.

    Raises:
        BadInputError: if it is called twice, or the checkpoint is gone.
    """
    trial = _script_trial()
    return 0 if trial is None else trial.register(_Hooks(save, restore))


@dataclass(frozen=True)
class _Hooks:
    save: Callable[[str], object]
    restore: Callable[[str], object]


class _ScriptTrial:
    """A trial whose script reports its own steps."""

    def __init__(self, trial: TrialRuntime) -> None:
        self._trial = trial
        self._hooks: _Hooks | None = None
        self._saved: str | None = None

    def register(self, hooks: _Hooks) -> int:
        if self._hooks is not None:
            raise BadInputError(
                "The script calls dike.checkpoint twice; call it once, with functions that save and restore everything."
            )
        self._hooks = hooks
        self._trial.save_best = lambda: self._trial.write_best(lambda: self._save_best(hooks))
        self._trial.save_at_end = lambda: self._trial.write_last(lambda: self._save(hooks, self._trial.step))
        step = self._restore(hooks)
        self._trial.training(preemptible=True)
        return step

    def report(self, step: int, metrics: Mapping[str, float]) -> None:
        trial = self._trial
        if not trial.is_training:
            trial.training(preemptible=self._hooks is not None)
        others = {name: metrics[name] for name in metrics if name != "loss"}
        trial.progress(step, metrics.get("loss"), others, metrics.get(trial.spec.metric))
        if trial.spec.metric in metrics:
            trial.standing.epochs += 1
        trial.end_if_over()
        if self._hooks is None:
            return
        hooks = self._hooks
        if (trial.suspend_requested or trial.checkpoint_due) and trial.unless_full(lambda: self._save(hooks, step)):
            assert self._saved is not None
            if trial.suspend_requested:
                trial.suspend(self._saved, step)

    def _restore(self, hooks: _Hooks) -> int:
        path = folders.checkpoint_to_resume(self._trial.spec)
        if path is None:
            return 0
        meta, read = folders.read(path)
        if meta["kind"] != KIND:
            return 0  # written by fit or a session, which resume by themselves
        with folders.local_copy(f"{path}/{SCRIPT}") as folder:
            hooks.restore(folder)
        randomness.restore(json.loads(read(_RANDOMNESS)))
        self._trial.restored(path, meta["step"], meta["train_s"], meta["standing"])
        return int(meta["step"])

    def _save(self, hooks: _Hooks, step: int) -> str:
        trial = self._trial
        path = trial.spec.checkpoint_path(step)
        if path == self._saved:
            return path  # the script reported the step twice
        random_state = json.dumps(randomness.state()).encode()
        with folders.staging_folder(f"{path}/{SCRIPT}") as folder:
            hooks.save(folder)
        meta = {"kind": KIND, "step": step, "train_s": trial.train_s, "standing": trial.standing.to_json()}
        folders.write(path, {_RANDOMNESS: random_state}, meta)
        trial.checkpoint_written(path, step)
        folders.prune(path)
        self._saved = path
        return path

    def _save_best(self, hooks: _Hooks) -> None:
        trial = self._trial
        path = trial.spec.best_path(trial.step)
        # Saving the best model must not change the random numbers of the steps that follow.
        random_state = randomness.state()
        with folders.staging_folder(f"{path}/{SCRIPT}") as folder:
            hooks.save(folder)
        randomness.restore(random_state)
        meta = {"kind": KIND, "step": trial.step, "train_s": trial.train_s, "value": trial.standing.best}
        folders.write(path, {}, meta)
        folders.prune_best(path)


capture: Callable[[], NoReturn] | None = None
"""Ends a script that is run only to profile it, because it has its own training loop."""


@functools.cache
def _script_trial() -> _ScriptTrial | None:
    if capture is not None:
        capture()
    trial = runtime()
    if trial is None and runtimes.job_runtime is not None:
        trial = runtimes.job_runtime()
    return None if trial is None else _ScriptTrial(trial)


def _step(step: int) -> int:
    try:
        return operator.index(step)
    except TypeError:
        raise BadInputError(f"dike.report counts steps in whole numbers, not {step!r}.") from None


def _metric_value(name: str, value: float) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        raise BadInputError(f"dike.report takes numbers, but '{name}' is {value!r}.") from None
