"""Trains the CNN of `examples/digits_v1.py` in a TensorFlow 1 session on random images, in turns (see `turns`)."""

from __future__ import annotations

import argparse

import numpy as np
import tensorflow.compat.v1 as tf
from turns import Turns

BATCH_SIZE = 64
IMAGES = 1440


def weights(name: str, shape: list[int]) -> tf.Variable:
    return tf.get_variable(name, shape, initializer=tf.glorot_uniform_initializer(seed=7))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--turn-steps", type=int, required=True)
    arguments = parser.parse_args()
    tf.disable_v2_behavior()
    image = tf.placeholder(tf.float32, [None, 8, 8, 1])
    label = tf.placeholder(tf.int64, [None])
    hidden = tf.nn.relu(tf.nn.conv2d(image, weights("conv1", [3, 3, 1, 16]), strides=1, padding="SAME"))
    hidden = tf.nn.relu(tf.nn.conv2d(hidden, weights("conv2", [3, 3, 16, 32]), strides=1, padding="SAME"))
    hidden = tf.reshape(tf.nn.max_pool2d(hidden, ksize=2, strides=2, padding="SAME"), [-1, 4 * 4 * 32])
    hidden = tf.nn.relu(tf.matmul(hidden, weights("dense1", [512, 64])))
    logits = tf.matmul(hidden, weights("dense2", [64, 10]))
    loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=label, logits=logits))
    global_step = tf.train.get_or_create_global_step()
    train_op = tf.train.AdamOptimizer(0.001).minimize(loss, global_step=global_step)

    random = np.random.default_rng(7)
    images = random.random((IMAGES, 8, 8, 1), dtype=np.float32)
    labels = random.integers(0, 10, IMAGES)
    turns = Turns()
    with tf.train.MonitoredTrainingSession(log_step_count_steps=None) as session:
        while True:
            turns.next()
            for _ in range(arguments.turn_steps):
                batch = random.choice(IMAGES, BATCH_SIZE)
                session.run([global_step, loss, train_op], {image: images[batch], label: labels[batch]})


if __name__ == "__main__":
    main()
