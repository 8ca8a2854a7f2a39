"""A trial that uses Dike's own functions: a sum of random numbers, one a step."""

from __future__ import annotations

import json
import random
import time
from pathlib import Path

import dike

STEPS = 60
state = {"sum": 0.0}


def save(folder: str) -> None:
    Path(folder, "state.json").write_text(json.dumps(state))


def restore(folder: str) -> None:
    state.update(json.loads(Path(folder, "state.json").read_text()))


random.seed(dike.params(seed=0)["seed"])
for step in range(dike.checkpoint(save, restore) + 1, STEPS + 1):
    state["sum"] += random.random()
    time.sleep(0.01)
    dike.report(step, loss=state["sum"])
print("sum", repr(state["sum"]))
