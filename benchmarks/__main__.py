"""Runs the benchmarks named on the command line, or all of them, and writes `benchmarks/results/NAME.md`.

A part of the solver's or the search's document can be run alone, and `job_plots` of `jobs`; it is then only printed.
"""

from __future__ import annotations

import argparse
import importlib
from pathlib import Path

from benchmarks.jobs import PARTS as JOBS_PARTS
from benchmarks.machine import describe_machine
from benchmarks.search import PARTS as SEARCH_PARTS
from benchmarks.solver import PARTS as SOLVER_PARTS

NAMES = (
    "solver",
    "embedded_mesos",
    "search",
    "different_slots",
    "different_gpus",
    "jobs",
    "elastic",
    "convergence",
    "speed_models",
    "load",
    "steady_load",
    "chaos",
    "chaos_tensorflow",
)
MODULES = (
    {name: f"benchmarks.{name}" for name in (*NAMES, *SOLVER_PARTS)}
    | {name: f"benchmarks.search.{name}" for name in SEARCH_PARTS}
    | {name: f"benchmarks.jobs.{name}" for name in JOBS_PARTS}
)
RESULTS = Path(__file__).parent / "results"


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    known = ", ".join(MODULES)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"which: {known}; {', '.join(NAMES)} if none is given")
    names = [name.replace("-", "_") for name in parser.parse_args().names or NAMES]
    for name in names:
        if name not in MODULES:
            parser.error(f"there is no benchmark '{name}'; there are {known}")
    for name in names:
        module = importlib.import_module(MODULES[name])
        lines = [
            f"# {module.TITLE}",
            "",
            f"    python -m benchmarks {name}",
            "",
            f"Machine: {describe_machine()}.",
            "",
            *module.measure(),
        ]
        print("\n".join(lines))
        if name in NAMES:
            path = RESULTS / f"{name}.md"
            path.write_text("\n".join(lines) + "\n", encoding="utf-8")
            print(f"\nwritten to {path}\n")


if __name__ == "__main__":
    main()
