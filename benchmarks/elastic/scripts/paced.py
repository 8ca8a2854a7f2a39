"""Trains a small model; each step sleeps 50 ms, so that one machine can simulate many GPUs."""

from __future__ import annotations

import sys
import time

import dike.compat.v1 as tf
import numpy as np

STEP_S = 0.05
BATCH_SIZE = 32


def main() -> None:
    """The argument is the number of steps of all workers together."""
    tf.disable_v2_behavior()
    random = np.random.RandomState(0)
    data = random.rand(512, 8).astype("f")
    goal = data @ random.rand(8, 1).astype("f")
    x = tf.placeholder(tf.float32, [None, 8])
    y = tf.placeholder(tf.float32, [None, 1])
    weights = tf.get_variable("w", [8, 1])
    loss = tf.reduce_mean(tf.square(tf.matmul(x, weights) - y))
    step = tf.train.get_or_create_global_step()
    train = tf.train.GradientDescentOptimizer(0.01).minimize(loss, global_step=step)
    hooks = [tf.train.StopAtStepHook(last_step=int(sys.argv[1]))]
    with tf.train.MonitoredTrainingSession(hooks=hooks) as session:
        while not session.should_stop():
            rows = random.randint(0, len(data), BATCH_SIZE)
            session.run([loss, train], {x: data[rows], y: goal[rows]})
            time.sleep(STEP_S)


main()
