"""Runs trials of TensorFlow 1 scripts to their end, each run in a fork of one process that has imported TensorFlow.

`python graph_zygote.py FOLDER`: FOLDER/cases.json lists the cases. A case's run is told to suspend itself, or kills
itself, when it has done the steps named; the next run goes on from its checkpoint.
TensorFlow's import is most of the time of a small script; a fork that has run no op yet is safe.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import sys
import traceback
from pathlib import Path
from typing import Any

import sklearn.datasets
import sklearn.model_selection
import tensorflow as tf

from dike.exceptions import BadInputError
from dike.main_script import run_as_main
from dike.trial import folders, graph, randomness
from dike.trial.runtime import TrialRuntime
from dike.trial.spec import EXIT_BAD_INPUT, TrialSpec

_DEADLINE_S = 60
_MOST_RUNS = 50


class ObservedRuntime(TrialRuntime):
    """Writes down every loss, and is interrupted at given steps."""

    def __init__(self, spec: TrialSpec, case: dict[str, Any], losses: Path) -> None:
        super().__init__(spec)
        self._case = case
        self._file = losses.open("a", encoding="utf-8")

    def progress(
        self,
        step: int,
        loss: float | None = None,
        metrics: Any = None,
        value: float | None = None,
    ) -> None:
        """As the base class."""
        super().progress(step, loss, metrics, value)
        self._file.write(f"{self.spec.run} {step} {'none' if loss is None else loss.hex()}\n")
        self._file.flush()
        if step in self._case.get("suspend_at", ()):
            self.suspend_requested = True
        if step == self._case.get("kill_at") and self.spec.run == 0:
            os.kill(os.getpid(), signal.SIGKILL)


def run(case: dict[str, Any], folder: Path, spec: TrialSpec) -> None:
    """One run of the trial; in a process of its own."""
    signal.alarm(_DEADLINE_S)
    name = case["name"]
    output = os.open(folder / f"{name}.out", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    work = folder / f"{name}-work"
    work.mkdir(exist_ok=True)
    os.chdir(work)
    if case.get("ask") and spec.run == 0:
        requests, control = os.pipe()
        os.write(control, b"suspend\n")
        spec = dataclasses.replace(spec, control_fd=requests)
    runtime = ObservedRuntime(spec, case, folder / f"{name}.losses")
    runtime.listen()
    randomness.install(7)
    code = 1
    try:
        graph.install(runtime)
        run_as_main(case["script"], case.get("arguments", ()))
        if runtime.save_at_end is not None:
            runtime.save_at_end()
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
    name = case["name"]
    trial_folder = folder / f"{name}-checkpoints"
    trial_folder.mkdir()
    reports = folder / f"{name}.reports"
    codes: list[int] = []
    resume_from = None
    while len(codes) < _MOST_RUNS and (not codes or codes[-1] in (75, -signal.SIGKILL)):
        child = os.fork()
        if child == 0:
            try:
                spec = TrialSpec(
                    search="test",
                    number=0,
                    run=len(codes),
                    parameters={},
                    folder=str(trial_folder),
                    resume_from=resume_from,
                    checkpoint_interval_s=case.get("checkpoint_interval_s", 1000.0),
                    report_fd=os.open(reports, os.O_WRONLY | os.O_CREAT | os.O_APPEND),
                )
                run(case, folder, spec)
            finally:
                os._exit(99)
        codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        resume_from = folders.newest(str(trial_folder))
        if case.get("then_script") and len(codes) == 1:
            case = {**case, "script": case["then_script"]}
    return {"codes": codes, "reports": [json.loads(line) for line in reports.read_text().splitlines()]}


def main() -> None:
    """Plays every case."""
    assert tf.__version__
    assert sklearn.__version__
    folder = Path(sys.argv[1])
    for case in json.loads((folder / "cases.json").read_text()):
        (folder / f"{case['name']}.json").write_text(json.dumps(play(case, folder)))


if __name__ == "__main__":
    main()
