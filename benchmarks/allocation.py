"""Runs eight training jobs on a cluster with room for four, under each allocation policy, for real and simulated."""

from __future__ import annotations

import contextlib
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.elastic import AGENT, GPUS, SCRIPT, STEP_S, TIMEOUT_S, paced_profile, ratios
from benchmarks.simulation.jobs.estimates import EstimateSettings
from benchmarks.simulation.jobs.losses import TrueCurve
from benchmarks.simulation.jobs.machines import Layout, Machines
from benchmarks.simulation.jobs.scheduler import scheduler_named
from benchmarks.simulation.jobs.workload import SimulatedJob
from benchmarks.simulation.jobs.world import JobsSettings, JobsWorld
from dike.exceptions import DikeError
from framework.embedded.cluster import EmbeddedCluster
from framework.embedded.ports import reserve_blocks
from framework.policies.jobs.interface import TaskNeeds
from framework.policies.jobs.registry import POLICIES
from framework.project import bundle
from framework.scheduler.records import JobState
from framework.service.api.client import ServiceClient
from framework.service.requests import TrainingRequest, training_request
from solver.choices import Sharding
from solver.shards import DEFAULT_SHARDING

TITLE = "Jobs that share a cluster"
REPEATS = 3
STEPS = (600, 2400, 1200, 1800, 600, 2400, 1200, 1800)
"""Steps of each job, in order of arrival."""
ARRIVAL_INTERVAL_S = 5.0
ROUND_S = 10.0
RESIZE_INTERVAL_S = 5.0
CHECKPOINT_S = 2.0
MAX_WORKERS = GPUS
BATCH_SIZE = 32
TOKEN = "for-this-benchmark-only"  # noqa: S105
REFERENCE = "dike"
NEEDS = TaskNeeds((500, 1024, 0, 1), (100, 256, 0, 0))
"""Resources of a simulated worker and ps; GPUs are the scarce ones, as for the real jobs."""


@dataclass(frozen=True)
class Measured:
    """Figures of one allocation policy.

    Attributes:
        completion_s: seconds from submission to end, one for each job.
        change_s: mean seconds a resize costs; 0 without resizes.
    """

    completion_s: tuple[float, ...]
    makespan_s: float
    changes: int
    change_s: float

    @property
    def mean_s(self) -> float:
        return statistics.fmean(self.completion_s)


def measure(repeats: int = REPEATS, steps: Sequence[int] = STEPS) -> Iterator[str]:
    yield f"{len(steps)} asynchronous jobs of 1 to {MAX_WORKERS} workers, of {', '.join(map(str, steps))} steps, one"
    yield f"every {ARRIVAL_INTERVAL_S:g} s, on an embedded Mesos of {GPUS} agents with a GPU each: {GPUS} jobs run at"
    yield f"a time. A step takes a worker {STEP_S * 1000:g} ms of waiting instead of a GPU. All else is real -"
    yield f"`dike serve --allocation`, Mesos, TensorFlow, checkpoints. Rounds come every {ROUND_S:g} s, and when a job"
    yield f"comes or ends. Each cell is the mean of {repeats} run{'' if repeats == 1 else 's'}, each of which has all"
    yield f"allocations one after the other; *x* is the mean of the runs' ratios to `{REFERENCE}`, with the least and"
    yield "the largest. In the simulator the same jobs have the mean pause that was measured, when they begin, too."
    yield ""
    runs = [{name: run_jobs(name, steps) for name in POLICIES} for _ in range(repeats)]
    changes = [one.change_s for run in runs for one in run.values() if one.changes]
    pause_s = statistics.fmean(changes) if changes else 0.0
    heads = ("allocation", "mean completion", "x", "makespan", "x", "changes", "a change")
    simulated_heads = ("simulated mean", "off by", "simulated makespan", "off by")
    yield f"| {' | '.join((*heads, *simulated_heads))} |"
    yield "|---" * len((*heads, *simulated_heads)) + "|"
    for name in POLICIES:
        ones = [run[name] for run in runs]
        mean_s, makespan_s = (
            statistics.fmean(values) for values in zip(*((o.mean_s, o.makespan_s) for o in ones), strict=True)
        )
        simulated_mean_s, simulated_makespan_s = simulated(name, steps, pause_s)
        costs = [one.change_s for one in ones if one.changes]
        cells = (
            f"{mean_s:.0f} s",
            ratios([run[name].mean_s / run[REFERENCE].mean_s for run in runs]),
            f"{makespan_s:.0f} s",
            ratios([run[name].makespan_s / run[REFERENCE].makespan_s for run in runs]),
            f"{statistics.fmean(one.changes for one in ones):.1f}",
            f"{statistics.fmean(costs):.1f} s" if costs else "-",
            f"{simulated_mean_s:.0f} s",
            f"{simulated_mean_s / mean_s - 1:+.0%}",
            f"{simulated_makespan_s:.0f} s",
            f"{simulated_makespan_s / makespan_s - 1:+.0%}",
        )
        yield f"| `{name}` | {' | '.join(cells)} |"


