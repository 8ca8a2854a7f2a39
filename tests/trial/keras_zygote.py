"""Runs trials that train with Keras to their end, each run in a fork of one process that has imported TensorFlow.

`python keras_zygote.py FOLDER`: FOLDER/cases.json lists the cases; FOLDER/NAME.json gets how the runs of each ended.
TensorFlow's import is most of the time of a small script; a fork that has run no op yet is safe.
"""

from __future__ import annotations

import json
import math
import os
import signal
import sys
import traceback
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf
import tf_keras

from dike.exceptions import BadInputError
from dike.main_script import run_as_main
from dike.trial import folders, keras_fit, randomness, tf_keras_fit
from dike.trial.runtime import TrialRuntime
from dike.trial.spec import EXIT_BAD_INPUT, TrialSpec

_DEADLINE_S = 60
_MOST_RUNS = 20


class ObservedRuntime(TrialRuntime):
    """Writes down every loss; may request a suspension by itself.

    Args:
        spec: the trial.
        patience: how often it answers that nobody wants the slot back.
    """

    def __init__(self, spec: TrialSpec, patience: float) -> None:
        self._patience = patience
        self._is_requested = False
        super().__init__(spec)

    @property
    def suspend_requested(self) -> bool:
        self._patience -= 1
        return self._is_requested or self._patience < 0

    @suspend_requested.setter
    def suspend_requested(self, value: bool) -> None:
        self._is_requested = value

    def progress(self, step: int, loss: float | None = None, metrics: Any = None, value: float | None = None) -> None:
        """As the base class."""
        super().progress(step, loss, metrics, value)
        if loss is not None:
            with open("steps.txt", "a", encoding="utf-8") as file:
                file.write(f"{step} {loss.hex()}\n")


def run(case: dict[str, Any], work: Path, spec: TrialSpec) -> None:
    """One run of the trial; in a process of its own."""
    signal.alarm(_DEADLINE_S)
    output = os.open(work / "output.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.chdir(work)
    os.environ.update(case.get("environment", {}))
    runtime = ObservedRuntime(spec, case.get("patience", math.inf) if spec.run == 0 else math.inf)

    def request(*_: object) -> None:
        runtime.suspend_requested = True

    signal.signal(signal.SIGUSR1, request)
    randomness.install(7)
    code = 1
    try:
        keras_fit.install(runtime)
        tf_keras_fit.install(runtime)
        run_as_main(case["script"], case["arguments"])
        code = 0
    except BadInputError as error:
        print(error)
        code = EXIT_BAD_INPUT
    finally:
        if code == 1:
            traceback.print_exc()
        runtime.leave(code)


def play(case: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Runs the trial until it ends; how every run ended, and all reports."""
    work = folder / case["name"]
    (work / "checkpoints").mkdir(parents=True)
    checkpoints = f"{case.get('scheme', '')}{work}/checkpoints"
    reports = work / "reports.txt"
    codes: list[int] = []
    resume_from = None
    while len(codes) < _MOST_RUNS and (not codes or codes[-1] in (75, -signal.SIGKILL)):
        (work / "interrupts.json").write_text(json.dumps(case.get("interrupts", [])[len(codes) : len(codes) + 1]))
        child = os.fork()
        if child == 0:
            try:
                spec = TrialSpec(
                    search="test",
                    number=0,
                    run=len(codes),
                    parameters={},
                    folder=checkpoints,
                    resume_from=resume_from,
                    checkpoint_interval_s=case.get("checkpoint_interval_s", 1000.0),
                    metric=case.get("metric", "loss"),
                    report_fd=os.open(reports, os.O_WRONLY | os.O_CREAT | os.O_APPEND),
                )
                run(case, work, spec)
            finally:
                os._exit(99)
        codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        resume_from = folders.newest(checkpoints)
        if case.get("loses_checkpoint") and len(codes) == 1:
            resume_from = f"{checkpoints}/run-0-step-9999"
        case = {**case, "arguments": case.get("then_arguments", case["arguments"])}
    return {"codes": codes, "reports": [json.loads(line) for line in reports.read_text().splitlines()]}


def main() -> None:
    """Plays every case."""
    assert tf.__version__
    assert keras.__version__
    assert tf_keras.__version__
    folder = Path(sys.argv[1])
    for case in json.loads((folder / "cases.json").read_text()):
        (folder / f"{case['name']}.json").write_text(json.dumps(play(case, folder)))


if __name__ == "__main__":
    main()
