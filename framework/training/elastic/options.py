"""What the user of an elastic job is notified of before it starts."""

from __future__ import annotations

from dike.profile import Api
from framework.training.spec import JobSpec


def elastic_notes(spec: JobSpec) -> list[str]:
    """Notes for the user of an elastic job before it starts."""
    assert spec.elastic is not None
    notes = []
    if spec.replicas is not None:
        notes.append(
            f"a step takes {spec.replicas} batches, {spec.replicas * spec.profile.batch_size} samples, whatever the "
            "number of workers (--elastic)"
        )
    if spec.profile.api is Api.COORDINATOR:
        notes.append("the job keeps its size: its script's own loop cannot be stopped and resumed")
    return notes
