"""Jobs that the scheduler does not know yet: held, or waiting for the end of others (`--hold`, `--after`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from framework.scheduler.queue_options import Condition, Dependency, QueueOptions
from framework.scheduler.records import JobRecord, JobState


@dataclass(frozen=True)
class Blocked:
    """Why a job does not start.

    Attributes:
        reason: a sentence.
        is_final: whether it can never start.
    """

    reason: str
    is_final: bool = False


def why_blocked(record: JobRecord, find: Callable[[str], JobRecord | None]) -> Blocked | None:
    """Returns why a job must not start now; None if it may. A job that has run before is never blocked.

    Args:
        record: the job.
        find: returns a job by its id; None if it has been deleted.
    """
    if record.started_s is not None:
        return None
    options = QueueOptions.of(record.request)
    found = [_unmet(dependency, find(dependency.job_id)) for dependency in options.dependencies]
    unmet = [one for one in found if one is not None]
    for one in unmet:
        if one.is_final:
            return one
    if options.hold:
        return Blocked(f"The job is held; dike release {record.id} lets it start.")
    return unmet[0] if unmet else None


def _unmet(dependency: Dependency, other: JobRecord | None) -> Blocked | None:
    name, condition = dependency.job_id, dependency.condition
    if other is None:
        return (
            None if condition is Condition.ANY else Blocked(f"--after {dependency}: {name} was deleted", is_final=True)
        )
    if not other.state.has_ended():
        how = {Condition.OK: " to finish", Condition.ANY: " to end", Condition.FAILED: " to fail"}[condition]
        return Blocked(f"The job waits for {name}{how} (--after).")
    is_met = condition is Condition.ANY or (condition is Condition.OK) == (other.state is JobState.FINISHED)
    return None if is_met else Blocked(f"--after {dependency}: {name} {other.state.verb}", is_final=True)
