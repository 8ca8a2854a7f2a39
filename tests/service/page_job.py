"""A training job without TensorFlow that prints markup: `python page_job.py`; it runs until it gets SIGTERM."""

from __future__ import annotations

import math
import time

from dike import task as tasks
from dike.reporting import reporter

STEP_S = 0.1
task = tasks.current()
assert task is not None
step = 0
print("<img src=x onerror=\"document.title='broken'\"> &amp;", flush=True)
while True:
    time.sleep(STEP_S)
    if task.is_chief:
        step += 1
        reporter().progress(step, loss=2.0 * math.exp(-step / 40), samples_per_s=320.0 + 40 * (step % 3))
