"""Measures how long a job makes no step when a process is killed, an agent leaves, or its size changes."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from benchmarks.start.step_log import Step, read_steps
from dike.profile import Api
from framework.embedded.agents import AgentSpec
from framework.embedded.cluster import EmbeddedCluster
from tests.profiles import made_up_profile
from tests.running import Running

SCRIPTS = Path(__file__).parent / "scripts"
SESSION, KERAS = SCRIPTS / "session_steps.py", SCRIPTS / "two_epochs.py"
PROFILES = {
    SESSION: made_up_profile({"w": (64, 1)}, api=Api.GRAPH, flops=1e9),
    KERAS: made_up_profile({"dense/kernel": (64, 64), "dense_1/kernel": (64, 2)}, api=Api.KERAS, flops=1e9),
}
"""Synthetic: no second worker would pay for models this small."""
PAUSE_S = 0.02
ENDLESS = 10**6
AGENT = AgentSpec(resources="cpus:2;mem:1900;disk:4096")
"""Room for one worker."""
WORKERS = ("worker:0", "worker:1")
REJOINS = "a worker of two is killed, the other trains on: its next step"
REJOINS_ELASTIC = "the same with `--elastic 1:2`"
RESTARTS = "the chief of a Keras job is killed: the job's next step"
SHRINKS = "an agent with a worker leaves: from the last step of two workers to the first of one"
GROWS = "the agent is back: from the last step of one worker to the first of two"


class Job:
    def __init__(self, folder: Path, script: Path, *options: str | Path) -> None:
        folder.mkdir()
        self._folder = folder
        self._step_log = folder / "step_log"
        profile = folder / "profile.json"
        profile.write_text(PROFILES[script].dumps(), encoding="utf-8")
        steps = ("--epochs" if script == KERAS else "--steps", str(ENDLESS))
        saves = ("--checkpoint-dir", folder / "checkpoints", "--checkpoint-interval", "1")
        self._run = Running(
            folder,
            *("run", "--format", "json", *options, *saves, "--profile", profile),
            *(script, self._step_log, *steps, "--pause", str(PAUSE_S)),
        )

    def end(self) -> None:
        """Makes the script stop, and waits for it."""
        self._step_log.with_suffix(".stop").touch()
        self._run.result()

    def wait_for_step(self, what: str, is_meant: Callable[[Step], bool]) -> Step:
        return self._run.wait_for(lambda: next(filter(is_meant, read_steps(self._step_log)), None), what)

    def settle(self, tasks: Sequence[str] = ()) -> None:
        """Waits until each of these tasks has made another step and the job has saved another checkpoint."""
        now_s, saved = time.monotonic(), self._newest_checkpoint_ns()

        def steps(task: str) -> Callable[[Step], bool]:
            return lambda step: step.at_s > now_s and step.task == task

        for task in tasks:
            self.wait_for_step(f"a step of {task}", steps(task))
        self._run.wait_for(lambda: self._newest_checkpoint_ns() > saved, "a checkpoint")

    def kill(self, task: str) -> float:
        """Kills a task's process; returns the seconds until the first step of its replacement."""
        victim = [step for step in read_steps(self._step_log) if step.task == task][-1].pid
        killed_s = time.monotonic()
        os.kill(victim, signal.SIGKILL)
        return (
            self.wait_for_step(
                f"a step of the next {task}",
                lambda step: step.task == task and step.at_s > killed_s and step.pid != victim,
            ).at_s
            - killed_s
        )

    def measure_change(self, what: str, change: Callable[[], None]) -> float:
        """Returns the seconds from the last step of the current processes to the first of new ones, after `change`."""
        old = {step.pid for step in read_steps(self._step_log)}
        change()
        first = self.wait_for_step(what, lambda step: step.pid not in old)
        return first.at_s - max(step.at_s for step in read_steps(self._step_log) if step.pid in old)

    def _newest_checkpoint_ns(self) -> int:
        paths = (self._folder / "checkpoints").rglob("*.index")
        return max((path.stat().st_mtime_ns for path in paths), default=0)


@contextlib.contextmanager
def _job(folder: Path, script: Path, *options: str | Path) -> Iterator[Job]:
    job = Job(folder, script, *options)
    try:
        yield job
        job.end()
    finally:
        Running.end_all()


def measure_interruptions(repeats: int) -> dict[str, list[float]]:
    """Measures each kind of interruption `repeats` times in the same job; returns kind -> seconds without a step."""
    found: dict[str, list[float]] = {name: [] for name in (REJOINS, REJOINS_ELASTIC, RESTARTS, SHRINKS, GROWS)}

    def note(name: str, seconds: float) -> None:
        found[name].append(seconds)
        print(f"{name}: {seconds:.2f} s", file=sys.stderr, flush=True)

    two_agents = ("--agents", "2", "--resources", AGENT.resources)
    with tempfile.TemporaryDirectory(prefix="dike-standstill-") as made:
        folder = Path(made)
        with _job(folder / "rejoins", SESSION, *two_agents, "--min-workers", "2", "--max-workers", "2") as job:
            for _ in range(repeats):
                job.settle(WORKERS)
                note(REJOINS, job.kill("worker:1"))
        with _job(folder / "restarts", KERAS, "--strategy", "ps", "--max-workers", "1") as job:
            for _ in range(repeats):
                job.settle(["chief:0"])
                note(RESTARTS, job.kill("chief:0"))
        with EmbeddedCluster([AGENT] * 2) as cluster:
            elastic = ("--elastic", "1:2", "--resize-interval", "1", "--master", cluster.master)
            cluster.kill_agent(1, signal.SIGUSR1)
            with _job(folder / "elastic", SESSION, *elastic) as job:
                for _ in range(repeats):
                    job.settle(WORKERS[:1])
                    note(GROWS, job.measure_change("a step of two workers", lambda: cluster.restart_agent(1)))
                    job.settle(WORKERS)
                    note(REJOINS_ELASTIC, job.kill("worker:1"))
                    job.settle(WORKERS)
                    note(
                        SHRINKS,
                        job.measure_change("a step of one worker", lambda: cluster.kill_agent(1, signal.SIGUSR1)),
                    )
    return found
