"""The smallest job on real TensorFlow: `python train.py DIARY STEPS PAUSE`; with one worker the same in every run.

A file `end-job` beside the diary ends the training before the last step.
"""

import os
import sys
import time
from pathlib import Path

import dike.compat.v1 as tf
import numpy as np

from dike import task as tasks

tf.disable_v2_behavior()
diary, steps, pause_s = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
task = tasks.current()
rng = np.random.RandomState(0)
data = rng.rand(256, 8).astype("f")
goal = data @ rng.rand(8, 1).astype("f")
x = tf.placeholder(tf.float32, [None, 8])
y = tf.placeholder(tf.float32, [None, 1])
w = tf.get_variable("w", [8, 1], initializer=tf.constant_initializer(rng.rand(8, 1)))
b = tf.get_variable("b", [1], initializer=tf.zeros_initializer())
loss = tf.reduce_mean(tf.square(tf.matmul(x, w) + b - y))
step = tf.train.get_or_create_global_step()
train = tf.train.MomentumOptimizer(0.001, 0.9).minimize(loss, global_step=step)
with tf.control_dependencies([train]):
    taken = tf.identity(step.read_value())


class Diary(tf.train.SessionRunHook):
    """Before whatever is done with a step, it is written down."""

    def before_run(self, run_context):
        return tf.train.SessionRunArgs([loss, taken])

    def after_run(self, run_context, run_values):
        value, now = run_values.results
        if task is None or task.is_chief:
            with diary.open("a") as file:
                file.write(f"\n{task.attempt if task else 0} {os.getpid()} {now} {float(value).hex()} .\n")
        time.sleep(pause_s)
        if now >= steps or diary.with_name("end-job").exists():
            run_context.request_stop()


with tf.train.MonitoredTrainingSession(hooks=[Diary()]) as session:
    while not session.should_stop():
        session.run(train, {x: data[:32], y: goal[:32]})
