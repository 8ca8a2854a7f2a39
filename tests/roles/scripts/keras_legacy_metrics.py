"""What the `fit` of tf_keras reports of a model with a training step of its own, on a cluster and by Python alone."""

import json
import os

os.environ["TF_USE_LEGACY_KERAS"] = "1"

import data
import numpy as np
import tensorflow as tf

keras = tf.keras
inputs, labels = data.halves(330)


class Follows(keras.Model):
    """Returns what it makes of its metrics under names of its own, and other things besides."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(1, activation="sigmoid")
        self.total_loss_tracker = keras.metrics.Mean(name="total_loss")
        self.auc = keras.metrics.AUC(name="auc")
        self.seen = keras.metrics.Sum(name="seen")

    @property
    def metrics(self):
        return [self.total_loss_tracker, self.auc, self.seen]

    def call(self, x):
        return self.dense(x)

    def train_step(self, batch):
        x, y = batch
        with tf.GradientTape() as tape:
            predicted = self(x, training=True)
            loss = tf.reduce_mean(keras.losses.binary_crossentropy(y, predicted))
        self.optimizer.minimize(loss, self.trainable_variables, tape=tape)
        self.total_loss_tracker.update_state(loss)
        self.auc.update_state(y, predicted)
        self.seen.update_state(tf.cast(tf.shape(x)[0], tf.float32))
        return {
            "loss": self.total_loss_tracker.result(),
            "train_auc": self.auc.result(),
            "n_seen": self.seen.result(),
            "ratio": self.seen.result() / (self.auc.result() + 1.0),
            "batch_loss": loss,
        }

    def test_step(self, batch):
        x, y = batch
        self.auc.update_state(y, self(x, training=False))
        return {"twice": 2.0 * self.auc.result()}


def fit(count, rate, **settings):
    keras.utils.set_random_seed(5)
    model = Follows()
    model.compile(keras.optimizers.Adam(rate), **settings)
    history = model.fit(
        inputs[:count],
        labels[:count],
        batch_size=32,
        epochs=3,
        shuffle=False,
        verbose=2,
        validation_data=(inputs, labels),
    )
    return {name: [np.asarray(value).tolist() for value in values] for name, values in history.history.items()}


result = {"odd": fit(330, 0.01), "even": fit(320, 0.01), "several": fit(330, 0.01, steps_per_execution=4)}
print("RESULT", json.dumps(result), flush=True)
