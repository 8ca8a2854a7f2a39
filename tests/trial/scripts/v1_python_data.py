"""Data from a Python generator, through a dataset whose position cannot be saved."""

import numpy as np
import tensorflow.compat.v1 as tf

tf.disable_eager_execution()


def rows():
    for number in range(1000):
        yield np.float32(number % 7)


value = tf.data.make_one_shot_iterator(tf.data.Dataset.from_generator(rows, tf.float32, [])).get_next()
weight = tf.get_variable("weight", [], initializer=tf.zeros_initializer())
loss = tf.square(weight - value)
train = tf.train.GradientDescentOptimizer(0.01).minimize(loss, global_step=tf.train.get_or_create_global_step())
with tf.train.SingularMonitoredSession(hooks=[tf.train.StopAtStepHook(last_step=12)]) as session:
    while not session.should_stop():
        session.run(train)
    print("weight", float(session.raw_session().run(weight)).hex())
