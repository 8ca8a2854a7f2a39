"""What a script may say of itself: `dike.params`, `dike.report`, `dike.checkpoint`. No TensorFlow needed.

To a search, of which it is a trial, or to its job, if that is one plain task.
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
from dike.checkpoints import retry_while_disk_full
from dike.exceptions import BadInputError
from dike.trial import folders
from dike.trial import runtime as runtimes
from dike.trial.export import SCRIPT
from dike.trial.runtime import TrialRuntime, runtime
from dike.trial.spec import PARAMS_VARIABLE, Value

KIND = "script"
"""The kind of such a trial's checkpoints."""

_RANDOMNESS = "randomness.json"
_PARAMS_EXAMPLE = f"""{PARAMS_VARIABLE}='{{"lr": 0.1}}'"""


def params(**defaults: Value) -> dict[str, Value]:
    """The trial's hyper-parameters by name.

    Args:
        defaults: values of parameters that neither the search nor, outside of a search, the environment variable
            DIKE_PARAMS gives: `DIKE_PARAMS='{"lr": 0.1}' python train.py`.

    Raises:
        BadInputError: if DIKE_PARAMS is no JSON object of numbers, texts, true and false.
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
            f"{PARAMS_VARIABLE} is no JSON object of numbers, texts, true and false; write {_PARAMS_EXAMPLE}."
        )
    return given


def report(step: int, **metrics: float) -> None:
    """Says that `step` steps are done, and what came of them; under plain `python` it does nothing.

    A trial may be suspended here. Then this call returns when it goes on in the same process. If the script has called
    `dike.checkpoint`, it may also never return, and the script is run again later; so it is in a job.

    Args:
        step: steps done since the beginning of the trial or the job, those before a suspension included.
        metrics: figures by name; `loss` is the training loss. The search's metric is among them, if not always.

    Raises:
        BadInputError: if the step or a figure is no number.
    """
    trial = _script_trial()
    if trial is not None:
        trial.report(_step(step), {name: _figure(name, value) for name, value in metrics.items()})


def checkpoint(save: Callable[[str], object], restore: Callable[[str], object]) -> int:
    """Lets Dike save and suspend the script at any `dike.report`; to be called once, before the first of them.

    Python's, NumPy's, TensorFlow's and PyTorch's global random generators are saved and restored beside.

    Args:
        save: called with an empty folder; writes all that the script needs to go on.
        restore: called with a folder that `save` has filled: at once, if the script goes on from there.

    Returns:
        The steps that are done: 0 at the beginning, and under plain `python`.

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
    """A trial whose script reports its steps itself."""

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
        self._trial.keep_best = lambda: self._trial.keep(lambda: self._save_best(hooks))
        self._trial.save_at_end = lambda: retry_while_disk_full(lambda: self._save(hooks, self._trial.step))
        step = self._restore(hooks)
        self._trial.training(preemptible=True)
        return step

    def report(self, step: int, metrics: Mapping[str, float]) -> None:
        trial = self._trial
        if not trial.is_training:
            trial.training(preemptible=self._hooks is not None)
        others = {name: metrics[name] for name in metrics if name != "loss"}
        trial.progress(step, metrics.get("loss"), others, metrics.get(trial.spec.metric))
        if self._hooks is None:
            return
        hooks = self._hooks
        if (trial.suspend_requested or trial.checkpoint_due) and trial.unless_full(lambda: self._save(hooks, step)):
            assert self._saved is not None
            if trial.suspend_requested:
                trial.suspend(self._saved, step)

    def _restore(self, hooks: _Hooks) -> int:
        path = folders.to_resume(self._trial.spec)
        if path is None:
            return 0
        meta, read = folders.read(path)
        if meta["kind"] != KIND:
            return 0  # saved within fit or a session, which go on by themselves
        with folders.to_read(f"{path}/{SCRIPT}") as folder:
            hooks.restore(folder)
        randomness.restore(json.loads(read(_RANDOMNESS)))
        self._trial.restored(path, meta["step"], meta["train_s"], meta["standing"])
        return int(meta["step"])

    def _save(self, hooks: _Hooks, step: int) -> str:
        trial = self._trial
        path = trial.spec.checkpoint_path(step)
        if path == self._saved:
            return path  # the step has been reported twice
        random_state = json.dumps(randomness.state()).encode()
        with folders.to_fill(f"{path}/{SCRIPT}") as folder:
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
        # How good a step was must not change those that follow.
        random_state = randomness.state()
        with folders.to_fill(f"{path}/{SCRIPT}") as folder:
            hooks.save(folder)
        randomness.restore(random_state)
        meta = {"kind": KIND, "step": trial.step, "train_s": trial.train_s, "value": trial.standing.best}
        folders.write(path, {}, meta)
        folders.prune_best(path)


capture: Callable[[], NoReturn] | None = None
"""Ends a script that is only read for its profile: it has a training loop of its own."""


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


def _figure(name: str, value: float) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        raise BadInputError(f"dike.report takes numbers, but '{name}' is {value!r}.") from None
