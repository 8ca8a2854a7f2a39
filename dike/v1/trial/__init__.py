"""Trials that train with TensorFlow 1 sessions: losses reported, sessions saved between two steps and restored."""

from __future__ import annotations

from dike.trial.runtime import TrialRuntime


def install(runtime: TrialRuntime) -> None:
    """Called when TensorFlow has been imported. Raises BadInputError if the checkpoint cannot be read."""
    # Not at the top: these modules import TensorFlow.
    from dike.v1 import training
    from dike.v1.trial import hooks, sessions

    trial = sessions.GraphTrial(runtime)
    training.install(synchronous=False)
    hooks.install(trial, runtime.spec)
