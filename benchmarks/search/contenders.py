"""Runs one whole search of the digits trials, by Dike or by another library, and reads what the trials wrote down."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.search.slot import slot_environment
from framework.search.store import Store

ROOT = Path(__file__).parents[2]
SCRIPT = Path(__file__).parent / "scripts" / "digits.py"
OTHERS = {"Ray Tune, ASHA": "ray_asha", "Optuna, median pruner": "optuna_median"}
"""Name -> the module that runs the search."""
SLOTS = 2
TIMEOUT_S = 300.0
NAME = "digits"

Space = Mapping[str, Sequence[Any]]
Epoch = tuple[float, float]
"""When an epoch ended, in seconds since the search was started, and its loss."""


@dataclass(frozen=True)
class SearchRun:
    """A search that has run to its end.

    Attributes:
        begun_s: when the first trial began to train, in seconds since the command was started, and
        ended_s: when the command had ended.
        epochs: configuration -> the epochs it was trained for, in their order.
        suspend_s: seconds from each request to suspend to the slot being free.
        resume_s: seconds from each decision to go on with a trial to its first step.
    """

    begun_s: float
    ended_s: float
    epochs: dict[str, list[Epoch]]
    suspend_s: tuple[float, ...] = ()
    resume_s: tuple[float, ...] = ()

    def reached_s(self, configuration: str, target: float) -> float:
        """When the loss of a configuration came down to a target; infinity if it was stopped before."""
        return next((at_s for at_s, loss in self.epochs.get(configuration, ()) if loss <= target), math.inf)

    def finished_s(self, configuration: str, epochs: int) -> float:
        """When a configuration had been trained to the end; infinity if it was stopped before."""
        done = self.epochs.get(configuration, [])
        return done[epochs - 1][0] if len(done) >= epochs else math.inf


def shuffled(space: Space, seed: int) -> Space:
    """The same space with parameters and values in another order, and so another order of the grid's trials."""
    order = random.Random(seed)  # noqa: S311
    return {name: order.sample(space[name], len(space[name])) for name in order.sample(list(space), len(space))}


def run_dike(policy: str, space: Space, epochs: int, quantum_s: float, seed: int) -> SearchRun:
    """Runs `dike tune` on an embedded Mesos.

    Raises:
        RuntimeError: if the search fails.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        diaries = folder / "diaries"
        diaries.mkdir()
        storage = f"sqlite:///{folder / 'searches.db'}"
        parameters = [f"--param={name}={','.join(map(str, values))}" for name, values in space.items()]
        options = {
            "name": NAME,
            "policy": policy,
            "seed": seed,
            "quantum": quantum_s,
            "slots": SLOTS,
            "slot-mem": 1024,
            "resources": f"cpus:{SLOTS};mem:{SLOTS * 1024}",
            "storage": storage,
            "format": "json",
        }
        begin_s = time.time()
        flags = [f"--{name}={value}" for name, value in options.items()]
        own = ["--", "--epochs", str(epochs), "--diaries", str(diaries)]
        output = _run(["framework", "tune", str(SCRIPT), *parameters, *flags, *own], folder)
        ended_s = time.time() - begin_s
        if not json.loads(output)["complete"]:
            raise RuntimeError(f"the search under {policy} is not complete: {output}")
        with contextlib.closing(Store(storage, must_exist=True)) as store:
            store.open_search(NAME)
            slices = store.load_slices()
        return _read(
            diaries,
            begin_s,
            ended_s,
            tuple(one.suspend_s for one in slices if one.outcome == "suspended" and one.suspend_s is not None),
            tuple(one.first_step_s - one.start_s for one in slices if one.run and one.first_step_s is not None),
        )


def run_other(library: str, space: Space, epochs: int) -> SearchRun:
    """Runs the same trials in the same order under another library.

    Raises:
        RuntimeError: if the search fails.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        diaries = folder / "diaries"
        diaries.mkdir()
        points = folder / "points.jsonl"
        rows = (json.dumps(dict(zip(space, point, strict=True))) for point in itertools.product(*space.values()))
        points.write_text("\n".join(rows) + "\n", encoding="utf-8")
        begin_s = time.time()
        _run([f"benchmarks.search.{OTHERS[library]}", str(points), str(epochs), str(diaries)], ROOT)
        return _read(diaries, begin_s, time.time() - begin_s)


def _run(arguments: Sequence[str], folder: Path) -> str:
    """Runs a module of ours with threads as a slot of one CPU has them; returns its output."""
    environment = {**slot_environment(), "PYTHONPATH": str(ROOT)}
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
        raise RuntimeError(f"{' '.join(arguments[:2])} has failed:\n{done.stderr[-4000:]}")
    return done.stdout


def _read(
    diaries: Path, begin_s: float, ended_s: float, suspend_s: tuple[float, ...] = (), resume_s: tuple[float, ...] = ()
) -> SearchRun:
    epochs: dict[str, list[Epoch]] = {}
    begun_s = math.inf
    for path in sorted(diaries.iterdir()):
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        begun_s = min(begun_s, lines[0]["time"] - begin_s)
        ends = [line for line in lines if line["epochs"]]
        if [line["epochs"] for line in ends] != list(range(1, len(ends) + 1)):
            raise RuntimeError(f"{path.stem} was not trained epoch by epoch: {[line['epochs'] for line in ends]}")
        epochs[path.stem] = [(line["time"] - begin_s, line["loss"]) for line in ends]
    return SearchRun(begun_s, ended_s, epochs, suspend_s, resume_s)
