"""Trials that train with TensorFlow 1 sessions: losses observed, sessions saved between two steps and restored."""

from __future__ import annotations

from dike.trial.runtime import TrialRuntime


def install(runtime: TrialRuntime) -> None:
    """Watches the script's optimizers and sessions. Called when TensorFlow has been imported.

    Raises:
        BadInputError: if the checkpoint to go on from cannot be read.
    """
    # These modules import TensorFlow at their top, so they cannot be imported before the script has done so.
    from dike.roles.graph import training
    from dike.trial.graph import monitored, plain, sessions

    trial = sessions.GraphTrial(runtime)
    training.install()
    plain.install(trial)
    monitored.install(trial, runtime.spec)
