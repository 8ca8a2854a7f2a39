"""Recorded speeds of training jobs by GPU type."""

from __future__ import annotations

import ast
import difflib
import gzip
import json
import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, geometric_mean
from typing import Any

import numpy as np

from dike.exceptions import BadInputError

_BATCH_SIZE = re.compile(r" \(batch size (\d+)\)$")
_MAX_SLOTS = 100_000


@dataclass(frozen=True)
class Job:
    """A job of a table, on one GPU.

    Attributes:
        name: model and batch size, as in the table.
        batch_size: samples of a step; 1 if the name has none.
        speeds: GPU type -> samples per second; only simulated types.
        reference_speed: samples per second on the type of the recorded curves.
    """

    name: str
    batch_size: float
    speeds: Mapping[str, float]
    reference_speed: float

    def pace(self, kind: str) -> float:
        """Seconds of the recorded curve per second on a GPU of this type."""
        return self.speeds[kind] / self.reference_speed

    def relative(self, kind: str) -> float:
        """Its speed relative to its mean over the types, comparable between jobs with different samples."""
        return self.speeds[kind] / fmean(self.speeds.values())


@dataclass(frozen=True)
class ThroughputTable:
    """Steps per second by GPU type and job, for single jobs on one GPU.

    Attributes:
        steps_s: GPU type -> name of the job -> steps per second.
    """

    path: Path
    steps_s: Mapping[str, Mapping[str, float]]

    @property
    def kinds(self) -> tuple[str, ...]:
        return tuple(self.steps_s)

    @property
    def reference(self) -> str:
        """The type with the greatest geometric mean speed over the jobs that all types have."""
        common = self.jobs_of(self.kinds)
        return max(self.kinds, key=lambda kind: geometric_mean([self.steps_s[kind][name] for name in common]))

    def jobs_of(self, kinds: Sequence[str]) -> tuple[str, ...]:
        """The jobs that all these types have, in the order of the table.

        Raises:
            BadInputError: if a type is unknown, or there is no such job.
        """
        for kind in kinds:
            if kind not in self.steps_s:
                near = difflib.get_close_matches(kind.lower(), self.kinds, n=1)
                hint = f"did you mean {near[0]}? " if near else ""
                raise BadInputError(
                    f"There is no GPU type '{kind}' in {self.path}, and nothing can be simulated without its speed; "
                    f"{hint}there are {', '.join(self.kinds)}."
                )
        first, *others = kinds
        common = tuple(name for name in self.steps_s[first] if all(name in self.steps_s[kind] for kind in others))
        if not common:
            raise BadInputError(f"No job in {self.path} was measured on all of {', '.join(kinds)}; leave a type out.")
        return common

    def jobs(self, kinds: Sequence[str], models: Sequence[str] = ()) -> tuple[Job, ...]:
        """The jobs that trials can be drawn from.

        Args:
            kinds: the simulated GPU types.
            models: names of models (all their batch sizes) or of jobs; empty: all jobs that all types have.

        Raises:
            BadInputError: if a type or a model is unknown, or a model was not measured on one of the types.
        """
        names = self.jobs_of(tuple(dict.fromkeys((*kinds, self.reference))))
        chosen = list(names) if not models else []
        for model in models:
            found = [name for name in names if model in (name, model_of(name))]
            if not found:
                known = sorted({model_of(name) for name in names})
                raise BadInputError(
                    f"There is no model '{model}' in {self.path} that was measured on {', '.join(kinds)}; there are "
                    f"{', '.join(known)}."
                )
            chosen += found
        return tuple(self._job(name, kinds) for name in dict.fromkeys(chosen))

    def _job(self, name: str, kinds: Sequence[str]) -> Job:
        match = _BATCH_SIZE.search(name)
        batch_size = float(match[1]) if match else 1.0
        speeds = {kind: self.steps_s[kind][name] * batch_size for kind in dict.fromkeys(kinds)}
        return Job(name, batch_size, speeds, self.steps_s[self.reference][name] * batch_size)


def model_of(job: str) -> str:
    return _BATCH_SIZE.sub("", job)


def draw_jobs(jobs: Sequence[Job], count: int, seed: int) -> tuple[Job, ...]:
    """Draws the job of each trial, uniformly; deterministic for a seed."""
    rng = np.random.default_rng([seed, len(jobs)])
    return tuple(jobs[place] for place in rng.integers(len(jobs), size=count))


def read_throughputs(path: Path) -> ThroughputTable:
    """Reads a table in the form of Gavel's simulator, plain or gzipped.

    `{TYPE: {"('ResNet-50 (batch size 64)', 1)": {"null": STEPS_PER_SECOND, ...}}}`: the number after the name is the
    number of GPUs, and `null` stands for a job alone on its GPU. Jobs on several GPUs, jobs that share a GPU, speeds of
    0 (out of memory) and types that end in `_unconsolidated` are left out.

    Raises:
        BadInputError: if the file cannot be read or has another form.
    """
    try:
        text = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        tables = json.loads(text)
    except (OSError, EOFError, ValueError, RecursionError, zlib.error) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else "it is not JSON"
        raise BadInputError(f"The throughputs in {path} cannot be read: {reason}.") from error
    try:
        steps_s = {kind: dict(_alone(table)) for kind, table in tables.items() if not kind.endswith("_unconsolidated")}
    except (AttributeError, KeyError, TypeError, ValueError, SyntaxError) as error:
        raise BadInputError(
            f"{path} is not a table of throughputs: it must hold {{TYPE: {{\"('MODEL (batch size N)', 1)\": "
            '{"null": STEPS_PER_SECOND}}}.'
        ) from error
    steps_s = {kind: jobs for kind, jobs in steps_s.items() if jobs}
    if not steps_s:
        raise BadInputError(f"There is no speed of a job on one GPU in {path}; give a table of throughputs.")
    return ThroughputTable(path, steps_s)


def _alone(table: Mapping[str, Any]) -> list[tuple[str, float]]:
    found = []
    for key, speeds in table.items():
        name, gpus = ast.literal_eval(key)
        steps_s = float(speeds["null"])
        if gpus == 1 and 0 < steps_s < float("inf"):
            found.append((str(name), steps_s))
    return found


def gpu_types_of(text: str) -> tuple[str, ...]:
    """The type of each slot, from `k80:2,p100:1`.

    Raises:
        BadInputError: if it is malformed.
    """
    kinds: list[str] = []
    for part in text.split(","):
        kind, _, count = part.strip().partition(":")
        if not kind or not count.isdecimal() or not 1 <= int(count) <= _MAX_SLOTS:
            raise BadInputError(
                f"'{part.strip()}' in --gpu-types is not a type and a count; write TYPE:COUNT,TYPE:COUNT, such as "
                "k80:2,v100:1."
            )
        kinds += [kind] * int(count)
    return tuple(kinds)
