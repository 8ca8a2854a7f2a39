"""Runs the named benchmarks, or all, and writes `benchmarks/results/NAME.md` and its tables as `NAME.json`.

A part of `solver`, `search` or `jobs` can be run alone; its result is printed only. Without names, `wild` runs if
`--scripts` is given and `suspend_gpu` if there is a GPU.

`simulate` and `simulate-jobs` have options of their own (`--help`) and print their results.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import itertools
import sys
from pathlib import Path

from benchmarks import tables
from benchmarks.jobs import PARTS as JOBS_PARTS
from benchmarks.machine import describe_machine
from benchmarks.search import PARTS as SEARCH_PARTS
from benchmarks.simulation import commands
from benchmarks.solver import PARTS as SOLVER_PARTS
from framework import cli
from framework.embedded.machine import gpu_models

NAMES = (
    "command_line",
    "solver",
    "ps_update",
    "ring",
    "sync",
    "embedded_mesos",
    "cluster",
    "search",
    "many_trials",
    "population",
    "shared_gpu",
    "policies",
    "different_slots",
    "different_gpus",
    "jobs",
    "elastic",
    "allocation",
    "convergence",
    "speed_models",
    "load",
    "steady_load",
    "chaos",
    "chaos_tensorflow",
    "start",
    "plain_task",
    "suspend_gpu",
    "claims",
    "wild",
)
MODULES = (
    {name: f"benchmarks.{name}" for name in (*NAMES, *SOLVER_PARTS)}
    | {name: f"benchmarks.search.{name}" for name in SEARCH_PARTS}
    | {name: f"benchmarks.jobs.{name}" for name in JOBS_PARTS}
)
REPEATS = {"start": 10, "elastic": 3, "allocation": 3, "real": 5}
"""Default number of repetitions. Results of fewer are printed, not stored."""


def main() -> None:
    if sys.argv[1:2] and sys.argv[1] in commands.NAMES:
        cli.run_command(functools.partial(commands.app, prog_name=commands.PROGRAM))
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    known = ", ".join(MODULES)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"one of {known}; by default {', '.join(NAMES)}")
    parser.add_argument(
        "--scripts", action="append", default=[], type=Path, metavar="FOLDER", help="wild: folder of the copies"
    )
    parser.add_argument(
        "--repeats",
        type=int,
        metavar="N",
        help=f"{', '.join(REPEATS)}: repetitions; fewer than the default: not stored",
    )
    parser.add_argument("--only", action="append", default=[], metavar="SCRIPT", help="wild: only this one; not stored")
    arguments = parser.parse_args()
    names = [name.replace("-", "_") for name in arguments.names]
    lacking = {"wild": not arguments.scripts, "suspend_gpu": not gpu_models()}
    names = names or [name for name in NAMES if not lacking.get(name)]
    for name in names:
        if name not in MODULES:
            parser.error(f"there is no benchmark '{name}'; choose one of {known}")
    if "wild" in names and lacking["wild"]:
        parser.error("name the folders with copies of the scripts by --scripts")
    if "suspend_gpu" in names and lacking["suspend_gpu"]:
        parser.error("suspend_gpu needs a GPU that NVIDIA's management library finds")
    if arguments.repeats is not None and arguments.repeats < 1:
        parser.error(f"--repeats is {arguments.repeats}: it must be at least 1")
    repeats = {name: arguments.repeats or usual for name, usual in REPEATS.items()}
    options = {"wild": (arguments.scripts, arguments.only)} | {name: (times,) for name, times in repeats.items()}
    is_printed = {"wild": bool(arguments.only)} | {name: times < REPEATS[name] for name, times in repeats.items()}
    for name in names:
        module = importlib.import_module(MODULES[name])
        measured = module.measure(*options.get(name, ()))
        title = (f"# {module.TITLE}", "", f"    python -m benchmarks {name}", "", f"Machine: {describe_machine()}.", "")
        lines = []
        for line in itertools.chain(title, measured):
            print(line, flush=True)
            lines.append(line)
        if name in NAMES and not is_printed.get(name):
            path = tables.RESULTS / f"{name}.md"
            path.write_text("\n".join(lines) + "\n", encoding="utf-8")
            tables.write(name, lines)
            print(f"\nwritten to {path}\n")


if __name__ == "__main__":
    main()
