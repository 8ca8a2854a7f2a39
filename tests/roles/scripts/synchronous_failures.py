"""Trains a model whose batches several workers cannot share, or fails in another way. Prints its history."""

import json
import os
import sys

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

KIND = sys.argv[1]
INDEX = json.loads(os.environ["DIKE_TASK"])["index"] if "DIKE_TASK" in os.environ else 0
keras.utils.set_random_seed(3)
rng = np.random.default_rng(0)
X = rng.normal(size=(64, 12)).astype("float32")
Y = (X @ rng.normal(size=12) > 0).astype("float32")[:, None]


class Moving(layers.Layer):
    def build(self, shape):
        self.mean = self.add_weight(shape=(shape[-1],), trainable=False, initializer="zeros")

    def call(self, x):
        self.mean.assign(0.9 * self.mean + 0.1 * ops.mean(x, axis=0))
        return x - self.mean


class Summed(layers.Layer):
    def call(self, x):
        self.add_loss(ops.sum(ops.square(x)))
        return x


class Clipping(keras.Model):
    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = ops.mean(ops.square(self(x) - y))
        gradients, _ = tf.clip_by_global_norm(tape.gradient(loss, self.trainable_variables), 0.01)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        return {"loss": loss}


def dice_loss(true, predicted):
    return 1 - (2 * ops.sum(true * predicted) + 1) / (ops.sum(true) + ops.sum(predicted) + 1)


class Slow(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs):
        print("BATCH", batch, flush=True)
        if KIND == "dies" and INDEX == 1:
            os._exit(9)


inputs = keras.Input((12,))
hidden = layers.Dense(8)(inputs)
if KIND in ("moving", "summed"):
    hidden = {"moving": Moving, "summed": Summed}[KIND]()(hidden)
make = Clipping if KIND == "clipping" else keras.Model
model = make(inputs, layers.Dense(1, activation="sigmoid")(hidden))
if KIND == "data":
    X = X[np.random.default_rng(os.getpid()).permutation(64)]
if KIND == "batches" and INDEX == 1:
    X, Y = X[:48], Y[:48]
if KIND == "fails" and INDEX == 1:
    raise RuntimeError("the error of worker 1")
model.compile("adam", dice_loss if KIND == "dice" else "mse")
epochs = 6 if KIND == "long" else 2
history = model.fit(X, Y, epochs=epochs, batch_size=8, shuffle=KIND != "batches", verbose=0, callbacks=[Slow()])
print("RESULT", json.dumps(history.history), flush=True)
