"""Runs the trials of the measured searches under Ray Tune.

    python -m benchmarks.search.ray_tune SCHEDULER SCRIPT POINTS EPOCHS LOGS

SCRIPT is a module with a function `train`, POINTS a file of JSON lines, one configuration each. Prints the end of the
search, in seconds since the Unix epoch.
"""

from __future__ import annotations

import importlib
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import ray
from ray import tune
from ray.tune.schedulers import ASHAScheduler, HyperBandScheduler

SLOTS = 2
SCHEDULERS = {"asha": ASHAScheduler, "hyperband": HyperBandScheduler}
PAUSES = "hyperband"
"""The scheduler whose trials resume from checkpoints."""
MODEL = "model.keras"


def main() -> None:
    scheduler, script = sys.argv[1:3]
    points, epochs, logs = Path(sys.argv[3]), int(sys.argv[4]), Path(sys.argv[5])
    ray.init(num_cpus=SLOTS, include_dashboard=False, log_to_driver=False, _temp_dir=str(logs.parent / "ray"))

    def report(_: int, loss: float, __: Any) -> None:
        tune.report({"loss": loss})

    def save_and_report(done: int, loss: float, model: Any) -> None:
        with tempfile.TemporaryDirectory() as folder:
            model.save(Path(folder) / MODEL)
            checkpoint = tune.Checkpoint.from_directory(folder)
            checkpoint.set_metadata({"epochs": done})
            tune.report({"loss": loss}, checkpoint=checkpoint)

    def run(config: dict[str, Any]) -> None:
        train = importlib.import_module(script).train
        options = {**config["point"], "epochs": epochs, "logs": logs}
        checkpoint = tune.get_checkpoint()
        if checkpoint is not None:
            with checkpoint.as_directory() as folder:
                done = checkpoint.get_metadata()["epochs"]
                train(**options, on_epoch=save_and_report, saved=Path(folder) / MODEL, initial_epoch=done)
        else:
            train(**options, on_epoch=save_and_report if scheduler == PAUSES else report)

    results = tune.Tuner(
        tune.with_resources(run, {"cpu": 1}),
        param_space={"point": tune.grid_search([json.loads(line) for line in points.read_text().splitlines()])},
        tune_config=tune.TuneConfig(
            metric="loss",
            mode="min",
            scheduler=SCHEDULERS[scheduler](time_attr="training_iteration", max_t=epochs),
            reuse_actors=True,
        ),
        run_config=tune.RunConfig(storage_path=str(logs.parent / "results"), verbose=0),
    ).fit()
    # Before Ray's own processes end, which is not part of the search.
    print(time.time())
    if results.errors:
        raise results.errors[0]


if __name__ == "__main__":
    main()
