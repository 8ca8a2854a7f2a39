"""Measures the time from a command to the first training step, and from the last step to the prompt."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.start.interruptions import GROWS, REJOINS, REJOINS_ELASTIC, RESTARTS, SHRINKS, measure_interruptions
from benchmarks.start.step_log import read_steps
from framework.embedded.library import ensure_library

TITLE = "From the command to the first step"
ROOT = Path(__file__).parents[2]
SCRIPTS = Path(__file__).parent / "scripts"
TIMED = Path(__file__).with_name("timed.py")
CLUSTER = ROOT / "examples" / "clusters" / "laptop.yaml"
DIKE = Path(sys.executable).with_name("dike")
KERAS, SESSION = "two_epochs.py", "session_steps.py"
STEPS = 126
"""Steps of each script, and of each trial."""
COMMAND_TIMEOUT_S = 300
MANY_WORKERS = 4
MANY_RESOURCES = "cpus:8;mem:6144;disk:8192"
"""Declared resources, so that `MANY_WORKERS` fit on any machine."""
MANY_FLOPS = 1e9
"""FLOPs per sample at which the planner chooses `MANY_WORKERS`."""
FLOPS = ("flops_forward_per_sample", "flops_step_per_sample", "longest_path_flops")
"""Fields of a profile."""

WARM_LIMIT_S, COLD_LIMIT_S = 1.5, 3.0
END_LIMIT_S = 1.0
PLAN_LIMIT_S = 1.0
CPU_LIMIT = 1.5
MAX_LIMITED_TASKS = 4
"""Jobs with more tasks on one machine have no limits."""
INTERRUPTION_LIMITS_S = {REJOINS: 1.5, REJOINS_ELASTIC: 1.5, RESTARTS: 1.5, GROWS: 1.5, SHRINKS: None}
"""None: includes the wait for new offers."""


@dataclass(frozen=True)
class Case:
    """A measured command.

    Attributes:
        command: run in the project's folder.
        bare: the case of the same script without Dike; empty for that case itself, and for commands that do not train.
        is_cold: whether its cache folder contains only Mesos.
        tasks: number of tasks it must launch.
        steps: number of steps it must make.
        start_limit_s: maximum delay of the first step relative to `bare`.
        cpu_limit: maximum CPU seconds, as a multiple of `bare`'s.
    """

    name: str
    command: tuple[str | Path, ...]
    bare: str = ""
    is_cold: bool = False
    tasks: int = 0
    steps: int = STEPS
    start_limit_s: float | None = None
    end_limit_s: float | None = None
    cpu_limit: float | None = None
    wall_limit_s: float | None = None


@dataclass(frozen=True)
class Run:
    """Times of a command.

    Attributes:
        cpu_s: CPU seconds, all its child processes included.
        gone_s: seconds from its end to that of its last child process.
        start_s: seconds from its start to its first step; 0 without training.
        end_s: seconds from its last step to its end; 0 without training.
    """

    wall_s: float
    cpu_s: float
    gone_s: float
    start_s: float = 0.0
    end_s: float = 0.0


@dataclass(frozen=True)
class Figure:
    """Measurements of one quantity, one for each round.

    Attributes:
        what: name in the table.
        limit: maximum of their median, if any.
    """

    what: str
    values: Sequence[float]
    limit: float | None

    @property
    def holds(self) -> bool | None:
        return None if self.limit is None else bool(np.median(self.values) <= self.limit)


@dataclass(frozen=True)
class Table:
    """Figures of one kind; `measure` names the quantity and its unit."""

    title: str
    measure: str
    figures: Sequence[Figure]

    def lines(self) -> Iterator[str]:
        yield f"## {self.title}"
        yield ""
        yield f"| | {self.measure} | wanted | holds |"
        yield "|---|---|---|---|"
        for figure in self.figures:
            limit = "" if figure.limit is None else f"at most {figure.limit:g}"
            verdict = {None: "", True: "yes", False: "**no**"}[figure.holds]
            yield f"| {figure.what} | {spread(figure.values)} | {limit} | {verdict} |"


def measure(repeats: int) -> Iterator[str]:
    """Runs all commands in rotation, `repeats` times."""
    with tempfile.TemporaryDirectory(prefix="dike-start-") as made:
        workspace = Workspace(Path(made))
        cases = workspace.cases()
        workspace.prepare(cases)
        runs: dict[str, list[Run]] = {case.name: [] for case in cases}
        for number in range(repeats):
            for case in cases:
                run = workspace.run(case)
                runs[case.name].append(run)
                print(f"{number + 1}/{repeats} {case.name}: {run}", file=sys.stderr, flush=True)
    yield from report(cases, runs, measure_interruptions(repeats))


class Workspace:
    """The folders that the commands run in, below `folder`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._project = folder / "project"
        shutil.copytree(SCRIPTS, self._project, ignore=shutil.ignore_patterns("__pycache__"))
        # Outside of the project, which is packed into the bundle of a job.
        self._step_log = folder / "step_log"
        self._log = folder / "stderr"
        self._plan = folder / "plan.json"
        self._mesos = ensure_library().parent
        self._kept = self._cache("kept")

    def cases(self) -> list[Case]:
        """All measured commands, in the order of a round."""
        python: tuple[str | Path, ...] = (sys.executable,)
        run: tuple[str | Path, ...] = (DIKE, "run")
        # Number of tasks -> command; Keras adds a ps and a chief to the workers.
        sizes: dict[int, tuple[str | Path, ...]] = {
            1: run,
            3: (*run, "--strategy", "ps", "--max-workers", "1"),
            4: (*run, "--strategy", "ps", "--min-workers", "2", "--max-workers", "2"),
            MANY_WORKERS + 2: (*run, "--plan", self._plan, "--resources", MANY_RESOURCES),
        }
        bare, bare_session = "`python two_epochs.py`", "`python session_steps.py`"
        found = [Case(bare, (*python, KERAS, self._step_log))]
        for is_cold in (True, False):
            profile = "no profile kept" if is_cold else "profile kept"
            for tasks, chosen in sizes.items():
                # Many more tasks than cores: for information.
                limited = tasks <= MAX_LIMITED_TASKS
                found.append(
                    Case(
                        f"`dike run two_epochs.py`, tasks: {tasks}, {profile}",
                        (*chosen, KERAS, self._step_log),
                        bare=bare,
                        is_cold=is_cold,
                        tasks=tasks,
                        start_limit_s=(COLD_LIMIT_S if is_cold else WARM_LIMIT_S) if limited else None,
                        end_limit_s=END_LIMIT_S if limited else None,
                        cpu_limit=CPU_LIMIT if tasks in (1, 3) else None,
                    )
                )
        session = (*run, "--strategy", "ps", "--max-workers", "1", SESSION, self._step_log)
        tune = (DIKE, "tune", KERAS, "--param", "lr=0.1,0.01", "--slots", "2", "--", self._step_log)
        plan = (DIKE, "plan", KERAS, "--cluster", CLUSTER, "--", self._step_log)
        return [
            *found,
            Case("`dike tune two_epochs.py`, trials: 2", tune, bare, steps=2 * STEPS, start_limit_s=WARM_LIMIT_S),
            Case(bare_session, (*python, SESSION, self._step_log)),
            Case(
                "`dike run session_steps.py`, tasks: 2, profile kept",
                session,
                bare_session,
                tasks=2,
                start_limit_s=WARM_LIMIT_S,
                end_limit_s=END_LIMIT_S,
                cpu_limit=CPU_LIMIT,
            ),
            Case("`dike plan two_epochs.py`, the first time", plan, is_cold=True, steps=0),
            Case("`dike plan two_epochs.py`, the second time", plan, steps=0, wall_limit_s=PLAN_LIMIT_S),
        ]

    def prepare(self, cases: Sequence[Case]) -> None:
        """Creates cached profiles, compiled modules and the plan for many workers."""
        planned = (DIKE, "run", "--strategy", "ps", "--plan-only", "--format", "json", "--resources", MANY_RESOURCES)
        plan = json.loads(self._timed((*planned, KERAS, self._step_log), self._kept)[1])
        heavy = self._folder / "heavy.json"
        heavy.write_text(json.dumps(plan["profile"] | dict.fromkeys(FLOPS, MANY_FLOPS)), encoding="utf-8")
        many = ("--max-workers", str(MANY_WORKERS), "--profile", heavy)
        self._plan.write_text(self._timed((*planned, *many, KERAS, self._step_log), self._kept)[1], encoding="utf-8")
        for case in cases:
            if not case.is_cold:
                self.run(case)

    def run(self, case: Case) -> Run:
        """Runs a command to its end.

        Raises:
            RuntimeError: if it fails, or its steps or tasks differ from the case's.
        """
        self._step_log.unlink(missing_ok=True)
        cache = self._cache("cold") if case.is_cold else self._kept
        times, printed = self._timed(case.command, cache)
        output_text = printed + self._log.read_text(encoding="utf-8")
        if case.is_cold:
            shutil.rmtree(cache)
        shutil.rmtree(self._project / "dike-runs", ignore_errors=True)
        steps = read_steps(self._step_log)
        tasks = len(set(re.findall(r"((?:ps|worker|chief):\d+)\s+on\s", output_text)))
        if (len(steps), tasks) != (case.steps, case.tasks):
            raise RuntimeError(f"{case.name} made {len(steps)} steps with {tasks} tasks:\n{output_text}")
        begun_s, ended_s = times["begun_s"], times["ended_s"]
        in_all = (ended_s - begun_s, times["cpu_s"], times["gone_s"] - ended_s)
        return Run(*in_all, steps[0].at_s - begun_s, ended_s - steps[-1].at_s) if steps else Run(*in_all)

    def _cache(self, name: str) -> Path:
        cache = self._folder / name
        cache.mkdir()
        (cache / self._mesos.name).symlink_to(self._mesos)
        return cache

    def _timed(self, command: Sequence[str | Path], cache: Path) -> tuple[Mapping[str, float], str]:
        """Runs a command successfully; returns the output of `timed.py` and that of the command."""
        result = self._folder / "timed.json"
        timed = [sys.executable, TIMED, result, COMMAND_TIMEOUT_S, *command]
        # Modules are compiled once, as those of an installed package.
        own = {name: value for name, value in os.environ.items() if not name.startswith("DIKE_")}
        own.pop("PYTHONDONTWRITEBYTECODE", None)
        output = self._folder / "output"
        with output.open("wb") as stdout, self._log.open("wb") as stderr:
            subprocess.run(
                list(map(str, timed)),
                cwd=self._project,
                env={**own, "DIKE_CACHE": str(cache)},
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                check=True,
            )
        times = json.loads(result.read_text(encoding="utf-8"))
        if times["exit_code"]:
            raise RuntimeError(f"{' '.join(map(str, command))} failed:\n{self._log.read_text()}")
        return times, output.read_text(encoding="utf-8")


