"""A search that holds resources which a job could use."""

from __future__ import annotations

from pathlib import Path

from framework.embedded.cluster import EmbeddedCluster
from tests.running import Running

COUNTING = Path(__file__).parents[2] / "search" / "scripts" / "counting.py"


def search(folder: Path, cluster: EmbeddedCluster, steps: int, slot_mem_mib: int) -> Running:
    """A search of one trial in one slot; `end-0.01` in its folder ends it."""
    folder.mkdir()
    slot = ("--slot-mem", str(slot_mem_mib), "--slot-cpus", "0.5", "--slots", "1")
    trial = ("--param", "lr=0.01", COUNTING, "--", "--steps", str(steps), "--diary", folder / "diary.txt")
    return Running(folder, "tune", "--format", "json", "--master", cluster.master, *slot, *trial)
