"""The trials of the measured searches under Ray Tune's ASHA.

    python -m benchmarks.search.ray_asha POINTS EPOCHS DIARIES

POINTS is a file of JSON lines, one configuration each.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import ray
from ray import tune
from ray.tune.schedulers import ASHAScheduler

SLOTS = 2


def main() -> None:
    """Entry point."""
    points, epochs, diaries = Path(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    ray.init(num_cpus=SLOTS, include_dashboard=False, log_to_driver=False, _temp_dir=str(diaries.parent / "ray"))

    def run(config: dict[str, Any]) -> None:
        from benchmarks.search.scripts.digits import train

        train(**config["point"], epochs=epochs, diaries=diaries, tell=lambda _, loss: tune.report({"loss": loss}))

    results = tune.Tuner(
        tune.with_resources(run, {"cpu": 1}),
        param_space={"point": tune.grid_search([json.loads(line) for line in points.read_text().splitlines()])},
        tune_config=tune.TuneConfig(
            metric="loss",
            mode="min",
            scheduler=ASHAScheduler(time_attr="training_iteration", max_t=epochs),
            reuse_actors=True,
        ),
        run_config=tune.RunConfig(storage_path=str(diaries.parent / "results"), verbose=0),
    ).fit()
    # Without waiting for Ray's own processes: their end is no part of the search.
    sys.stdout.flush()
    os._exit(1 if results.errors else 0)


if __name__ == "__main__":
    main()
