"""A job's process of few lines: `python job_script.py WAYS`, as an executor runs it; the way is that of its attempt."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from types import FrameType
from typing import Any

TASK = json.loads(os.environ["DIKE_TASK"])
ATTEMPT = TASK["attempt"]


def tell(**line: Any) -> None:
    os.write(TASK["report_fd"], (json.dumps(line) + "\n").encode())


def save_and_leave(_signal: int, _frame: FrameType | None) -> None:
    tell(type="checkpoint", path=os.environ["DIKE_CHECKPOINT_DIR"], step=ATTEMPT)
    print(f"attempt {ATTEMPT} leaves", flush=True)
    os._exit(143)


def fail(_signal: int, _frame: FrameType | None) -> None:
    os._exit(1)


def stay() -> None:
    tell(type="started", attempt=ATTEMPT)
    while True:
        time.sleep(60)


print(f"attempt {ATTEMPT} begins", flush=True)
ways = sys.argv[1].split(",")
match ways[ATTEMPT % len(ways)]:
    case "train":
        signal.signal(signal.SIGTERM, save_and_leave)
        stay()
    case "serve":
        stay()
    case "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        stay()
    case "fail_when_stopped":
        signal.signal(signal.SIGTERM, fail)
        stay()
    case "litter" | "helped":
        left = subprocess.Popen(["sleep", "600"], start_new_session="litter" in ways)
        tell(type="left", pid=left.pid)
        stay()
    case "bomb":
        tell(type="started", attempt=ATTEMPT)
        while True:
            subprocess.Popen(["sleep", "600"])
    case "fail":
        print("about to fail", file=sys.stderr, flush=True)
        sys.exit(3)
    case "lose_peer":
        sys.exit(79)
    case "vanish":
        os.kill(os.getpid(), signal.SIGKILL)
    case "finish":
        os.write(TASK["report_fd"], b"no JSON\n")
