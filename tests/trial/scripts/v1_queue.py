"""Data from a queue, whose content cannot be saved."""

import tensorflow.compat.v1 as tf

tf.disable_eager_execution()
value = tf.train.input_producer(tf.constant([1.0, 2.0, 3.0, 4.0]), num_epochs=3, shuffle=False).dequeue()
weight = tf.get_variable("weight", [], initializer=tf.zeros_initializer())
loss = tf.square(weight - value)
train = tf.train.GradientDescentOptimizer(0.1).minimize(loss, global_step=tf.train.get_or_create_global_step())
with tf.train.MonitoredTrainingSession() as session:
    while not session.should_stop():
        session.run(train)
