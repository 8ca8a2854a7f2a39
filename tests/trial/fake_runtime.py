"""Plays trials to their end, each run in a fork of one process that has imported TensorFlow.

TensorFlow's import is most of the time of a small script; a fork that has run no op yet is safe. Used by the programs
beside it: `python NAME_zygote.py FOLDER` plays the cases of FOLDER/cases.json, each in FOLDER/NAME, its output in
output.txt, and writes to FOLDER/NAME.json how its runs ended and all that they reported.
"""

from __future__ import annotations

import dataclasses
import gc
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from dike import randomness
from dike.exceptions import BadInputError
from dike.main_script import run_as_main
from dike.trial import folders
from dike.trial.runtime import TrialRuntime
from dike.trial.spec import EXIT_BAD_INPUT, EXIT_SUSPENDED, TrialSpec

_DEADLINE_S = 180
_MOST_RUNS = 50

Case = dict[str, Any]
"""`name`, `script`, `arguments`, and what is special about it: `then_script`, `then_arguments` (of later runs),
`checkpoint_interval_s`, `metric`, `scheme` (before the path of its checkpoints), `loses_checkpoint` (after its first
run), `environment`, `interrupts` (written to interrupts.json for each run), `paused` (it stays in memory where it would
be suspended, and all interrupts are written together), and what the program itself understands."""

Prepare = Callable[[Case, TrialSpec], TrialRuntime]
"""Makes a run's runtime and intercepts what the script trains with."""


class FakeRuntime(TrialRuntime):
    """A trial's runtime. In a `paused` case, its process stays in memory when suspended: it is stopped and continued.

    Args:
        case: the trial's.
        spec: the run.
    """

    def __init__(self, case: Case, spec: TrialSpec) -> None:
        self._control: int | None = None
        if not case.get("paused"):
            super().__init__(spec)
            return
        requests, self._control = os.pipe()
        super().__init__(dataclasses.replace(spec, control_fd=requests))
        self.listen()
        # From now on it stays whenever it is suspended; when that is, the case says.
        os.write(self._control, b"pause\n")
        while not self.suspend_requested:
            time.sleep(0.001)
        self.suspend_requested = False

    def _send(self, line: Mapping[str, Any], wait_s: float = 0.0) -> None:
        super()._send(line, wait_s)
        if line["type"] == "paused":
            assert self._control is not None
            # Repeated, because the first signal may come before the process is stopped.
            subprocess.Popen(["sh", "-c", f"while sleep 0.1 && kill -CONT {os.getpid()} 2>&-; do :; done"])
            os.kill(os.getpid(), signal.SIGSTOP)
            os.write(self._control, f"continue {self.spec.run + 1}\n".encode())


def main(prepare: Prepare) -> None:
    """Plays every case of the folder that the program was given."""
    # As in `dike.zygote`: no collection of a fork goes through what has been imported.
    gc.freeze()
    folder = Path(sys.argv[1])
    for case in json.loads((folder / "cases.json").read_text()):
        (folder / f"{case['name']}.json").write_text(json.dumps(_play(case, folder / case["name"], prepare)))


def _play(case: Case, work: Path, prepare: Prepare) -> dict[str, Any]:
    (work / "checkpoints").mkdir(parents=True)
    checkpoints = f"{case.get('scheme', '')}{work}/checkpoints"
    reports = work / "reports.txt"
    codes: list[int] = []
    resume_from = None
    while len(codes) < _MOST_RUNS and (not codes or codes[-1] in (EXIT_SUSPENDED, -signal.SIGKILL)):
        interrupts = case.get("interrupts", [])
        (work / "interrupts.json").write_text(
            json.dumps(interrupts if case.get("paused") else interrupts[len(codes) : len(codes) + 1])
        )
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
                _run(case, work, spec, prepare)
            finally:
                os._exit(99)
        codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        resume_from = folders.newest(checkpoints)
        if case.get("loses_checkpoint") and len(codes) == 1:
            resume_from = f"{checkpoints}/run-0-step-9999"
        later = {"script": case.get("then_script"), "arguments": case.get("then_arguments")}
        case = {**case, **{name: value for name, value in later.items() if value is not None}}
    return {"codes": codes, "reports": [json.loads(line) for line in reports.read_text().splitlines()]}


def _run(case: Case, work: Path, spec: TrialSpec, prepare: Prepare) -> None:
    """One run of the trial; in a process of its own."""
    signal.alarm(_DEADLINE_S)
    output = os.open(work / "output.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.chdir(work)
    os.environ.update(case.get("environment", {}))
    randomness.install(7)
    runtime = prepare(case, spec)
    code = 1
    try:
        run_as_main(case["script"], case["arguments"])
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
