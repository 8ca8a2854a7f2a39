"""Runs one whole search, by Dike or another library, and reads the logs of its trials."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil

from benchmarks.search.slot import slot_environment
from framework.search.store import Store

ROOT = Path(__file__).parents[2]
SCRIPTS = Path(__file__).parent / "scripts"
OWN = {
    "fifo": ("--policy=fifo",),
    "asha": ("--policy=asha",),
    "hermes": ("--policy=hermes",),
    "dike": ("--policy=dike",),
    "dike, --stop asha": ("--policy=dike", "--stop=asha"),
}
"""Kind of search -> options of `dike tune`."""
OTHERS = {
    "Ray Tune, ASHA": ("ray_tune", "asha"),
    "Ray Tune, HyperBand": ("ray_tune", "hyperband"),
    "Optuna, median pruner": ("optuna_pruners", "median"),
    "Optuna, Hyperband": ("optuna_pruners", "hyperband"),
}
"""Kind of search -> the module that runs it, and its first argument."""
KINDS = (*OWN, *OTHERS)
SLOTS = 2
QUANTUM_S = 3.0
TIMEOUT_S = 600.0
LOGS = "logs"

Space = Mapping[str, Sequence[Any]]
Epoch = tuple[float, float]
"""End of an epoch, in seconds since the start of the command, and its loss."""


@dataclass(frozen=True)
class Task:
    """A search task.

    Attributes:
        space: parameter -> its values.
    """

    script: str
    words: str
    space: Space
    epochs: int


@dataclass(frozen=True)
class SearchRun:
    """A finished search; times are seconds since the start of the command.

    Attributes:
        begun_s: start of the first trial's training.
        epochs: configuration -> its epochs, in order.
        suspend_s: seconds from each suspend request to the slot being free.
        resume_s: seconds from each decision to resume a trial to its first step.
        cpu_s: CPU seconds of the whole machine meanwhile.
    """

    begun_s: float
    ended_s: float
    epochs: dict[str, list[Epoch]]
    suspend_s: tuple[float, ...] = ()
    resume_s: tuple[float, ...] = ()
    cpu_s: float = math.nan

    def reached_s(self, configuration: str, target: float) -> float:
        """When a configuration reached the target loss; infinity if it was stopped before."""
        return next((at_s for at_s, loss in self.epochs.get(configuration, ()) if loss <= target), math.inf)

    def finished_s(self, configuration: str, epochs: int) -> float:
        """When a configuration finished its last epoch; infinity if it was stopped before."""
        done = self.epochs.get(configuration, [])
        return done[epochs - 1][0] if len(done) >= epochs else math.inf

    def pace(self, other: SearchRun) -> float:
        """Epoch time relative to another search: median of each configuration, weighted by epochs."""
        median_s = {name: _median_epoch_s(done) for name, done in self.epochs.items() if len(done) > 1}
        others_s = {
            name: _median_epoch_s(other.epochs[name]) for name in median_s if len(other.epochs.get(name, ())) > 1
        }
        counts = {name: len(self.epochs[name]) for name in others_s}
        own_s = sum(count * median_s[name] for name, count in counts.items())
        return own_s / sum(count * others_s[name] for name, count in counts.items())


def _median_epoch_s(epochs: Sequence[Epoch]) -> float:
    return statistics.median(end_s - begin_s for (begin_s, _), (end_s, _) in itertools.pairwise(epochs))


def run_search(kind: str, task: Task, seed: int) -> SearchRun:
    """Runs a search of one of `KINDS`; `seed` sets the order of the trials, and the seed of Dike's policies.

    Raises:
        RuntimeError: if the search fails.
    """
    space = shuffled(task.space, seed)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / LOGS).mkdir()
        busy_s = _busy_s()
        run = _run_dike(kind, task, space, seed, folder) if kind in OWN else _run_other(kind, task, space, folder)
        return replace(run, cpu_s=_busy_s() - busy_s)


def _busy_s() -> float:
    """CPU seconds of the machine since boot: the daemons of Mesos and Ray are not our children, and Ray's are niced."""
    times = psutil.cpu_times()
    return float(times.user + times.nice + times.system)


