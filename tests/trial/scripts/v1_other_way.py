"""Does something else when it is run for the second time."""

import os

import tensorflow.compat.v1 as tf

tf.disable_eager_execution()
weight = tf.get_variable("weight", [], initializer=tf.zeros_initializer())
train = tf.train.GradientDescentOptimizer(0.1).minimize(tf.square(weight - 1.0))
again = os.path.exists("been-here")
open("been-here", "w").close()
session = tf.InteractiveSession()  # left open
session.run(tf.global_variables_initializer())
if again:
    session.run(weight)
for _ in range(5):
    session.run(train)
