"""A trial without any framework: its loss falls by its learning rate at every step. Says which processes it was."""

import argparse
import json
import os
import time
from pathlib import Path

import dike

parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float, required=True)
parser.add_argument("--steps", type=int, default=40)
parser.add_argument("--pause", type=float, default=0.05)
parser.add_argument("--slow-agent", help="on this one of two agents a step takes five times as long; needs --diary")
parser.add_argument("--diary", type=Path)
parser.add_argument("--fail-at", type=int, default=-1)
parser.add_argument("--fail-lr", type=float, default=None, help="only the trial with this learning rate fails")
parser.add_argument("--unsaved", action="store_true", help="without checkpoints")
parser.add_argument("--hang-once", type=Path, help="the first save hangs; the file says that it has")
arguments = parser.parse_args()
state = {"loss": 1.0}
if arguments.slow_agent:
    is_slow = arguments.slow_agent in Path.cwd().parts
    arguments.pause *= 5 if is_slow else 1
    # One agent's slot may be there much later than the other's: nothing begins before there is a trial on each.
    (arguments.diary.parent / f"slow-{is_slow}").touch()
    while not all((arguments.diary.parent / f"slow-{one}").exists() for one in (True, False)):
        time.sleep(arguments.pause)


def is_told(what: str) -> bool:
    """Whether the test gave this order to trials of this learning rate, by a file beside their diary."""
    return arguments.diary is not None and (arguments.diary.parent / f"{what}-{arguments.lr}").exists()


def save(folder: str) -> None:
    if arguments.hang_once and not arguments.hang_once.exists():
        arguments.hang_once.touch()
        time.sleep(600)
    Path(folder, "state.json").write_text(json.dumps(state))


def restore(folder: str) -> None:
    state.update(json.loads(Path(folder, "state.json").read_text()))


start = 0 if arguments.unsaved else dike.checkpoint(save, restore)
for step in range(start + 1, arguments.steps + 1):
    if not is_told("hurry"):
        time.sleep(arguments.pause)
    if is_told("end"):
        break
    state["loss"] *= 1 - arguments.lr
    if step == arguments.fail_at and arguments.lr == arguments.fail_lr:
        raise ValueError(f"no further than {step}")
    print(f"loss {state['loss']:.9f}")
    if arguments.diary:
        with arguments.diary.open("a") as diary:
            diary.write(f"\n{arguments.lr} {os.getpid()} {step} {state['loss'].hex()} .\n")
    dike.report(step, loss=state["loss"], accuracy=1 - state["loss"])
