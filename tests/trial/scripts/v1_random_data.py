"""A pipeline with a random op whose state TensorFlow does not save; steps by a function without hooks."""

import tensorflow.compat.v1 as tf

tf.disable_eager_execution()
dataset = tf.data.Dataset.range(1000).map(lambda x: tf.cast(x, tf.float32) + 0.0 * tf.random.uniform([]))
value = tf.data.make_one_shot_iterator(dataset).get_next()
weight = tf.get_variable("weight", [], initializer=tf.zeros_initializer())
loss = tf.square(weight - value)
train = tf.train.GradientDescentOptimizer(0.01).minimize(loss)
with tf.train.MonitoredSession() as session:
    for _ in range(3):
        session.run_step_fn(lambda step_context: step_context.session.run(train))
