"""A monitored session that reads a shuffled dataset; Adam, clipped gradients, hooks, and a folder for checkpoints."""

import sys

import numpy as np
import tensorflow.compat.v1 as tf

tf.disable_eager_execution()
tf.set_random_seed(3)
data = np.random.default_rng(1)
x = data.normal(size=(200, 8)).astype(np.float32)
y = (x @ data.normal(size=(8, 1)) + 0.1 * data.normal(size=(200, 1))).astype(np.float32)
dataset = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(64).repeat().batch(16).prefetch(2)
images, labels = tf.data.make_one_shot_iterator(dataset).get_next()
kernel = tf.get_variable("kernel", [8, 1], initializer=tf.zeros_initializer())
loss = tf.reduce_mean(tf.square(images @ kernel - labels))
variables = tf.trainable_variables()
gradients, _ = tf.clip_by_global_norm(tf.gradients(loss, variables), 1.0)
step = tf.train.get_or_create_global_step()
train = tf.train.AdamOptimizer(0.05).apply_gradients(zip(gradients, variables, strict=True), global_step=step)

hooks = [tf.train.StopAtStepHook(last_step=int(sys.argv[1])), tf.train.NanTensorHook(loss)]
with tf.train.MonitoredTrainingSession(checkpoint_dir="model", hooks=hooks, save_checkpoint_steps=10) as session:
    while not session.should_stop():
        session.run(train)
print("kept", tf.train.latest_checkpoint("model").rpartition("/")[2])
