"""Searches whose trials share a GPU (`dike tune --slots-per-gpu`), beside the same with a GPU each.

Without a GPU, an agent claims to have one: its slots then share the CPUs only, which shows what it costs and gains to
train several small trials at once, but not what a GPU does.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from framework.embedded.machine import gpu_models

TITLE = "Several trials on one GPU"
ROOT = Path(__file__).parents[1]
SCRIPTS = ROOT / "benchmarks" / "search" / "scripts"
RATES = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 3e-1)
EPOCHS = 6
SLOTS = (1, 2, 4)
REPEATS = 3
TIMEOUT_S = 900.0


def measure() -> Iterator[str]:
    gpus = gpu_models()
    where = f"one {gpus[0]}" if gpus else f"a GPU that the agent only claims to have, and {os.cpu_count()} CPUs"
    yield f"{len(RATES)} trials of `{SCRIPTS.name}/population.py`, a CNN on 8x8 digits, {EPOCHS} epochs each,"
    yield f"on an agent with {where}. From the start of the command to its end, seconds: the median of {REPEATS}"
    yield "searches, in rotation, and after the comma the least and the greatest."
    yield ""
    yield "| `--slots-per-gpu` | search, s | trials a minute | with 1 / this |"
    yield "|---|---|---|---|"
    found: dict[int, list[float]] = {slots: [] for slots in SLOTS}
    for _ in range(REPEATS):
        for slots in SLOTS:
            found[slots].append(_search_s(slots))
    alone = statistics.median(found[1])
    for slots, times in found.items():
        middle = statistics.median(times)
        spread = f"{middle:.0f}, {min(times):.0f} to {max(times):.0f}"
        yield f"| {slots} | {spread} | {60 * len(RATES) / middle:.1f} | {alone / middle:.2f} |"


def _search_s(slots: int) -> float:
    """Runs a whole search; returns its seconds."""
    with tempfile.TemporaryDirectory() as folder:
        path = os.pathsep.join(filter(None, (str(ROOT), str(SCRIPTS), os.environ.get("PYTHONPATH", ""))))
        environment = {**os.environ, "PYTHONPATH": path, "DIKE_PRIVATE": "1"}
        begun_s = time.monotonic()
        done = subprocess.run(
            [
                *(sys.executable, "-m", "framework", "tune", str(SCRIPTS / "population.py"), "--format", "json"),
                *("--param", f"lr={','.join(map(str, RATES))}", "--slots-per-gpu", str(slots), "--policy", "fifo"),
                *("--resources", f"cpus:{os.cpu_count()};mem:8192;gpus:1", "--slot-mem", "512"),
                *("--slot-cpus", "0.5", "--", "--epochs", str(EPOCHS)),
            ],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=True,
        )
        seconds = time.monotonic() - begun_s
        assert json.loads(done.stdout)["complete"]
        return seconds
