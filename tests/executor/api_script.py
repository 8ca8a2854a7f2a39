"""A trial that uses Dike's own functions: a sum of random numbers, one a step.

`python api_script.py [wait]`: whether it waits for the request to suspend, in the middle.
"""

from __future__ import annotations

import json
import random
import sys
import time
from pathlib import Path

import dike
from dike.trial.runtime import runtime

STEPS = 60
trial = runtime()
assert trial is not None
state = {"sum": 0.0}


def save(folder: str) -> None:
    Path(folder, "state.json").write_text(json.dumps(state))


def restore(folder: str) -> None:
    state.update(json.loads(Path(folder, "state.json").read_text()))


random.seed(dike.params(seed=0)["seed"])
for step in range(dike.checkpoint(save, restore) + 1, STEPS + 1):
    state["sum"] += random.random()
    while step == STEPS // 2 and "wait" in sys.argv and not trial.suspend_requested:
        time.sleep(0.01)
    dike.report(step, loss=state["sum"])
print("sum", repr(state["sum"]))
