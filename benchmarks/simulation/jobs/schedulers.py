"""The named schedulers, as ALLOCATION/PLACEMENT/SHARDING (`benchmarks.simulation.jobs.scheduler`)."""

from __future__ import annotations

SCHEDULERS = {
    "dike": "relative-gain/fewest/balanced",
    "optimus": "gain/fewest/paa",
    "drf": "drf/spread/in-turn",
    "tetris": "tetris/best-fit/in-turn",
    "fifo": "fifo/spread/in-turn",
}
