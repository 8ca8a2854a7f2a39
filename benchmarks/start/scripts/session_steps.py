"""Steps of a TensorFlow 1 session; each logs its end, process and task to a file."""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path

import numpy as np
import tensorflow.compat.v1 as tf

BATCH_SIZE = 32


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
    parser.add_argument("--steps", type=int, default=126, help="of all workers together")
    parser.add_argument("--pause", type=float, default=0.0, help="seconds after each step")
    arguments = parser.parse_args()
    tf.disable_v2_behavior()
    random = np.random.RandomState(0)
    data = random.rand(512, 64).astype("f")
    goal = data @ random.rand(64, 1).astype("f")
    x = tf.placeholder(tf.float32, [None, 64])
    y = tf.placeholder(tf.float32, [None, 1])
    weights = tf.get_variable("w", [64, 1])
    loss = tf.reduce_mean(tf.square(tf.matmul(x, weights) - y))
    step = tf.train.get_or_create_global_step()
    train = tf.train.GradientDescentOptimizer(0.001).minimize(loss, global_step=step)
    hooks = [tf.train.StopAtStepHook(last_step=arguments.steps)]
    with tf.train.MonitoredTrainingSession(hooks=hooks) as session:
        while not (session.should_stop() or arguments.step_log.with_suffix(".stop").exists()):
            rows = random.randint(0, len(data), BATCH_SIZE)
            session.run([loss, train], {x: data[rows], y: goal[rows]})
            with arguments.step_log.open("a") as step_log:
                step_log.write(f"{time.monotonic()} {os.getpid()} {task()}\n")
            time.sleep(arguments.pause)


main()
