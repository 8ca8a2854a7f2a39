"""Trains with tf_keras and writes down every loss."""

import numpy as np
import tf_keras


class Recorder(tf_keras.callbacks.Callback):
    step = 0

    def on_train_batch_end(self, batch, logs=None):
        self.step += 1
        with open("expected.txt", "a", encoding="utf-8") as file:
            file.write(f"{self.step} {float(logs['loss']).hex()}\n")


model = tf_keras.Sequential([tf_keras.layers.Dense(1)])
model.compile("sgd", "mse")
model.fit(np.ones((16, 2)), np.zeros(16), batch_size=4, epochs=2, verbose=0, callbacks=[Recorder()])
