"""A fake training job that another service goes on with."""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Any

from framework.training.controller import TrainingJob
from framework.training.spec import JobSpec
from tests.training.job_stage import JobStage


def written(job: TrainingJob) -> Any:
    """A job's state as the database gives it back."""
    return json.loads(json.dumps(job.to_state(), allow_nan=False))


def another(stage: JobStage, job_spec: JobSpec, state: Any, launched: Collection[str] | None = None) -> None:
    """Another service goes on with the stage's job."""
    stage.begin(job_spec, state, launched)


def subscribe(stage: JobStage, master_age_s: float | None = None) -> None:
    stage.subscribe(master_age_s)


def go_on(stage: JobStage, job_spec: JobSpec, launched: Collection[str] | None = None) -> None:
    """The service ends without a word, and another one takes its place."""
    another(stage, job_spec, written(stage.job), launched)
    subscribe(stage)
