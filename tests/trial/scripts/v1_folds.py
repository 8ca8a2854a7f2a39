"""Two folds, a graph and a plain session each; two optimizers take turns, called by callables of the session."""

import tensorflow.compat.v1 as tf

tf.disable_eager_execution()
for fold in range(2):
    with tf.Graph().as_default():
        value = tf.placeholder(tf.float32, [])
        weight = tf.get_variable("weight", [], initializer=tf.constant_initializer(float(fold)))
        loss = tf.square(weight - value)
        step = tf.train.create_global_step()
        first = tf.train.AdamOptimizer(0.1).minimize(loss)
        second = tf.train.GradientDescentOptimizer(0.1).minimize(loss, global_step=step)
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            take_first = session.make_callable([first, loss], [value])
            take_second = session.make_callable([second, loss], [value])
            for number in range(6):
                (take_first if number % 2 == 0 else take_second)(number % 3)
            print(f"fold {fold}: {float(session.run(weight)).hex()}")
