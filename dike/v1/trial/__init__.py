"""Trials that train with TensorFlow 1 sessions: losses observed, sessions saved between two steps and restored."""

from __future__ import annotations

from dike.trial.runtime import TrialRuntime


def install(runtime: TrialRuntime) -> None:
    """Watches the script's optimizers and sessions. Called when TensorFlow has been imported.

    Raises:
        BadInputError: if the checkpoint to go on from cannot be read.
    """
    # These modules import TensorFlow at their top, so they cannot be imported before the script has done so.
    from dike.v1 import training
    from dike.v1.trial import hooks, sessions

    trial = sessions.GraphTrial(runtime)
    training.install(synchronous=False)
    hooks.install(trial, runtime.spec)
