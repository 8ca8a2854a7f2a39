"""Trains a model of 25 million parameters, 100 MB, in a TensorFlow 1 session until it is killed."""

from __future__ import annotations

import numpy as np
import tensorflow.compat.v1 as tf

WIDTH = 5000
BATCH_SIZE = 8


def weights(name: str, shape: list[int]) -> tf.Variable:
    return tf.get_variable(name, shape, initializer=tf.glorot_uniform_initializer(seed=7))


def main() -> None:
    tf.disable_v2_behavior()
    inputs = tf.placeholder(tf.float32, [None, WIDTH])
    hidden = tf.nn.relu(tf.matmul(inputs, weights("hidden", [WIDTH, WIDTH])))
    outputs = tf.matmul(hidden, weights("output", [WIDTH, 1]))
    loss = tf.reduce_mean(tf.square(outputs - tf.reduce_mean(inputs, axis=1, keepdims=True)))
    global_step = tf.train.get_or_create_global_step()
    train_op = tf.train.GradientDescentOptimizer(1e-5).minimize(loss, global_step=global_step)
    random = np.random.default_rng(7)
    with tf.train.MonitoredTrainingSession(log_step_count_steps=None) as session:
        while True:
            session.run([loss, train_op], {inputs: random.random((BATCH_SIZE, WIDTH), dtype=np.float32)})


if __name__ == "__main__":
    main()
