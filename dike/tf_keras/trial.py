"""Trials that train with tf_keras: they report, and cannot be suspended."""

from __future__ import annotations

from dike.keras3.trial.reports import KerasReports, reporting_fit
from dike.trial.runtime import TrialRuntime


def install(runtime: TrialRuntime) -> None:
    """Makes `fit` of tf_keras models report. Called when tf_keras is imported."""
    from tf_keras import callbacks
    from tf_keras.src.engine import training

    training.Model.fit = reporting_fit(training.Model.fit, KerasReports(runtime), callbacks.Callback)