def shuffled(space: Space, seed: int) -> Space:
    """Returns the space with parameters and values, and so the grid's trials, in random order."""
    order = random.Random(seed)  # noqa: S311
    return {name: order.sample(space[name], len(space[name])) for name in order.sample(list(space), len(space))}


def _run_dike(kind: str, task: Task, space: Space, seed: int, folder: Path) -> SearchRun:
    storage = f"sqlite:///{folder / 'searches.db'}"
    options = {
        "name": task.script,
        "seed": seed,
        "metric": "loss",
        "quantum": QUANTUM_S,
        "slots": SLOTS,
        "slot-mem": 1024,
        "resources": f"cpus:{SLOTS};mem:{SLOTS * 1024}",
        "storage": storage,
        "format": "json",
    }
    flags = [
        *OWN[kind],
        *(f"--param={name}={','.join(map(str, values))}" for name, values in space.items()),
        *(f"--{name}={value}" for name, value in options.items()),
    ]
    own = ["--", "--epochs", str(task.epochs), "--logs", str(folder / LOGS)]
    begin_s = time.time()
    output = run_module(["framework", "tune", str(SCRIPTS / f"{task.script}.py"), *flags, *own], folder)
    ended_s = time.time()
    if not json.loads(output)["complete"]:
        raise RuntimeError(f"the search by {kind} is not complete: {output}")
    with contextlib.closing(Store(storage, must_exist=True)) as store:
        store.open_search(task.script)
        slices = store.load_slices()
    return _read(
        folder,
        begin_s,
        ended_s,
        tuple(one.suspend_s for one in slices if one.outcome == "suspended" and one.suspend_s is not None),
        tuple(one.first_step_s - one.start_s for one in slices if one.run and one.first_step_s is not None),
    )


def _run_other(kind: str, task: Task, space: Space, folder: Path) -> SearchRun:
    points = folder / "points.jsonl"
    rows = (json.dumps(dict(zip(space, point, strict=True))) for point in itertools.product(*space.values()))
    points.write_text("\n".join(rows) + "\n", encoding="utf-8")
    module, choice = OTHERS[kind]
    arguments = [choice, task.script, str(points), str(task.epochs), str(folder / LOGS)]
    begin_s = time.time()
    output = run_module([f"benchmarks.search.{module}", *arguments], ROOT)
    return _read(folder, begin_s, float(output.split()[-1]))


def run_module(arguments: Sequence[str], folder: Path) -> str:
    """Runs a module with the threads of a slot with one CPU; returns its output.

    Raises:
        RuntimeError: if it fails.
    """
    path = os.pathsep.join(filter(None, (str(ROOT), str(SCRIPTS), os.environ.get("PYTHONPATH"))))
    environment = {**slot_environment(), "PYTHONPATH": path, "DIKE_PRIVATE": "1"}
    done = subprocess.run(
        [sys.executable, "-m", *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(arguments[:2])} failed:\n{done.stderr[-4000:]}")
    return done.stdout


def _read(
    folder: Path, begin_s: float, ended_s: float, suspend_s: tuple[float, ...] = (), resume_s: tuple[float, ...] = ()
) -> SearchRun:
    epochs: dict[str, list[Epoch]] = {}
    begun_s = math.inf
    for path in sorted((folder / LOGS).iterdir()):
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        begun_s = min(begun_s, lines[0]["time"] - begin_s)
        ends = [line for line in lines if "loss" in line]
        if [line["epochs"] for line in ends] != list(range(1, len(ends) + 1)):
            raise RuntimeError(f"{path.stem} was not trained epoch by epoch: {[line['epochs'] for line in ends]}")
        epochs[path.stem] = [(line["time"] - begin_s, line["loss"]) for line in ends]
    return SearchRun(begun_s, ended_s - begin_s, epochs, suspend_s, resume_s)
