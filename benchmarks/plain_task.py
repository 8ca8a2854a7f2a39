"""Compares one plain task with `python` and with workers and a ps: samples per second, predicted and measured."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.start.step_log import read_steps

TITLE = "One plain task"
SCRIPT = Path(__file__).parent / "start" / "scripts" / "two_epochs.py"
DIKE = Path(sys.executable).with_name("dike")
BATCH_SIZE = 32
REPEATS = 7
WARM_UP = 126
"""Steps that are not counted: they trace and fill caches."""
TIMEOUT_S = 600


@dataclass(frozen=True)
class Model:
    """A model of the script: `layers` hidden layers of `width` units, trained for `epochs` of 63 steps."""

    layers: int
    width: int
    epochs: int

    @property
    def name(self) -> str:
        return f"{self.layers} x {self.width}"


MODELS = (Model(1, 64, 40), Model(2, 512, 20), Model(3, 1024, 8))
WAYS: dict[str, tuple[str | Path, ...]] = {
    "python": (sys.executable,),
    "plain": (DIKE, "run", "--format", "json"),
    "ps": (DIKE, "run", "--format", "json", "--strategy", "ps"),
}
"""How the script is run; `ps` is the fastest plan with parameter servers."""


@dataclass(frozen=True)
class Run:
    """Wall time, measured and predicted samples per second (0 without a plan), and number of tasks."""

    wall_s: float
    rate: float
    predicted: float
    tasks: int


def measure() -> Iterator[str]:
    runs: dict[tuple[str, str], list[Run]] = {(model.name, way): [] for model in MODELS for way in WAYS}
    for _ in range(REPEATS):
        for model in MODELS:
            for way in WAYS:
                run = _run(model, way)
                runs[model.name, way].append(run)
                print(model.name, way, run, file=sys.stderr, flush=True)
    yield f"`two_epochs.py` with hidden layers of several sizes, batch {BATCH_SIZE}; the three commands in rotation,"
    yield f"rounds: {REPEATS}. Samples a second after the first {WARM_UP} steps, medians; ratios are those of each"
    yield "round, in brackets the least and the greatest. *ps*: `--strategy ps`, the fastest with parameter servers"
    yield "that the planner knows. *in all*: from the command to the prompt; a profile is kept. The script writes a"
    yield "line to a file after each step, which no prediction knows of."
    yield ""
    yield (
        "| hidden layers | `python` | plain task | to `python` | predicted / measured | ps | to `python` | predicted / "
        "measured | in all, plain to `python` | in all, ps to `python` |"
    )
    yield "|---|---|---|---|---|---|---|---|---|---|"
    for model in MODELS:
        bare, plain, ps = (runs[model.name, way] for way in WAYS)
        cells = [
            model.name,
            f"{np.median([run.rate for run in bare]):,.0f}",
            f"{np.median([run.rate for run in plain]):,.0f}",
            _ratio([run.rate for run in plain], [run.rate for run in bare]),
            _ratio([run.predicted for run in plain], [run.rate for run in plain]),
            f"{np.median([run.rate for run in ps]):,.0f}",
            _ratio([run.rate for run in ps], [run.rate for run in bare]),
            _ratio([run.predicted for run in ps], [run.rate for run in ps]),
            _ratio([run.wall_s for run in plain], [run.wall_s for run in bare]),
            _ratio([run.wall_s for run in ps], [run.wall_s for run in bare]),
        ]
        yield f"| {' | '.join(cells)} |"
    tasks = {model.name: (runs[model.name, "plain"][0].tasks, runs[model.name, "ps"][0].tasks) for model in MODELS}
    yield ""
    chosen = ", ".join(f"{name}: {plain} and {ps}" for name, (plain, ps) in tasks.items())
    yield f"Tasks of the plan without and with `--strategy ps`: {chosen}."


def _run(model: Model, way: str) -> Run:
    with tempfile.TemporaryDirectory(prefix="dike-plain-") as made:
        folder = Path(made)
        shutil.copy(SCRIPT, folder)
        step_log = folder.parent / f"{folder.name}.marks"
        size = ("--layers", str(model.layers), "--width", str(model.width), "--epochs", str(model.epochs))
        own = {name: value for name, value in os.environ.items() if not name.startswith("DIKE_")}
        timer = [sys.executable, SCRIPT.parents[1] / "timed.py", folder / "times", TIMEOUT_S]
        command = [*timer, *WAYS[way], SCRIPT.name, step_log, *size]
        try:
            done = subprocess.run(
                list(map(str, command)), cwd=folder, env=own, capture_output=True, text=True, check=True
            )
            times = json.loads((folder / "times").read_text(encoding="utf-8"))
            if times["exit_code"]:
                raise RuntimeError(f"{command} failed:\n{done.stderr}")
            at_s = [step.at_s for step in read_steps(step_log)]
        finally:
            step_log.unlink(missing_ok=True)
    counted = at_s[WARM_UP:]
    plan = {} if way == "python" else json.loads(done.stdout)["plan"]
    return Run(
        wall_s=times["ended_s"] - times["begun_s"],
        rate=(len(counted) - 1) * BATCH_SIZE / (counted[-1] - counted[0]),
        predicted=plan.get("samples_per_s", 0.0),
        tasks=len(plan.get("tasks", ())),
    )


def _ratio(values: Sequence[float], others: Sequence[float]) -> str:
    ratios = [value / other for value, other in zip(values, others, strict=True)]
    return f"{np.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
