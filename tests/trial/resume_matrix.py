"""Plays each kind of input with every step of a short training as the point of interruption.

`python resume_matrix.py FOLDER` plays what FOLDER/plays.json says: kind -> indices of checkpoints to resume from, null
for all of them. `python resume_matrix.py FOLDER PART PARTS` plays all checkpoints of every PARTS-th kind, from the
PART-th. A kind is trained three times from its beginning - without Dike, as a trial, and as a trial that writes a
checkpoint at every opportunity - and then once more from each of these checkpoints. FOLDER/KIND.json gets what was
observed: `bare`, `plain`, `saving`, and `resumed`: for each checkpoint the lines that its run observed, with `before`,
the number of lines of `saving` that were there when it was written. Each run is a fork of one process that has
imported TensorFlow.
"""

from __future__ import annotations

import gc
import json
import os
import runpy
import shutil
import signal
import sys
import traceback
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

from dike import randomness
from dike.keras3 import trial as keras_fit
from dike.main_script import run_as_main
from dike.trial.runtime import TrialRuntime
from dike.trial.spec import TrialSpec

SCRIPT = Path(__file__).parent / "scripts" / "keras_inputs.py"
_DEADLINE_S = 120
_SEED = 7


class SavingRuntime(TrialRuntime):
    """Writes a checkpoint wherever it can, and keeps each, with all that it needs, in a folder of its own.

    Args:
        spec: the run.
        observed: the file with what its script observed.
        kept: where the copies go.
    """

    def __init__(self, spec: TrialSpec, observed: Path, kept: Path) -> None:
        super().__init__(spec)
        self._observed = observed
        self._kept = kept
        self._count = 0

    @property
    def checkpoint_due(self) -> bool:
        return True

    def checkpoint_written(self, path: str, step: int) -> None:
        super().checkpoint_written(path, step)
        folder = self._kept / str(self._count)
        self._count += 1
        shutil.copytree(os.path.dirname(path), folder / "checkpoints")
        before = len(self._observed.read_text().splitlines())
        (folder / "point.json").write_text(json.dumps({"name": os.path.basename(path), "before": before}))


def main() -> None:
    """Plays every kind of the folder that the program was given."""
    assert keras.__version__
    assert tf.__version__
    gc.freeze()
    folder = Path(sys.argv[1])
    for kind, points in _plays(folder, sys.argv[2:]).items():
        (folder / f"{kind}.json").write_text(json.dumps(_play(kind, points, folder / kind)))


def _plays(folder: Path, part: list[str]) -> dict[str, list[int] | None]:
    if not part:
        plays: dict[str, list[int] | None] = json.loads((folder / "plays.json").read_text())
        return plays
    number, parts = map(int, part)
    names = runpy.run_path(str(SCRIPT))["ALL"]
    return dict.fromkeys(names[number::parts])


def _play(kind: str, points: list[int] | None, work: Path) -> dict[str, Any]:
    work.mkdir()
    bare = _run(kind, work / "bare", runs_as_trial=False)
    plain = _run(kind, work / "plain")
    saving = _run(kind, work / "saving", keeps=True)
    kept = sorted((work / "saving" / "kept").iterdir(), key=lambda path: int(path.name))
    resumed = []
    for path in kept if points is None else [kept[point % len(kept)] for point in points]:
        point = json.loads((path / "point.json").read_text())
        run = _run(kind, work / f"from-{path.name}", path / "checkpoints", point["name"])
        resumed.append({**run, **point})
        shutil.rmtree(path)
    return {"bare": bare, "plain": plain, "saving": saving, "resumed": resumed}


def _run(
    kind: str,
    work: Path,
    checkpoints: Path | None = None,
    resume_from: str | None = None,
    *,
    runs_as_trial: bool = True,
    keeps: bool = False,
) -> dict[str, Any]:
    work.mkdir()
    observed, output = work / "observed.txt", work / "output.txt"
    folder = checkpoints or work / "checkpoints"
    child = os.fork()
    if child == 0:
        try:
            signal.alarm(_DEADLINE_S)
            writes = os.O_WRONLY | os.O_CREAT | os.O_APPEND
            os.environ["OBSERVED_FD"] = str(os.open(observed, writes))
            descriptor = os.open(output, writes)
            os.dup2(descriptor, 1)
            os.dup2(descriptor, 2)
            os.chdir(work)
            randomness.install(_SEED)
            runtime: TrialRuntime | None = None
            if runs_as_trial:
                spec = TrialSpec(
                    search="test",
                    number=0,
                    run=0 if resume_from is None else 1,
                    parameters={},
                    folder=str(folder),
                    resume_from=None if resume_from is None else f"{folder}/{resume_from}",
                    checkpoint_interval_s=1000.0,
                )
                runtime = SavingRuntime(spec, observed, work / "kept") if keeps else TrialRuntime(spec)
                keras_fit.install(runtime)
            code = 1
            try:
                run_as_main(str(SCRIPT), [kind])
                code = 0
            except BaseException:
                traceback.print_exc()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
        finally:
            os._exit(99)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    lines = observed.read_text().splitlines() if observed.exists() else []
    return {"code": code, "lines": lines, "output": output.read_text()[-4000:]}


if __name__ == "__main__":
    main()
