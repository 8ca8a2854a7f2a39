"""Trains in a thread, which cannot be stopped between two steps."""

import threading

import tensorflow.compat.v1 as tf

tf.disable_eager_execution()
weight = tf.get_variable("weight", [], initializer=tf.zeros_initializer())
train = tf.train.GradientDescentOptimizer(0.1).minimize(tf.square(weight - 1.0))


def work(session: tf.Session) -> None:
    for _ in range(5):
        session.run(train)


with tf.Session() as session:
    session.run(tf.global_variables_initializer())
    thread = threading.Thread(target=work, args=[session])
    thread.start()
    thread.join()
    print("weight", session.run(weight))
