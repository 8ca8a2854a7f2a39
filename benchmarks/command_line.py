"""Measures the CPU time of commands, which must not import what other commands need."""

from __future__ import annotations

import contextlib
import os
import pkgutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import framework
import solver
from benchmarks.load.service import USERS, service_under_load
from framework.search.records import Parameter, SearchSpec, TrialRecord, TrialState
from framework.search.store import Store

TITLE = "What a command computes"
RUNS = 7
SLOW_RUNS = 3
JOBS = 20
TRIALS = 20
DIKE = Path(sys.executable).with_name("dike")
ROOT = Path(__file__).parents[1]
PROFILE = ROOT / "benchmarks" / "data" / "profiles" / "resnet50.json"
CLUSTER = ROOT / "examples" / "clusters" / "five-k80.yaml"


@dataclass(frozen=True)
class Command:
    """A command to measure.

    Attributes:
        shown: its name in the table.
        limit_s: maximum CPU seconds; None without a limit.
    """

    shown: str
    arguments: Sequence[str | Path]
    limit_s: float | None
    environment: Mapping[str, str] = field(default_factory=dict)


def measure() -> Iterator[str]:
    yield (
        f"CPU seconds of the process and of those that it starts, user and system: median of {RUNS}, after one that is "
        "not counted and leaves compiled modules and cached profiles behind."
    )
    yield ""
    yield "| command | CPU seconds | wanted |"
    yield "|---|---|---|"
    with (
        tempfile.TemporaryDirectory(prefix="dike-commands-") as made,
        service_under_load(1, cpus_of_agent=8) as service,
    ):
        folder = Path(made)
        cache = {"DIKE_CACHE": str(folder / "cache")}
        for _ in range(JOBS):
            service.submit()
        asking = {"DIKE_SERVICE": service.client.url, "DIKE_TOKEN": USERS["load"]}
        storage = _searches(folder)
        plan = ("--cluster", CLUSTER)
        commands = (
            Command("`dike --help`", ["--help"], 0.3),
            Command("`dike --version`", ["--version"], 0.3),
            Command("completion of `dike `, in bash", [], 0.3, _completion("dike ")),
            Command("completion of `dike run --`, in bash", [], None, _completion("dike run --")),
            Command("`dike run --help`", ["run", "--help"], None),
            Command(f"`dike jobs`: {JOBS} jobs", ["jobs", "--all"], 0.7, asking),
            Command(f"`dike trials NAME`: {TRIALS} trials", ["trials", "lr", "--storage", storage], 0.7),
            Command("`dike plan resnet50.json`", ["plan", PROFILE, *plan], 1.0),
            Command("`dike plan keras:ResNet50`, again", ["plan", "keras:ResNet50", *plan], 1.0, cache),
        )
        for command in commands:
            yield _row(command, _median_cpu_s([DIKE, *command.arguments], command.environment, folder))
        first = [
            _cpu_s([DIKE, "plan", "keras:ResNet50", *plan], {"DIKE_CACHE": f"{folder}/{run}"}, folder)
            for run in range(SLOW_RUNS)
        ]
        yield f"| the same for the first time, median of {SLOW_RUNS} | {statistics.median(first):.2f} | |"
        imports = "; ".join(f"import {name}" for name in _modules())
        all_s = _median_cpu_s([sys.executable, "-c", imports], {}, folder)
        yield f"| for comparison: import all modules of `framework` and `solver` | {all_s:.2f} | |"


def _row(command: Command, cpu_s: float) -> str:
    wanted = "" if command.limit_s is None else f"{command.limit_s:.1f}"
    return f"| {command.shown} | {cpu_s:.2f} | {wanted} |"


def _completion(typed: str) -> dict[str, str]:
    """The environment in which bash asks a command to complete `typed`."""
    return {"_DIKE_COMPLETE": "complete_bash", "COMP_WORDS": typed, "COMP_CWORD": str(typed.count(" "))}


def _modules() -> Iterator[str]:
    for package in (framework, solver):
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if not module.name.endswith(".__main__"):
                yield module.name


def _searches(folder: Path) -> str:
    """Creates a database with one search; returns its URL."""
    url = f"sqlite:///{folder}/searches.db"
    rates = tuple(round(0.1 / (number + 1), 5) for number in range(TRIALS))
    spec = SearchSpec("lr", "/scripts/train.py", (), {}, (Parameter("lr", rates),), "grid", trial_count=TRIALS)
    with contextlib.closing(Store(url)) as store:
        store.create_search(spec)
        for number, rate in enumerate(rates):
            store.save_trial(TrialRecord(number, {"lr": rate}, TrialState.FINISHED, step=100, loss=rate, value=rate))
    return url


def _median_cpu_s(command: Sequence[str | Path], environment: Mapping[str, str], folder: Path) -> float:
    _cpu_s(command, environment, folder)
    return statistics.median(_cpu_s(command, environment, folder) for _ in range(RUNS))


def _cpu_s(command: Sequence[str | Path], environment: Mapping[str, str], folder: Path) -> float:
    """Returns the CPU seconds of a successful command and of the processes that it waited for."""
    own = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    # Like an installed package's, modules are compiled once, here outside of the source tree.
    everything = {**own, "PYTHONPYCACHEPREFIX": str(folder / "compiled"), **environment}
    with (folder / "said").open("w+b") as output:
        process = subprocess.Popen(list(map(str, command)), cwd=folder, env=everything, stdout=output, stderr=output)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            output.seek(0)
            raise RuntimeError(f"{' '.join(map(str, command))} failed:\n{output.read().decode()}")
    return usage.ru_utime + usage.ru_stime