def run_jobs(allocation: str, steps: Sequence[int]) -> Measured:
    """Runs the jobs under one allocation policy on a new cluster.

    Raises:
        RuntimeError: if a job fails, or the jobs exceed `TIMEOUT_S`.
    """
    with tempfile.TemporaryDirectory(prefix="dike-allocation-") as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        cluster = stack.enter_context(EmbeddedCluster([AGENT] * GPUS))
        cluster.wait_for_agents(60)
        client = stack.enter_context(serving(folder, cluster.master, allocation))
        packed = bundle.pack(SCRIPT)
        begun_s = time.monotonic()
        ids: list[str] = []
        while True:
            now_s = time.monotonic() - begun_s
            if len(ids) < len(steps) and now_s >= len(ids) * ARRIVAL_INTERVAL_S:
                ids.append(client.submit_request(request(steps[len(ids)]), packed).id)
                continue
            jobs = {one: client.job(one) for one in ids}
            failed = [job for job in jobs.values() if job.state.has_ended() and job.state is not JobState.FINISHED]
            if failed or now_s > TIMEOUT_S:
                why = failed[0].failure if failed else f"they did not end within {TIMEOUT_S:g} s"
                raise RuntimeError(f"{allocation}: {why}\n{(folder / 'service.log').read_text()[-4000:]}")
            if len(jobs) == len(steps) and all(job.state.has_ended() for job in jobs.values()):
                break
            time.sleep(0.5)
        ended = [(job.submitted_s, job.ended_s or job.submitted_s, job.result or {}) for job in jobs.values()]
    costs: list[float] = [one["cost_s"] for _, _, result in ended for one in result.get("resizes", ())]
    return Measured(
        completion_s=tuple(end_s - submitted_s for submitted_s, end_s, _ in ended),
        makespan_s=max(end_s for _, end_s, _ in ended) - min(submitted_s for submitted_s, _, _ in ended),
        changes=len(costs),
        change_s=statistics.fmean(costs) if costs else 0.0,
    )


@contextlib.contextmanager
def serving(folder: Path, master: str, allocation: str) -> Iterator[ServiceClient]:
    """Runs `dike serve --allocation`.

    Raises:
        RuntimeError: if it does not start.
    """
    users = folder / "users.yaml"
    users.write_text(f"ann: {{token: {TOKEN}}}\n")
    users.chmod(0o600)
    (block,) = reserve_blocks(1)
    log = folder / "service.log"
    with contextlib.closing(block.claim), log.open("wb") as output:
        command: list[Any] = [sys.executable, "-m", "framework", "serve", "--master", master]
        command += ["--listen", f"127.0.0.1:{block.first}", "--state", f"sqlite:///{folder}/service.db"]
        command += ["--users", users, "--checkpoint-root", folder / "runs"]
        command += ["--allocation", allocation, "--allocation-interval", f"{ROUND_S:g}"]
        process = subprocess.Popen(command, cwd=folder, stdout=output, stderr=output)
        try:
            with ServiceClient(f"http://127.0.0.1:{block.first}", TOKEN) as client:
                while True:
                    with contextlib.suppress(DikeError):
                        client.me()
                        break
                    if process.poll() is not None:
                        raise RuntimeError(f"the service does not start:\n{log.read_text()}")
                    time.sleep(0.1)
                yield client
        finally:
            process.terminate()
            process.wait()


def request(steps: int) -> TrainingRequest:
    return training_request(
        script=SCRIPT.name,
        arguments=[str(steps)],
        profile=paced_profile().to_json(),
        elastic=f"1:{MAX_WORKERS}",
        resize_interval_s=RESIZE_INTERVAL_S,
        checkpoint_interval_s=CHECKPOINT_S,
    )


@dataclass(frozen=True)
class PacedModel:
    """Speed model of the script: all workers are equally fast on any machine."""

    name: str = "paced"
    synchronous: bool = False
    needs: TaskNeeds = NEEDS
    max_ps: int = 1
    batch_sizes: tuple[int, ...] = (BATCH_SIZE,)

    def max_workers(self, batch_size: int) -> int:
        return MAX_WORKERS

    def samples_per_s(self, layout: Layout, batch_size: int, *, sharding: Sharding = DEFAULT_SHARDING) -> float:
        return sum(workers for workers, _ in layout) * batch_size / STEP_S

    def expected_samples_per_s(self, workers: int, ps: int, batch_size: int) -> float:
        return workers * batch_size / STEP_S


def simulated(allocation: str, steps: Sequence[int], pause_s: float) -> tuple[float, float]:
    """Returns mean completion time and makespan of the same jobs in virtual time, in seconds.

    `pause_s`: seconds without training after a start or resize.
    """
    curve = TrueCurve(epochs=20, rate=0.5, power=1.0, floor=0.1, noise=0.0)
    jobs = [
        SimulatedJob(
            number,
            PacedModel(),
            number * ARRIVAL_INTERVAL_S,
            BATCH_SIZE,
            float(count * BATCH_SIZE),
            float(count * BATCH_SIZE),
            requested=MAX_WORKERS,
            max_workers=MAX_WORKERS,
            curve=curve,
        )
        for number, count in enumerate(steps)
    ]
    known = EstimateSettings(convergence_error=0.0, speed_error=0.0)
    settings = JobsSettings(interval_s=ROUND_S, resize_s=pause_s, estimates=known)
    machines = Machines(count=GPUS, gpus=1, cpus=0.9, mem_gib=3.7)
    outcome = JobsWorld(jobs, machines, scheduler_named(allocation), settings, seed=0).run()
    return outcome.mean_completion_s, outcome.makespan_s
