"""The smallest job on real TensorFlow: trains until there is a file `end-job` beside its diary."""

import os
import sys
from pathlib import Path

import dike.compat.v1 as tf
import numpy as np

from dike import task as tasks

tf.disable_v2_behavior()
diary = Path(sys.argv[1])
task = tasks.current()
rng = np.random.RandomState(0)
data = rng.rand(256, 8).astype("f")
goal = data @ rng.rand(8, 1).astype("f")
x = tf.placeholder(tf.float32, [None, 8])
y = tf.placeholder(tf.float32, [None, 1])
w = tf.get_variable("w", [8, 1])
b = tf.get_variable("b", [1], initializer=tf.zeros_initializer())
loss = tf.reduce_mean(tf.square(tf.matmul(x, w) + b - y))
step = tf.train.get_or_create_global_step()
train = tf.train.GradientDescentOptimizer(0.01).minimize(loss, global_step=step)
with tf.train.MonitoredTrainingSession() as session:
    while not diary.with_name("end-job").exists():
        value, now, _ = session.run([loss, step, train], {x: data[:32], y: goal[:32]})
        if task is None or task.is_chief:
            with diary.open("a") as file:
                file.write(f"{task.attempt if task else 0} {os.getpid()} {now} {float(value).hex()}\n")
