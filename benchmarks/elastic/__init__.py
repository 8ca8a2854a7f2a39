"""Runs three training jobs that share four GPUs, with fixed and with elastic sizes."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dike.profile import Api, ModelProfile, VariableSpec
from framework.embedded.agents import AgentSpec
from framework.embedded.cluster import EmbeddedCluster

TITLE = "Training jobs that change their size"
SCRIPT = Path(__file__).parent / "scripts" / "paced.py"
STEP_S = 0.05
"""As in the script."""
GPUS = 4
# Room for a worker with the GPU and a ps, not for a second worker.
AGENT = AgentSpec(resources="cpus:0.9;mem:3700;disk:4096;gpus:1", attributes="gpu_model:k80")
RESIZE_INTERVAL_S = 5.0
TIMEOUT_S = 600.0
REPEATS = 3
REFERENCE = "two workers each"
K80_STEP_FLOPS = 1.4e11
"""The solver estimates about `STEP_S` for this on a K80."""


@dataclass(frozen=True)
class Arrival:
    """A job, submitted `at_s` seconds after the first."""

    name: str
    at_s: float
    steps: int


ARRIVALS = (Arrival("A", 0.0, 8000), Arrival("B", 30.0, 1600), Arrival("C", 45.0, 1600))
MODES: dict[str, tuple[str, tuple[str, ...]]] = {
    "two workers each": ("--max-workers 2", ("--strategy", "ps", "--max-workers", "2")),
    "all that is free": (f"--max-workers {GPUS}", ("--strategy", "ps", "--max-workers", str(GPUS))),
    "elastic": (
        f"--elastic 1:{GPUS} --resize-interval {RESIZE_INTERVAL_S:g}",
        ("--elastic", f"1:{GPUS}", "--resize-interval", f"{RESIZE_INTERVAL_S:g}"),
    ),
}


@dataclass(frozen=True)
class JobResult:
    """Seconds from submission to end, and the result of a job."""

    seconds: float
    result: dict[str, Any]


def measure(repeats: int = REPEATS) -> Iterator[str]:
    """Reports the jobs' completion times in each mode."""
    jobs = ", ".join(f"{job.name} at {job.at_s:g} s with {job.steps:,} steps" for job in ARRIVALS)
    yield f"Three asynchronous jobs - {jobs} -"
    yield f"on an embedded Mesos of {GPUS} agents with a GPU each. A step takes a worker {STEP_S * 1000:g} ms in which"
    yield "it waits: the machine plays the GPUs. All else is real - Mesos, processes, TensorFlow, parameter servers,"
    yield "checkpoints - so a second worker nearly doubles a job's speed. Seconds from a job's submission to its end,"
    yield f"its start included: the mean of {repeats} run{'' if repeats == 1 else 's'}, each of which has all modes one"
    yield f"after the other. *x* is the mean of the runs' ratios to `{REFERENCE}`, with the least and the largest."
    yield ""
    names = [job.name for job in ARRIVALS]
    heads = ("sizes", "options", *names, "sum", "x", "last end", "x", "changes", "a change", "of the time")
    yield f"| {' | '.join(heads)} |"
    yield "|---" * len(heads) + "|"
    runs = [{mode: _row(run_jobs(options)) for mode, (_, options) in MODES.items()} for _ in range(repeats)]
    for mode, (shown, _) in MODES.items():
        rows = [run[mode] for run in runs]
        costs = [cost for row in rows for cost in row.costs_s]
        cells = (
            *(f"{statistics.fmean(seconds):.0f}" for seconds in zip(*(row.seconds for row in rows), strict=True)),
            f"{statistics.fmean(row.sum_s for row in rows):.0f}",
            ratios([run[mode].sum_s / run[REFERENCE].sum_s for run in runs]),
            f"{statistics.fmean(row.last_s for row in rows):.0f}",
            ratios([run[mode].last_s / run[REFERENCE].last_s for run in runs]),
            f"{len(costs) / repeats:.1f}",
            f"{statistics.fmean(costs):.1f} s" if costs else "-",
            f"{sum(costs) / sum(row.sum_s for row in rows):.2%}" if costs else "-",
        )
        yield f"| {mode} | `{shown}` | {' | '.join(cells)} |"
    yield ""
    yield "*a change*: mean time from the chief's stop to the first step after it; *of the time*: the share of all"
    yield "jobs' seconds that changes took (Optimus reports 2.54%)."


