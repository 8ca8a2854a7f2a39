"""Plays trials of TensorFlow 1 scripts (`tests.trial.fake_runtime`).

A case's run is asked to suspend itself at the steps of `suspend_at`; its first one kills itself at `kill_at`, or is
asked to suspend itself from the beginning (`ask`).
"""

from __future__ import annotations

import dataclasses
import os
import signal
from typing import Any

import sklearn.datasets
import sklearn.model_selection
import tensorflow as tf

from dike.trial.runtime import TrialRuntime
from dike.trial.spec import TrialSpec
from dike.v1 import trial as graph
from tests.trial.fake_runtime import Case, FakeRuntime, main


class FakeObservedRuntime(FakeRuntime):
    """Writes down every loss, and is interrupted at given steps."""

    def __init__(self, case: Case, spec: TrialSpec) -> None:
        super().__init__(case, spec)
        self._case = case

    def progress(self, step: int, loss: float | None = None, *others: Any, **named: Any) -> None:
        """As the base class."""
        super().progress(step, loss, *others, **named)
        with open("steps.txt", "a", encoding="utf-8") as file:
            file.write(f"{self.spec.run} {step} {'none' if loss is None else loss.hex()}\n")
        if step in self._case.get("suspend_at", ()):
            self.suspend_requested = True
        if step == self._case.get("kill_at") and self.spec.run == 0:
            os.kill(os.getpid(), signal.SIGKILL)


def prepare(case: Case, spec: TrialSpec) -> TrialRuntime:
    """See `Prepare`."""
    if case.get("ask") and spec.run == 0:
        requests, control = os.pipe()
        os.write(control, b"suspend\n")
        spec = dataclasses.replace(spec, control_fd=requests)
    runtime = FakeObservedRuntime(case, spec)
    if case.get("ask"):
        runtime.listen()
    graph.install(runtime)
    return runtime


if __name__ == "__main__":
    assert tf.__version__
    assert sklearn.__version__
    main(prepare)
