"""Forks processes of jobs out of one that has imported TensorFlow, which takes seconds each time: `servers.py KERAS`.

Standard input: one JSON object a line. `argv`, `environment`, `output`, `report`: the answer is the new process' id;
`ended`: the answer is the exit code of that process, `null` while it runs.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
from types import FrameType

from dike import launch, zygote

gc.disable()
libraries = ["tensorflow", sys.argv[1]]
assert zygote.preload(libraries, launch.COMPANIONS)[0] == libraries
# As in `dike.zygote`: no collection of a fork goes through what has been imported.
gc.freeze()
gc.enable()
codes: dict[int, int] = {}


def reap(_signal: int, _frame: FrameType | None) -> None:
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if not pid:
            return
        codes[pid] = os.waitstatus_to_exitcode(status)


signal.signal(signal.SIGCHLD, reap)
print("ready", flush=True)
for line in sys.stdin:
    order = json.loads(line)
    if "ended" in order:
        print(json.dumps(codes.get(order["ended"])), flush=True)
        continue
    child = os.fork()
    if child:
        print(child, flush=True)
        continue
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    output = os.open(order["output"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    report = os.open(order["report"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.dup2(report, order["report_fd"])
    os.environ.update(order["environment"])
    os.chdir(order["folder"])
    launch._exit(launch.main(order["argv"]))
