"""A trial of few lines: `python trial_script.py WAY`, as an executor runs it."""

from __future__ import annotations

import json
import os
import resource
import select
import signal
import subprocess
import sys
import time
from typing import Any

TRIAL = json.loads(os.environ["DIKE_TRIAL"])
FIRST_STEP = int(TRIAL["resume_from"].rpartition("-")[2]) if TRIAL["resume_from"] else 0


def tell(**line: Any) -> None:
    os.write(TRIAL["report_fd"], (json.dumps(line) + "\n").encode())


def suspension_requested() -> bool:
    return bool(select.select([TRIAL["control_fd"]], [], [], 0.01)[0])


def train(*, preemptible: bool, obeys: bool = True) -> None:
    if TRIAL["resume_from"]:
        tell(type="restored", path=TRIAL["resume_from"], step=FIRST_STEP)
    tell(type="training", preemptible=preemptible)
    step = FIRST_STEP
    while True:
        if obeys and suspension_requested():
            wanted = os.read(TRIAL["control_fd"], 100)
            if wanted != b"pause\n" and not preemptible:
                continue  # there is no state to resume from
            path = f"{TRIAL['folder']}/run-{TRIAL['run']}-step-{step}" if preemptible else None
            if path:
                tell(type="checkpoint", path=path, step=step, train_s=0.1)
            if wanted != b"pause\n":
                tell(type="suspended", path=path, step=step)
                sys.exit(75)
            tell(type="paused", path=path, step=step)
            TRIAL["run"] = int(os.read(TRIAL["control_fd"], 100).removeprefix(b"continue "))
            print("run", TRIAL["run"], flush=True)
            if path:
                tell(type="restored", path=path, step=step)
            tell(type="training", preemptible=preemptible)
        step += 1
        tell(type="progress", step=step, loss=1 / step, metrics={"accuracy": 0.5})
        if not obeys and step == 3:
            tell(type="checkpoint", path=f"{TRIAL['folder']}/run-{TRIAL['run']}-step-3", step=3, train_s=0.1)
        if not obeys:
            time.sleep(0.01)


print("parameters", TRIAL["parameters"], flush=True)
tell(type="started")
match sys.argv[1]:
    case "gpu memory":
        print("MEMORY", os.environ.get("DIKE_GPU_MEMORY_MIB"), flush=True)
    case "chatty":
        # More than is always sent, then more than is sent late in one piece; pieces may start within a line.
        for size in (200, 2000):
            print("".join(f"{number} äöü\n" for number in range(size * 100)), end="", flush=True)
        print("all said", flush=True)
        train(preemptible=True)
    case "train":
        train(preemptible=True)
    case "family":
        # A helper in its group, and one that has left it and its parent.
        subprocess.Popen(["sleep", "600"])
        subprocess.Popen(["sh", "-c", "sleep 600 &"], start_new_session=True).wait()
        train(preemptible=True)
    case "large":
        held = b"x" * (64 << 20)
        train(preemptible=True)
    case "unsaved":
        train(preemptible=False)
    case "deaf":
        train(preemptible=True, obeys=False)
    case "fixed":
        train(preemptible=False, obeys=False)
    case "signals":
        # What a script asks of its own process group is nothing to Dike.
        signal.signal(signal.SIGUSR1, lambda *_: None)
        os.killpg(os.getpgrp(), signal.SIGUSR1)
        # It leaves the process group, and still receives the signal to end.
        os.setsid()
        signal.signal(signal.SIGTERM, lambda *_: os._exit(7))
        train(preemptible=False, obeys=False)
    case "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        train(preemptible=False, obeys=False)
    case "finish":
        tell(type="training", preemptible=True)
        for step in (1, 2, 3):
            tell(type="progress", step=step, loss=1 / step, metrics={"accuracy": step / 10})
        os.write(TRIAL["report_fd"], b"no JSON\n[1]\n")
        tell(type="result", value=0.25, values={"f1": 0.75})
    case "hang":
        tell(type="training", preemptible=False)
        for step in range(1, 6):
            tell(type="progress", step=step, loss=1 / step)
        signal.pause()
    case "litter":
        left = subprocess.Popen(["sleep", "600"], start_new_session=True)
        tell(type="progress", step=1, loss=float(left.pid))
    case "bomb":
        tell(type="training", preemptible=False)
        while True:
            subprocess.Popen(["sleep", "600"])
    case "hungry":
        tell(type="training", preemptible=False)
        held = [b"x" * (16 << 20)]
        while True:
            held.append(held[0][1:] + b"x")
    case "limits":
        print("processes", resource.getrlimit(resource.RLIMIT_NPROC)[0], flush=True)
    case "fail":
        print("about to fail", file=sys.stderr)
        tell(type="failed", message="ValueError: negative learning rate")
        sys.exit(1)
    case "refuse":
        tell(type="bad_input", message="The script has no flag --lr.")
        sys.exit(2)
    case "vanish":
        os.kill(os.getpid(), signal.SIGKILL)
