"""Trains for ever in a session of TensorFlow 1, two variables on the parameter servers."""

from __future__ import annotations

import time

import tensorflow.compat.v1 as tf

with tf.Graph().as_default():
    step = tf.train.get_or_create_global_step()
    weights = [tf.get_variable(f"w{number}", initializer=[1.0, 2.0]) for number in range(2)]
    loss = tf.add_n([tf.reduce_sum(tf.square(weight)) for weight in weights])
    train = tf.train.GradientDescentOptimizer(0.01).minimize(loss, global_step=step)
    with tf.train.MonitoredTrainingSession() as session:
        print("trains", flush=True)
        while not session.should_stop():
            session.run(train)
            time.sleep(0.01)
