"""What `dike tune` says at its end."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from rich.console import Console

from framework.cli.search_view import print_result
from framework.search.plots import plot_search
from framework.search.records import SearchResult, SearchSpec, TrialRecord
from framework.search.store import Store


def report(console: Console, result: SearchResult, spec: SearchSpec, storage: str) -> None:
    """Prints the best trials and draws the search beside its checkpoints, if these are on this machine."""
    print_result(console, result, spec)
    if "://" in spec.checkpoint_dir or not any(trial.readings for trial in result.trials):
        return
    path = Path(spec.checkpoint_dir) / "search.png"
    path.parent.mkdir(parents=True, exist_ok=True)
    store = Store(storage)
    try:
        store.open_search(spec.name)
        plot_search(spec, store.load_trials(), store.load_slices(), path)
    finally:
        store.close()
    console.print(f"Plot of the losses, the slots and the best value over time: {path}", markup=False, soft_wrap=True)


def to_json(result: SearchResult) -> dict[str, Any]:
    """The result as JSON values; numbers that JSON cannot hold become text."""
    return {
        "name": result.name,
        "complete": result.complete,
        "failure": result.failure,
        "checkpoint_dir": result.checkpoint_dir,
        "best": None if result.best is None else trial_to_json(result.best),
        "trials": [trial_to_json(trial) for trial in result.trials],
    }


def trial_to_json(trial: TrialRecord) -> dict[str, Any]:
    """A trial as JSON values."""
    return {
        "number": trial.number,
        "parameters": trial.parameters,
        "state": str(trial.state),
        "step": trial.step,
        "loss": _number(trial.loss),
        "value": _number(trial.value),
        "metrics": {name: _number(value) for name, value in trial.metrics.items()},
        "checkpoint": trial.checkpoint,
        "train_s": round(trial.train_s, 3),
        "slot_s": round(trial.slot_s, 3),
        "runs": trial.runs,
        "error": trial.error,
    }


def _number(value: float | None) -> float | str | None:
    return value if value is None or math.isfinite(value) else str(value)
