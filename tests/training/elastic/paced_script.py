"""Trains a tiny model whose steps take their time; the worker that the arguments name takes far longer at first.

Arguments: how many steps each worker makes once the slow one has been replaced, however long that takes, and the index
of the slow worker.
"""

from __future__ import annotations

import json
import os
import sys
import time

import dike.compat.v1 as tf
import numpy as np

ENDLESS = 1_000_000
STEP_S = 0.05
SLOW_STEP_S = 0.5

tf.disable_v2_behavior()
task = json.loads(os.environ["DIKE_TASK"]) if "DIKE_TASK" in os.environ else {"index": 0, "attempt": 0}
is_slow = task["index"] == int(sys.argv[2]) and task["attempt"] == 0
left = ENDLESS if task["attempt"] == 0 else int(sys.argv[1])
x = tf.placeholder(tf.float32, [None, 4])
loss = tf.reduce_mean(tf.square(tf.matmul(x, tf.get_variable("w", [4, 1])) - 1.0))
train = tf.train.GradientDescentOptimizer(0.01).minimize(loss, global_step=tf.train.get_or_create_global_step())
hooks = [tf.train.StopAtStepHook(last_step=ENDLESS)]
with tf.train.MonitoredTrainingSession(hooks=hooks) as session:
    while left and not session.should_stop():
        left -= 1
        session.run([loss, train], {x: np.ones((8, 4), "f")})
        time.sleep(SLOW_STEP_S if is_slow else STEP_S)
