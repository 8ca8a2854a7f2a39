"""The result of a search as JSON values: what `dike tune --format json` prints, and a service keeps."""

from __future__ import annotations

import math
from typing import Any

from framework.search.records import SearchResult, TrialRecord
from framework.search.speeds import samples_per_step
from framework.service.records import JobState
from framework.service.tenant import Outcome


def outcome_of(result: SearchResult, *, cancelled: bool) -> Outcome:
    """How a search ended, as a job of a service.

    Args:
        result: of the search.
        cancelled: whether somebody wanted its end.
    """
    values = result_to_json(result)
    if cancelled and not result.complete:
        return Outcome(JobState.KILLED, result.failure, values)
    failure = "" if cancelled else result.failure
    if result.best is None:
        failure = failure or "no trial has succeeded"
    return Outcome(JobState.FAILED if failure else JobState.FINISHED, failure, values)


def result_to_json(result: SearchResult) -> dict[str, Any]:
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
        "slot": trial.slot,
        "batch_size": samples_per_step(trial),
        "agent": trial.agent,
        "step": trial.step,
        "loss": _number(trial.loss),
        "value": _number(trial.value),
        "metrics": {name: _number(value) for name, value in trial.metrics.items()},
        "convergence": _number(trial.convergence),
        "checkpoint": trial.checkpoint,
        "train_s": round(trial.train_s, 3),
        "slot_s": round(trial.slot_s, 3),
        "runs": trial.runs,
        "created_s": trial.created_s,
        "ended_s": trial.ended_s,
        "error": trial.error,
    }


def _number(value: float | None) -> float | str | None:
    return value if value is None or math.isfinite(value) else str(value)
