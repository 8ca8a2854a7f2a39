"""Trains a small CNN on scikit-learn's handwritten digits with TensorFlow 1 sessions.

    python examples/digits_v1.py          trains here, as with plain TensorFlow
    dike run examples/digits_v1.py        trains on a Mesos cluster with parameter servers and workers
    dike tune examples/digits_v1.py --param lr=0.01,0.003,0.001
                                          runs one trial for each learning rate

There is no ClusterSpec, no Server and no device function in it: Dike brings them.
"""

import argparse

import dike.compat.v1 as tf
import numpy as np
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lr", type=float, default=0.003, help="learning rate")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--steps", type=int, default=400, help="training steps of all workers together")
    parser.add_argument("--seed", type=int, help="seed of the batches; by default they differ from run to run")
    return parser.parse_args()


def weights(name: str, shape: list[int]) -> tf.Variable:
    return tf.get_variable(name, shape, initializer=tf.glorot_uniform_initializer(seed=7))


def biases(name: str, size: int) -> tf.Variable:
    return tf.get_variable(name, [size], initializer=tf.zeros_initializer())


def network(images: tf.Tensor) -> tf.Tensor:
    """Images (batch, 8, 8, 1) -> logits (batch, 10)."""
    hidden = tf.nn.conv2d(images, weights("conv1/kernel", [3, 3, 1, 16]), strides=1, padding="SAME")
    hidden = tf.nn.relu(hidden + biases("conv1/bias", 16))
    hidden = tf.nn.conv2d(hidden, weights("conv2/kernel", [3, 3, 16, 32]), strides=1, padding="SAME")
    hidden = tf.nn.relu(hidden + biases("conv2/bias", 32))
    hidden = tf.nn.max_pool2d(hidden, ksize=2, strides=2, padding="SAME")
    hidden = tf.reshape(hidden, [-1, 4 * 4 * 32])
    hidden = tf.nn.relu(tf.matmul(hidden, weights("dense1/kernel", [512, 64])) + biases("dense1/bias", 64))
    return tf.matmul(hidden, weights("dense2/kernel", [64, 10])) + biases("dense2/bias", 10)


def main() -> None:
    arguments = parse_arguments()
    tf.disable_v2_behavior()
    tf.set_random_seed(7)
    digits = load_digits()
    images = (digits.images / 16.0).astype(np.float32)[..., np.newaxis]
    train_x, test_x, train_y, test_y = train_test_split(
        images, digits.target, test_size=0.2, random_state=7, stratify=digits.target
    )

    image = tf.placeholder(tf.float32, [None, 8, 8, 1], name="image")
    label = tf.placeholder(tf.int64, [None], name="label")
    logits = network(image)
    loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=label, logits=logits))
    accuracy = tf.reduce_mean(tf.cast(tf.equal(tf.argmax(logits, 1), label), tf.float32))
    global_step = tf.train.get_or_create_global_step()
    train_op = tf.train.AdamOptimizer(arguments.lr).minimize(loss, global_step=global_step)

    random = np.random.default_rng(arguments.seed)
    own_steps = 0  # the global step also counts the other workers' steps
    test_accuracy = 0.0
    hooks = [tf.train.StopAtStepHook(last_step=arguments.steps)]
    with tf.train.MonitoredTrainingSession(hooks=hooks, log_step_count_steps=None) as session:
        while not session.should_stop():
            if own_steps % 10 == 0:
                test_accuracy = session.run(accuracy, feed_dict={image: test_x, label: test_y})
                if session.should_stop():
                    break
            batch = random.choice(len(train_x), arguments.batch_size)
            step, value, _ = session.run(
                [global_step, loss, train_op], feed_dict={image: train_x[batch], label: train_y[batch]}
            )
            own_steps += 1
            if own_steps % 50 == 0:
                print(f"step {step}: loss {value:.4f}", flush=True)
    print(f"test accuracy: {test_accuracy:.4f}")


if __name__ == "__main__":
    main()