def report(
    cases: Sequence[Case], runs: Mapping[str, Sequence[Run]], interruptions: Mapping[str, Sequence[float]]
) -> Iterator[str]:
    """Reports all measurements. `runs`: case name -> its runs, in the order of the rounds."""
    later, ends, cpu, walls = [], [], [], []
    for case in cases:
        own = runs[case.name]
        if not case.steps:
            walls.append(Figure(case.name, [run.wall_s for run in own], case.wall_limit_s))
            continue
        ends.append(Figure(case.name, [run.end_s for run in own], case.end_limit_s))
        if case.bare:
            pairs = list(zip(own, runs[case.bare], strict=True))
            later.append(Figure(case.name, [run.start_s - bare.start_s for run, bare in pairs], case.start_limit_s))
            cpu.append(Figure(case.name, [run.cpu_s / bare.cpu_s for run, bare in pairs], case.cpu_limit))
    still = [Figure(name, values, INTERRUPTION_LIMITS_S[name]) for name, values in interruptions.items()]
    tables = (
        Table("The first step", "later than without Dike, s", later),
        Table("The end", "from the last step to the prompt, s", ends),
        Table("Computed", "CPU seconds, as a multiple of those without Dike", cpu),
        Table("A plan", "from the command to the prompt, s", walls),
        Table("Restart, rejoin, resize", "without a step, s", still),
    )
    limited = [(table, figure) for table in tables for figure in table.figures if figure.holds is not None]
    missed = [(table, figure) for table, figure in limited if not figure.holds]
    held = f"**{len(limited) - len(missed)} of {len(limited)} limits hold.**"
    yield f"{held} These do not:" if missed else held
    yield ""
    for table, figure in missed:
        yield f"* {figure.what}: {table.measure}: {np.median(figure.values):.2f}, wanted: at most {figure.limit:g}"
    if missed:
        yield ""
    rounds = len(next(iter(runs.values())))
    yield f"The commands run in rotation; rounds: {rounds}. Medians, in brackets the quartiles. Differences and ratios"
    yield "are those of each round. `two_epochs.py` is two epochs of 63 steps of a small Keras"
    yield "model, `session_steps.py` 126 steps of a TensorFlow 1 session ([scripts](../start/scripts)). They write down"
    yield "when each step ends, in the same way with and without Dike. CPU seconds are those of all processes that a"
    yield "command starts, the Mesos daemons included. All commands use the private Mesos of this machine. One task is"
    yield "plain; 2 are a worker and a ps, 3 and 4 one or two workers, a ps and a chief; the job of"
    resources = MANY_RESOURCES.partition(";")[0]
    yield f"{MANY_WORKERS + 2} follows a plan for {resources}, whatever the machine has, and has no limits."
    latest_s = max(run.gone_s for of_case in runs.values() for run in of_case)
    yield "*no profile kept*: the cache folder holds nothing but Mesos. The last process that a command had started was"
    yield f"gone {latest_s:.2f} s after the prompt at the latest."
    yield ""
    yield "| command | first step, s | last step to prompt, s | in all, s | CPU seconds |"
    yield "|---|---|---|---|---|"
    for case in cases:
        own = runs[case.name]
        steps = [spread([run.start_s for run in own]), spread([run.end_s for run in own])] if case.steps else ["", ""]
        cells = [case.name, *steps, spread([run.wall_s for run in own]), spread([run.cpu_s for run in own])]
        yield f"| {' | '.join(cells)} |"
    for table in tables:
        yield ""
        yield from table.lines()
    yield ""
    yield "*without a step*: the task that is killed, from its end; the job, where its size changes. The same job is"
    yield "disturbed again and again; after each step it rests for 20 ms, and it saves every second."


def spread(values: Sequence[float]) -> str:
    low, median, high = np.quantile(values, [0.25, 0.5, 0.75])
    return f"{median:.2f} ({low:.2f} to {high:.2f})" if len(values) > 1 else f"{median:.2f}"
