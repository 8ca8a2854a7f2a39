"""Trains a tiny model until a file says that it is enough: FOLDER, where each start leaves its process' id."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import dike.compat.v1 as tf
import numpy as np

STEP_S = 0.1

tf.disable_v2_behavior()
folder = Path(sys.argv[1])
with (folder / "started").open("a") as started:
    started.write(f"{os.getpid()}\n")
x = tf.placeholder(tf.float32, [None, 4])
weights = tf.get_variable("w", [4, 1], initializer=tf.zeros_initializer())
loss = tf.reduce_mean(tf.square(tf.matmul(x, weights) - 1.0))
train = tf.train.GradientDescentOptimizer(0.001).minimize(loss, global_step=tf.train.get_or_create_global_step())
with tf.train.MonitoredTrainingSession() as session:
    while not (folder / "enough").exists():
        session.run([loss, train], {x: np.ones((8, 4), "f")})
        time.sleep(STEP_S)
