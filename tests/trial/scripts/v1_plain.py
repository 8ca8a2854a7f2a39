"""Epochs in the script's own loop: counters, lists, decisions that depend on results; seeded only on request."""

import random
import sys

import numpy as np
import tensorflow.compat.v1 as tf

tf.disable_eager_execution()
if len(sys.argv) > 1:
    random.seed(int(sys.argv[1]))
    np.random.seed(int(sys.argv[1]))
    tf.set_random_seed(int(sys.argv[1]))
data = np.random.default_rng(1)
x = data.normal(size=(60, 8)).astype(np.float32)
y = (x @ data.normal(size=(8, 1))).astype(np.float32)
offset = tf.placeholder(tf.float32, [])
dataset = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(60).batch(10)
iterator = tf.data.make_initializable_iterator(dataset)
images, labels = iterator.get_next()
rate = tf.Variable(0.1, trainable=False)
kernel = tf.Variable(tf.zeros([8, 1]))
loss = tf.reduce_mean(tf.square(images @ kernel - labels + offset))
train = tf.train.MomentumOptimizer(rate, 0.9).minimize(loss)
slower = rate.assign(rate * 0.5)
mean, update = tf.metrics.mean(loss)

with tf.Session() as session:
    session.run([tf.global_variables_initializer(), tf.local_variables_initializer()])
    history = []
    for epoch in range(4):
        session.run(iterator.initializer)
        while True:
            try:
                noise = random.random() + np.random.rand()
                value, _, _ = session.run([loss, train, update], feed_dict={offset: 0.01 * noise})
                history.append(float(value))
            except tf.errors.OutOfRangeError:
                break
        if history[-1] > 0.001:
            session.run(slower)
        print(f"epoch {epoch}: {len(history)} {float(session.run(mean)).hex()}")
print("history", " ".join(value.hex() for value in history))
