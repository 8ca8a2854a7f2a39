"""Plays trials that train with Keras (`tests.trial.fake_runtime`).

SIGUSR1, which scripts send themselves, asks a run to suspend itself; so does the first one's `patience` when it ends.
"""

from __future__ import annotations

import math
import signal
from typing import Any

import keras
import tensorflow as tf
import tf_keras

from dike.keras3 import trial as keras_fit
from dike.tf_keras import trial as tf_keras_fit
from dike.trial.runtime import TrialRuntime
from dike.trial.spec import TrialSpec
from tests.trial.fake_runtime import Case, FakeRuntime, main


class FakeObservedRuntime(FakeRuntime):
    """Writes down every loss; may request a suspension by itself.

    Args:
        case: the trial's. Its `patience` is how often its first run reads that no suspension is requested.
        spec: the run.
    """

    def __init__(self, case: Case, spec: TrialSpec) -> None:
        self._patience = case.get("patience", math.inf) if spec.run == 0 else math.inf
        self._is_requested = False
        super().__init__(case, spec)

    @property
    def suspend_requested(self) -> bool:
        self._patience -= 1
        return self._is_requested or self._patience < 0

    @suspend_requested.setter
    def suspend_requested(self, value: bool) -> None:
        self._is_requested = value

    def progress(self, step: int, loss: float | None = None, *others: Any, **named: Any) -> None:
        """As the base class."""
        super().progress(step, loss, *others, **named)
        if loss is not None:
            with open("steps.txt", "a", encoding="utf-8") as file:
                file.write(f"{step} {loss.hex()}\n")


def prepare(case: Case, spec: TrialSpec) -> TrialRuntime:
    """See `Prepare`."""
    runtime = FakeObservedRuntime(case, spec)

    def request(*_: object) -> None:
        runtime.suspend_requested = True

    signal.signal(signal.SIGUSR1, request)
    keras_fit.install(runtime)
    tf_keras_fit.install(runtime)
    return runtime


if __name__ == "__main__":
    assert tf.__version__
    assert keras.__version__
    assert tf_keras.__version__
    main(prepare)
