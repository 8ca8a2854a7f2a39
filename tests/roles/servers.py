"""Forks processes that only serve out of one that has imported TensorFlow, which takes seconds each time.

Standard input: one JSON object a line (`argv`, `environment`, `output`, `report`); the answer is the process' id.
"""

from __future__ import annotations

import json
import os
import signal
import sys

import tensorflow as tf

from dike import launch

assert tf.__version__
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
print("ready", flush=True)
for line in sys.stdin:
    order = json.loads(line)
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
    os._exit(launch.main(order["argv"]))