@dataclass(frozen=True)
class _Row:
    """Seconds of each job, the last end, and the cost of each resize."""

    seconds: tuple[float, ...]
    last_s: float
    costs_s: tuple[float, ...]

    @property
    def sum_s(self) -> float:
        return sum(self.seconds)


def _row(ended: dict[str, JobResult]) -> _Row:
    return _Row(
        tuple(ended[job.name].seconds for job in ARRIVALS),
        max(job.at_s + ended[job.name].seconds for job in ARRIVALS),
        tuple(resize["cost_s"] for job in ARRIVALS for resize in ended[job.name].result["resizes"]),
    )


def ratios(values: Sequence[float]) -> str:
    return f"{statistics.fmean(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def run_jobs(options: Sequence[str]) -> dict[str, JobResult]:
    """Submits all jobs on time and waits for their ends.

    `options`: of `dike run`.

    Raises:
        RuntimeError: if a job fails, or the jobs exceed `TIMEOUT_S`.
    """
    with tempfile.TemporaryDirectory() as folder, EmbeddedCluster([AGENT] * GPUS) as cluster:
        cluster.wait_for_agents(60)
        begun_s = time.monotonic()
        running: dict[str, subprocess.Popen[bytes]] = {}
        ended: dict[str, JobResult] = {}
        try:
            while len(ended) < len(ARRIVALS):
                now_s = time.monotonic() - begun_s
                for job in ARRIVALS:
                    if job.name not in running and now_s >= job.at_s:
                        running[job.name] = _submit(job, Path(folder), cluster.master, options)
                    elif job.name in running and job.name not in ended and running[job.name].poll() is not None:
                        ended[job.name] = JobResult(now_s - job.at_s, _result(job, Path(folder), running[job.name]))
                if now_s > TIMEOUT_S:
                    raise RuntimeError(f"the jobs do not end within {TIMEOUT_S:g} s")
                time.sleep(0.05)
        finally:
            for process in running.values():
                process.kill()
                process.wait()
    return ended


def _submit(job: Arrival, folder: Path, master: str, options: Sequence[str]) -> subprocess.Popen[bytes]:
    here = folder / job.name
    here.mkdir()
    (here / "profile.json").write_text(paced_profile().dumps())
    command = [sys.executable, "-m", "framework", "run", "--format", "json", "--master", master, *options]
    command += ["--checkpoint-interval", "5", "--profile", str(here / "profile.json"), str(SCRIPT), str(job.steps)]
    with (here / "stdout").open("wb") as stdout, (here / "stderr").open("wb") as stderr:
        return subprocess.Popen(command, cwd=here, stdout=stdout, stderr=stderr)


def _result(job: Arrival, folder: Path, process: subprocess.Popen[bytes]) -> dict[str, Any]:
    here = folder / job.name
    if process.returncode != 0:
        raise RuntimeError(f"job {job.name} failed:\n{(here / 'stderr').read_text()}")
    return dict(json.loads((here / "stdout").read_text()))


def paced_profile() -> ModelProfile:
    """The script's model, with FLOPs that take a K80 about `STEP_S` a step."""
    return ModelProfile(
        name=SCRIPT.name,
        api=Api.GRAPH,
        parameters=8,
        parameter_bytes=32,
        variables=(VariableSpec("w", (8, 1), "float32", 32),),
        flops_forward_per_sample=K80_STEP_FLOPS / 96,
        flops_step_per_sample=K80_STEP_FLOPS / 32,
        longest_path_flops=K80_STEP_FLOPS / 96,
        batch_size=32,
    )
