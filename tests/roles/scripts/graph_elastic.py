"""A deterministic, synchronous TensorFlow 1 script: STEPS. Its first attempt asks its own process to end."""

import json
import os
import signal
import sys
import time

import numpy as np
import tensorflow.compat.v1 as tf

tf.disable_v2_behavior()
task = json.loads(os.environ["DIKE_TASK"])
SLOW_S = float(os.environ["SLOW_S"])
random = np.random.RandomState(0)
inputs = random.randn(64, 4).astype("float32")
targets = inputs @ np.array([1.0, -2.0, 3.0, -4.0], "float32")
x = tf.placeholder(tf.float32, [None, 4])
weights = tf.get_variable("weights", [4], initializer=tf.zeros_initializer())
slow = task["attempt"] == 0 and task["index"] == 1


def pause(seconds):
    time.sleep(float(seconds))
    return seconds


with tf.control_dependencies([tf.py_func(pause, [SLOW_S], tf.float32)] if slow else []):
    errors = tf.tensordot(x, weights, 1) - targets
loss = tf.reduce_mean(errors**2)
step = tf.train.get_or_create_global_step()
optimizer = tf.train.SyncReplicasOptimizer(tf.train.GradientDescentOptimizer(0.02), replicas_to_aggregate=1)
train = optimizer.minimize(loss, global_step=step)
hooks = [tf.train.StopAtStepHook(num_steps=int(sys.argv[1])), optimizer.make_session_run_hook(is_chief=True)]
with tf.train.MonitoredTrainingSession(hooks=hooks) as session:
    runs = 0
    while not session.should_stop():
        print("LOSS", float(session.run([loss, train], {x: inputs})[0]), flush=True)
        runs += 1
        if task["attempt"] == 0 and task["index"] == 0 and runs == 15:
            os.kill(os.getpid(), signal.SIGTERM)
