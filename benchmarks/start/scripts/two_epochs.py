"""Two short epochs of Keras; each step logs its end, process and task to a file."""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path

import keras
import numpy as np

STEPS_PER_EPOCH = 63
BATCH_SIZE = 32


class StepLog(keras.callbacks.Callback):
    def __init__(self, path: Path, pause_s: float, stop: Path) -> None:
        super().__init__()
        self._path = path
        self._pause_s = pause_s
        self._stop = stop

    def on_train_batch_end(self, batch: int, logs: object = None) -> None:
        with self._path.open("a") as step_log:
            step_log.write(f"{time.monotonic()} {os.getpid()} {task()}\n")
        time.sleep(self._pause_s)
        self.model.stop_training = self._stop.exists()


def task() -> str:
    """The job's task that this process is, such as `worker:1`; `-` outside of a job."""
    # Not TF_CONFIG: Dike assumes that a script which names it sets it, and preloads nothing.
    task = json.loads(os.environ.get("DIKE_TASK", "{}"))
    return f"{task['role']}:{task['index']}" if task else "-"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "step_log", type=Path, help="the file; training stops where there is one with '.stop' behind it"
    )
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--width", type=int, default=64, help="units of each hidden layer")
    parser.add_argument("--layers", type=int, default=1, help="hidden layers")
    parser.add_argument("--pause", type=float, default=0.0, help="seconds after each step")
    arguments = parser.parse_args()
    x = np.random.default_rng(0).random((STEPS_PER_EPOCH * BATCH_SIZE, 64), dtype=np.float32)
    y = (x.sum(1) > 32).astype(np.int64)
    hidden = [keras.layers.Dense(arguments.width, "relu") for _ in range(arguments.layers)]
    model = keras.Sequential([keras.layers.Input((64,)), *hidden, keras.layers.Dense(2)])
    model.compile(keras.optimizers.SGD(arguments.lr), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    step_log = StepLog(arguments.step_log, arguments.pause, arguments.step_log.with_suffix(".stop"))
    model.fit(x, y, epochs=arguments.epochs, batch_size=BATCH_SIZE, verbose=2, callbacks=[step_log])


main()
