"""Plays each kind of input with every step of a short training as the point of interruption.

`python resume_matrix.py FOLDER` plays what FOLDER/plays.json says: kind -> indices of checkpoints to resume from, null
for all of them. `python resume_matrix.py FOLDER PART PARTS` plays all checkpoints of every PARTS-th kind, from the
PART-th. A kind is trained three times from its beginning - without Dike, as a trial, and as a trial that writes a
checkpoint at every opportunity - and then once more from each of these checkpoints. FOLDER/KIND.json gets what was
observed: `bare`, `plain`, `saving`, and `resumed`: for each checkpoint the lines that its run observed, with `before`,
the number of lines of `saving` that were there when it was written. Each run is a fork of one process that has
imported TensorFlow.

A kind that ends with `-job` is trained by the chief of a job with a parameter server and one worker, a step at a time,
so that it is the same each time. Every second checkpoint is resumed by two workers, as after a change of `--elastic`:
only its lines that begin with `data` are the same then.
"""

from __future__ import annotations

import gc
import hashlib
import json
import os
import runpy
import shutil
import signal
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from dike import randomness
from dike.keras3 import job as keras_job
from dike.keras3 import trial as keras_fit
from dike.keras3.job import epoch
from dike.keras3.job.batches import Batch, JobBatches
from dike.keras3.job.checkpoints import FitCheckpoint
from dike.main_script import run_as_main
from dike.profile import Api
from dike.task import Role, TaskSpec
from dike.trial.runtime import TrialRuntime
from dike.trial.spec import TrialSpec
from framework.embedded.ports import reserve_blocks

SCRIPT = Path(__file__).parent / "scripts" / "keras_inputs.py"
_DEADLINE_S = 120
_SEED = 7


class Keeper:
    """Keeps each checkpoint, with all that it needs, in a folder of its own.

    Args:
        observed: the file with what the script observed.
        kept: where the copies go.
    """

    def __init__(self, observed: Path, kept: Path) -> None:
        self._observed = observed
        self._kept = kept
        self._count = 0

    def keep(self, checkpoints: str, name: str) -> None:
        folder = self._kept / str(self._count)
        self._count += 1
        shutil.copytree(checkpoints, folder / "checkpoints")
        before = len(self._observed.read_text().splitlines())
        (folder / "point.json").write_text(json.dumps({"name": name, "before": before}))


class FakeSavingRuntime(TrialRuntime):
    """Writes a checkpoint wherever it can."""

    def __init__(self, spec: TrialSpec, keeper: Keeper) -> None:
        super().__init__(spec)
        self._keeper = keeper

    @property
    def checkpoint_due(self) -> bool:
        return True

    def checkpoint_written(self, path: str, step: int) -> None:
        super().checkpoint_written(path, step)
        self._keeper.keep(os.path.dirname(path), os.path.basename(path))


def run_as_chief(folder: Path, attempt: int, workers: int, keeper: Keeper | None) -> list[Any]:
    """Makes this process the chief of a job whose servers it has as well; returns what must stay.

    Args:
        folder: of the job's checkpoints.
        attempt: how many times it was started before.
        workers: how many there are.
        keeper: gets a checkpoint of every opportunity; None to write those of a job.
    """
    [block] = reserve_blocks(1)
    ports = iter(block)
    counts = {Role.PS: 1, Role.WORKER: workers, Role.CHIEF: 1}
    cluster = {str(role): [f"127.0.0.1:{next(ports)}" for _ in range(count)] for role, count in counts.items()}
    task = TaskSpec(
        job_id="test",
        role=Role.CHIEF,
        index=0,
        cluster=cluster,
        api=Api.KERAS,
        checkpoint_dir=str(folder),
        checkpoint_interval_s=1000.0 if keeper is None else 0.0,
        attempt=attempt,
    )
    os.environ["TF_CONFIG"] = json.dumps(task.tf_config)
    servers = [
        tf.distribute.Server(cluster, role, index, protocol="grpc")
        for role in (Role.PS, Role.WORKER)
        for index in range(counts[role])
    ]
    epoch._MAX_IN_FLIGHT_PER_WORKER = 1
    read, save = JobBatches.epoch, FitCheckpoint._save

    def observed_epoch(self: JobBatches, watcher: Any) -> Iterator[Batch]:
        for batch in read(self, watcher):
            digest = hashlib.sha1(b"".join(np.asarray(part).tobytes() for part in batch.tensors)).hexdigest()[:12]
            os.write(int(os.environ["OBSERVED_FD"]), f"data {batch.index} {digest}\n".encode())
            yield batch

    def save_and_keep(self: FitCheckpoint, *arguments: Any) -> None:
        save(self, *arguments)
        assert keeper is not None
        keeper.keep(str(folder), f"fit-{self._number}")

    JobBatches.epoch = observed_epoch
    if keeper is not None:
        FitCheckpoint._save = save_and_keep
    keras_job.install(task)
    return [block, servers]


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
        workers = 1 + int(path.name) % 2 if kind.endswith("-job") else 1
        run = _run(kind, work / f"from-{path.name}", path / "checkpoints", point["name"], workers=workers)
        resumed.append({**run, **point, "workers": workers})
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
    workers: int = 1,
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
            keeper = Keeper(observed, work / "kept") if keeps else None
            if runs_as_trial and kind.endswith("-job"):
                _kept = run_as_chief(folder, int(resume_from is not None), workers, keeper)
            elif runs_as_trial:
                spec = TrialSpec(
                    search="test",
                    number=0,
                    run=0 if resume_from is None else 1,
                    parameters={},
                    folder=str(folder),
                    resume_from=None if resume_from is None else f"{folder}/{resume_from}",
                    checkpoint_interval_s=1000.0,
                )
                runtime = TrialRuntime(spec) if keeper is None else FakeSavingRuntime(spec, keeper)
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
