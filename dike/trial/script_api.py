"""What a script may say to a search by itself: `dike.params`, `dike.report`, `dike.checkpoint`; without TensorFlow."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable
from dataclasses import dataclass

from dike.trial import folders, randomness
from dike.trial.runtime import TrialRuntime, runtime
from dike.trial.spec import Value

KIND = "script"


@dataclass(frozen=True)
class _Hooks:
    save: Callable[[str], object]
    restore: Callable[[str], object]


class _ScriptTrial:
    """A trial whose script reports its steps itself."""

    def __init__(self, trial: TrialRuntime) -> None:
        self._trial = trial
        self._hooks: _Hooks | None = None
        self._told = False

    def register(self, hooks: _Hooks) -> int:
        self._hooks = hooks
        self._trial.save_at_end = lambda: self._save(self._trial.step)
        self._training()
        path = self._trial.spec.resume_from
        if path is None:
            return 0
        meta, read = folders.read(path)
        hooks.restore(path)
        randomness.restore(json.loads(read("random.json")))
        self._trial.restored(path, meta["step"], meta["train_s"])
        return int(meta["step"])

    def report(self, step: int, metrics: dict[str, float]) -> None:
        trial = self._trial
        if not self._told:
            self._training()
        loss = metrics.get("loss")
        others = {name: value for name, value in metrics.items() if name != "loss"}
        value = metrics.get(trial.spec.metric) if trial.spec.metric != "loss" else None
        trial.progress(step, loss, others, value)
        if self._hooks is not None and trial.suspend_requested:
            path = self._save(step)
            trial.suspend(path, step)
        if self._hooks is not None and trial.checkpoint_due:
            self._save(step)

    def _training(self) -> None:
        self._told = True
        self._trial.training(preemptible=self._hooks is not None)

    def _save(self, step: int) -> str:
        assert self._hooks is not None
        trial = self._trial
        path = trial.spec.checkpoint_path(step)
        os.makedirs(path, exist_ok=True)
        self._hooks.save(path)
        meta = {"kind": KIND, "step": step, "train_s": trial.train_s}
        folders.write(path, {"random.json": json.dumps(randomness.state()).encode()}, meta)
        trial.checkpoint_written(path, step)
        folders.prune(trial.spec.folder)
        return path


@functools.cache
def _script_trial() -> _ScriptTrial | None:
    trial = runtime()
    return None if trial is None else _ScriptTrial(trial)


def params(**defaults: Value) -> dict[str, Value]:
    """The trial's hyper-parameters by name; outside a search, the defaults."""
    trial = runtime()
    return {**defaults, **(trial.spec.parameters if trial is not None else {})}


def report(step: int, **metrics: float) -> None:
    """Says that `step` steps are done, and what came of them. May not return: the trial may be suspended here.

    Args:
        step: steps done since the start of the trial.
        metrics: figures by name; `loss` is the training loss.
    """
    trial = _script_trial()
    if trial is not None:
        trial.report(step, {name: float(value) for name, value in metrics.items()})


def checkpoint(save: Callable[[str], object], restore: Callable[[str], object]) -> int:
    """Lets the search suspend the script at any `dike.report`.

    Args:
        save: called with an empty folder; writes all that the script needs to go on.
        restore: called with a folder that `save` has filled, now, if the trial goes on.

    Returns:
        The steps that are done: 0 for a trial that begins.
    """
    trial = _script_trial()
    return 0 if trial is None else trial.register(_Hooks(save, restore))
