"""What a process of a trial knows about itself; travels in the environment variable `DIKE_TRIAL`."""

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
EARLIER_RESULTS = ".dike-earlier-results.json"
"""File that travels with a script that calls `dike.tune` more than once: it may be too long for a variable."""

Value = bool | int | float | str
"""A hyper-parameter's value."""

EXIT_SUSPENDED = 75
"""Exit code of a trial that has saved its state and given its slot back (sysexits' EX_TEMPFAIL: try again later)."""

EXIT_BAD_INPUT = 2


@dataclass(frozen=True)
class TrialSpec:
    """One run of one trial: from its start, or from a checkpoint, to its end or its next suspension.

    Attributes:
        search: name of the search.
        number: the trial's number in the search, from 0.
        run: how many times the trial was started before.
        parameters: name -> value, as the user named them.
        folder: the trial's own folder for checkpoints; any path `tf.io.gfile` understands. A run writes only to names
            that hold its own number, so that two runs can never overwrite each other.
        resume_from: checkpoint of an earlier run that this one goes on from; None to begin anew.
        checkpoint_interval_s: seconds between periodic checkpoints.
        metric: the objective: `loss` for the training loss, or the name of another metric.
        mode: `min` or `max`: whether the least or the greatest value is best.
        call: which call of `dike.tune` in the script this trial belongs to, from 0; None if the whole script is it.
        earlier_results: what the calls before that one returned, as JSON values; read from `EARLIER_RESULTS`.
        report_fd: file descriptor to which reports are written; None to report nothing.
        control_fd: file descriptor from which requests are read, one a line; None for none. `suspend`: save and end;
            `pause`: save, and wait for `continue N`, as run N.
        every_value: whether each value of the objective that is stated is reported, not only the newest of a stretch.
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

    def checkpoint_path(self, step: int) -> str:
        """Where this run puts its checkpoint of a step; no other run and no other step uses the name."""
        return f"{self.folder.rstrip('/')}/run-{self.run}-step-{step}"

    def best_path(self, step: int) -> str:
        """Where this run keeps the model of a step, as long as that is the best so far."""
        return f"{self.folder.rstrip('/')}/best-run-{self.run}-step-{step}"

    def dumps(self) -> str:
        """The trial as JSON text, for the environment variable."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def loads(cls, text: str) -> TrialSpec:
        """Reads what `dumps` wrote."""
        values = json.loads(text)
        values["earlier_results"] = tuple(values["earlier_results"])
        return cls(**values)


def step_of_checkpoint(path: str) -> int:
    """The step in a path that `TrialSpec.checkpoint_path` made; 0 for any other path."""
    step = path.rstrip("/").rpartition("-step-")[2]
    return int(step) if step.isdecimal() else 0


def current(environ: Mapping[str, str] = os.environ) -> TrialSpec | None:
    """The trial this process is a run of, or None when it is none; to be asked first before the script runs."""
    text = environ.get(VARIABLE)
    if not text:
        return None
    spec = TrialSpec.loads(text)
    if not spec.call:
        return spec
    earlier = json.loads(Path(environ.get("DIKE_OUTPUT_DIR", ""), EARLIER_RESULTS).read_text(encoding="utf-8"))
    return dataclasses.replace(spec, earlier_results=tuple(earlier))
