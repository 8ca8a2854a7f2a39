"""A training job without TensorFlow: the chief's loss falls at every step; the others work as long as it does.

Claims its checkpoint folder and saves as the chiefs of real jobs do. Each step goes to a diary, with attempt and
process; a file `end-job` beside the diary ends the training before the last step.
"""

import json
import os
import sys
import time
from pathlib import Path

from dike import checkpoints
from dike import task as tasks
from dike.process import termination
from dike.reporting import reporter
from dike.roles import fencing

SAVE_STEPS = 10
steps, pause_s, diary = int(sys.argv[1]), float(sys.argv[2]), Path(sys.argv[3])
task = tasks.current()
assert task is not None
folder = Path(task.checkpoint_dir)
ended = folder / "ended"


def save(step: int, loss: float) -> None:
    fencing.check(task)
    path = folder / f"state-{step}.json"
    temporary = path.with_suffix(f".{os.getpid()}")
    if checkpoints.skip_if_disk_full(lambda: temporary.write_text(json.dumps({"step": step, "loss": loss}))):
        temporary.rename(path)
        reporter().checkpoint(str(path), step)


def newest() -> dict[str, float]:
    saved = [json.loads(path.read_text()) for path in folder.glob("state-*.json")]
    return max(saved, key=lambda state: state["step"], default={"step": 0, "loss": 1.0})


def train() -> None:
    fencing.take_ownership(task)
    state = newest()
    step, loss = int(state["step"]), float(state["loss"])
    reporter().resumed(step)
    termination.enable_saving()
    while step < steps and not diary.with_name("end-job").exists():
        time.sleep(pause_s)
        step, loss = step + 1, loss * 0.99
        with diary.open("a") as file:
            file.write(f"\n{task.attempt} {os.getpid()} {step} {loss.hex()} .\n")
        reporter().progress(step, loss=loss)
        if step % SAVE_STEPS == 0:
            save(step, loss)
        if termination.requested:
            save(step, loss)
            termination.exit()
    save(step, loss)
    checkpoints.retry_while_disk_full(ended.touch)


if task.is_chief:
    train()
else:
    while not ended.exists():
        time.sleep(pause_s)
