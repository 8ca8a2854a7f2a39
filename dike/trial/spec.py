"""The description of a trial's run, passed to its process in the environment variable `DIKE_TRIAL`."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

VARIABLE = "DIKE_TRIAL"
PARAMS_VARIABLE = "DIKE_PARAMS"
"""Parameters for `dike.params` outside of a search, as a JSON object."""
GPU_MEMORY_VARIABLE = "DIKE_GPU_MEMORY_MIB"
"""Maximum GPU memory of a trial that shares its GPU with others, MiB, without its CUDA context."""
EARLIER_RESULTS = ".dike-earlier-results.json"
"""File in the bundle of a script that calls `dike.tune` several times; too long for an environment variable."""

Value = bool | int | float | str

EXIT_SUSPENDED = 75
"""Exit code of a suspended trial (EX_TEMPFAIL of sysexits: try again later)."""

EXIT_BAD_INPUT = 2


@dataclass(frozen=True)
class TrialSpec:
    """One run of a trial: from its beginning or a checkpoint to its end or its next suspension.

    Attributes:
        search: name of the search.
        number: number of the trial in the search, from 0.
        run: number of earlier runs of the trial.
        parameters: name -> value, with the user's names.
        folder: the trial's folder for checkpoints; any path that `tf.io.gfile` accepts. Names that a run writes contain
            its own number, so that two runs never overwrite each other.
        resume_from: checkpoint to resume from; None to start over.
        checkpoint_interval_s: seconds between periodic checkpoints.
        metric: the objective: `loss` for the training loss, or the name of another metric.
        mode: `min` or `max`.
        call: index of the call of `dike.tune` in the script that this trial belongs to; None if it runs the whole
            script.
        earlier_results: results of the calls before that one; read from `EARLIER_RESULTS`.
        report_fd: file descriptor to write reports to; None for no reports.
        control_fd: file descriptor to read requests from, one per line. `suspend`: save and end; `pause`: save, and
            wait for `continue N` to resume as run N.
        processes: number of equal processes of a script that distributes itself.
        every_value: whether to report each value of the objective, not only the newest of an interval.
        max_steps, max_epochs: numbers of steps and epochs after which the trial has finished; None for no limit.
    """

    search: str
    number: int
    run: int
    parameters: dict[str, Value]
    folder: str
    resume_from: str | None = None
    checkpoint_interval_s: float = 60.0
    metric: str = "loss"
    call: int | None = None
    earlier_results: tuple[dict[str, Any], ...] = ()
    mode: str = "min"
    report_fd: int | None = None
    control_fd: int | None = None
    every_value: bool = False
    processes: int = 1
    max_steps: int | None = None
    max_epochs: int | None = None

    @property
    def copies(self) -> bool:
        """Whether it resumes from the checkpoint of another trial, with parameters of its own."""
        return self.resume_from is not None and not self.resume_from.startswith(f"{self.folder.rstrip('/')}/")

    def checkpoint_path(self, step: int) -> str:
        """Unique per run and step."""
        return f"{self.folder.rstrip('/')}/run-{self.run}-step-{step}"

    def best_path(self, step: int) -> str:
        """Path of the best model, which is from a step of this run."""
        return f"{self.folder.rstrip('/')}/best-run-{self.run}-step-{step}"

    def dumps(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def loads(cls, text: str) -> TrialSpec:
        values = json.loads(text)
        values["earlier_results"] = tuple(values["earlier_results"])
        return cls(**values)


def step_of_checkpoint(path: str) -> int:
    """Returns the step in a path of `TrialSpec.checkpoint_path`; 0 for any other path."""
    step = path.rstrip("/").rpartition("-step-")[2]
    return int(step) if step.isdecimal() else 0


def current(environ: Mapping[str, str] = os.environ) -> TrialSpec | None:
    """Returns the trial that this process is a run of, or None. Call before the script runs."""
    text = environ.get(VARIABLE)
    if not text:
        return None
    spec = TrialSpec.loads(text)
    if not spec.call:
        return spec
    earlier = json.loads(Path(environ.get("DIKE_OUTPUT_DIR", ""), EARLIER_RESULTS).read_text(encoding="utf-8"))
    return dataclasses.replace(spec, earlier_results=tuple(earlier))
