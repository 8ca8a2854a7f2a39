"""Runs the benchmarks named on the command line, or all of them, and writes `benchmarks/results/NAME.md`."""

from __future__ import annotations

import argparse
import importlib
from pathlib import Path

from benchmarks.machine import describe_machine

NAMES = ("planning", "embedded_mesos")
RESULTS = Path(__file__).parent / "results"


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"which: {', '.join(NAMES)}; all if none is given")
    names = parser.parse_args().names or NAMES
    for name in names:
        if name not in NAMES:
            parser.error(f"there is no benchmark '{name}'; there are {', '.join(NAMES)}")
    for name in names:
        module = importlib.import_module(f"benchmarks.{name}")
        lines = [
            f"# {module.TITLE}",
            "",
            f"    python -m benchmarks {name}",
            "",
            f"Machine: {describe_machine()}.",
            "",
            *module.measure(),
        ]
        path = RESULTS / f"{name}.md"
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
        print("\n".join(lines))
        print(f"\nwritten to {path}\n")


if __name__ == "__main__":
    main()
