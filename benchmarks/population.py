"""Population based training beside Ray Tune's, and beside the same trials without it."""

from __future__ import annotations

import contextlib
import json
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.search.contenders import SCRIPTS, SLOTS, run_module
from framework.search.store import Store

TITLE = "Population based training"
RATES = (1e-6, 1e-5, 1e-4, 3e-4, 1e-3, 3e-3, 0.3, 1.0)
"""Learning rates of the trials: few are good at the beginning, and a lower one is better later."""
EPOCHS = 16
INTERVAL_EPOCHS = 2
QUANTUM_S = 1.6
"""Dike's interval; about as long as that many epochs."""
REPEATS = 3
KINDS = {
    "Dike, `--policy fifo`": ("--policy", "fifo"),
    "Dike, `--policy pbt`": ("--policy", "pbt", "--mutate", "lr", "--quantum", f"{QUANTUM_S:g}"),
    "Ray Tune, FIFO": ("fifo",),
    "Ray Tune, `PopulationBasedTraining`": ("pbt",),
}
"""Kind of search -> options of `dike tune`, or the argument of this module."""


@dataclass(frozen=True)
class Outcome:
    """A search that has ended: its duration, the trials' last validation losses, and the number of copies."""

    seconds: float
    losses: Sequence[float]
    copies: int


def measure() -> Iterator[str]:
    rates = ", ".join(f"{rate:g}" for rate in RATES)
    yield f"{len(RATES)} trials of `{SCRIPTS.name}/population.py`, a CNN on 8x8 digits, {EPOCHS} epochs each, on"
    yield f"{SLOTS} slots of one CPU; learning rates {rates}. An interval is {INTERVAL_EPOCHS} epochs"
    yield f"for Ray Tune and {QUANTUM_S:g} s of training for Dike. {REPEATS} searches of each kind with other seeds,"
    yield "in rotation: the median and, after the comma, the least and the greatest. From the start of the command to"
    yield "its end."
    yield ""
    yield "| search | best validation loss | median validation loss | copies | search, s |"
    yield "|---|---|---|---|---|"
    found: dict[str, list[Outcome]] = {kind: [] for kind in KINDS}
    for seed in range(REPEATS):
        for kind, options in KINDS.items():
            with tempfile.TemporaryDirectory() as folder:
                run = _run_dike if kind.startswith("Dike") else _run_ray
                found[kind].append(run(Path(folder), options, seed))
    for kind, outcomes in found.items():
        best = _spread([min(outcome.losses) for outcome in outcomes], ".4f")
        median = _spread([statistics.median(outcome.losses) for outcome in outcomes], ".4f")
        copies = _spread([outcome.copies for outcome in outcomes], "d")
        yield f"| {kind} | {best} | {median} | {copies} | {_spread([one.seconds for one in outcomes], '.0f')} |"


def _spread(values: Sequence[float], form: str) -> str:
    middle = statistics.median_low(values)
    return f"{middle:{form}}, {min(values):{form}} to {max(values):{form}}"


def _run_dike(folder: Path, options: Sequence[str], seed: int) -> Outcome:
    storage = f"sqlite:///{folder}/searches.db"
    begun_s = time.monotonic()
    arguments = [
        *("framework", "tune", str(SCRIPTS / "population.py"), *options, "--seed", str(seed), "--name", "population"),
        *("--param", f"lr={','.join(map(str, RATES))}", "--metric", "val_loss", "--format", "json"),
        *("--slots", str(SLOTS), "--slot-mem", "1024", "--resources", f"cpus:{SLOTS};mem:{SLOTS * 1024}"),
        *("--storage", storage, "--", "--epochs", str(EPOCHS)),
    ]
    output = run_module(arguments, folder)
    seconds = time.monotonic() - begun_s
    trials = json.loads(output)["trials"]
    with contextlib.closing(Store(storage, must_exist=True)) as store:
        store.open_search("population")
        copies = sum(piece.reason.startswith("copies") for piece in store.load_slices())
    return Outcome(seconds, [_finite(trial["value"]) for trial in trials], copies)


def _run_ray(folder: Path, options: Sequence[str], seed: int) -> Outcome:
    begun_s = time.monotonic()
    output = run_module(["benchmarks.population", *options, str(seed)], folder)
    # Before Ray's own processes end, which is not part of the search.
    last = json.loads(output.splitlines()[-1])
    return Outcome(last["ended_s"] - begun_s, [_finite(loss) for loss in last["losses"]], last["copies"])


def _finite(loss: float | None) -> float:
    return math.inf if loss is None or not math.isfinite(loss) else loss


def _train_for_ray(kind: str, seed: int) -> None:
    import ray
    from population import train  # type: ignore[import-not-found]  # a script, found by PYTHONPATH
    from ray import tune
    from ray.tune.schedulers import FIFOScheduler, PopulationBasedTraining

    ray.init(num_cpus=SLOTS, include_dashboard=False, log_to_driver=False, _temp_dir=os.path.abspath("ray"))
    copies = 0

    class Counting(PopulationBasedTraining):
        def _exploit(self, *arguments: object) -> None:
            nonlocal copies
            copies += 1
            super()._exploit(*arguments)

    def run(config: dict[str, float]) -> None:
        def report(done: int, loss: float, model: object) -> None:
            if kind == "fifo" or done % INTERVAL_EPOCHS:
                tune.report({"val_loss": loss})
                return
            with tempfile.TemporaryDirectory() as saved:
                model.save(Path(saved) / "model.keras")  # type: ignore[attr-defined]
                checkpoint = tune.Checkpoint.from_directory(saved)
                checkpoint.set_metadata({"epochs": done})
                tune.report({"val_loss": loss}, checkpoint=checkpoint)

        checkpoint = tune.get_checkpoint()
        if checkpoint is None:
            train(config["lr"], epochs=EPOCHS, on_epoch=report)
            return
        with checkpoint.as_directory() as saved:
            done = checkpoint.get_metadata()["epochs"]
            model = Path(saved) / "model.keras"
            train(config["lr"], epochs=EPOCHS, on_epoch=report, saved=model, initial_epoch=done)

    scheduler = FIFOScheduler()
    if kind == "pbt":
        scheduler = Counting(
            time_attr="training_iteration",
            perturbation_interval=INTERVAL_EPOCHS,
            hyperparam_mutations={"lr": list(RATES)},
        )
    results = tune.Tuner(
        tune.with_resources(run, {"cpu": 1}),
        param_space={"lr": tune.grid_search(list(RATES))},
        tune_config=tune.TuneConfig(metric="val_loss", mode="min", scheduler=scheduler, reuse_actors=True),
        run_config=tune.RunConfig(storage_path=os.path.abspath("results"), verbose=0),
    ).fit()
    if results.errors:
        raise results.errors[0]
    losses = [result.metrics["val_loss"] for result in results]
    finite = [loss if math.isfinite(loss) else None for loss in losses]
    print(json.dumps({"ended_s": time.monotonic(), "losses": finite, "copies": copies}))


def main() -> None:
    import random

    import numpy as np

    kind, seed = sys.argv[1], int(sys.argv[2])
    random.seed(seed)
    np.random.seed(seed)
    _train_for_ray(kind, seed)


if __name__ == "__main__":
    main()
