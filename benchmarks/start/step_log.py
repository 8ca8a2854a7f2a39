"""The log of steps that the measured scripts write."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Step:
    """A step of a script.

    Attributes:
        at_s: its end, by `time.monotonic`.
        task: its task, such as `worker:1`; `-` outside of a job.
    """

    at_s: float
    pid: int
    task: str


def read_steps(step_log: Path) -> list[Step]:
    """Reads the steps so far, in the order of their ends."""
    lines = step_log.read_text(encoding="utf-8").splitlines(keepends=True) if step_log.exists() else []
    words = [line.split() for line in lines if line.endswith("\n")]
    return sorted((Step(float(at_s), int(pid), task) for at_s, pid, task in words), key=lambda step: step.at_s)
