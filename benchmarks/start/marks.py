"""What the scripts of this benchmark write: a line for each step."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Step:
    """A step that a script has made.

    Attributes:
        at_s: when it ended, by `time.monotonic`.
        pid: of the process that made it.
        task: of the job, such as `worker:1`; `-` without a job.
    """

    at_s: float
    pid: int
    task: str


def steps_in(marks: Path) -> list[Step]:
    """The steps so far, in the order in which they ended."""
    lines = marks.read_text(encoding="utf-8").splitlines(keepends=True) if marks.exists() else []
    words = [line.split() for line in lines if line.endswith("\n")]
    return sorted((Step(float(at_s), int(pid), task) for at_s, pid, task in words), key=lambda step: step.at_s)
