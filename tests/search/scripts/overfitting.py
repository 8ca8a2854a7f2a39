"""Searches for a learning rate of a model that soon knows its few samples by heart: its best epoch is not its last."""

import warnings

import keras
import numpy as np

import dike

data = np.random.default_rng(0)
train_x, test_x = (data.normal(size=(count, 20)).astype("float32") for count in (60, 200))
train_y = (train_x[:, 0] + data.normal(size=60) > 0).astype("float32")
test_y = (test_x[:, 0] > 0).astype("float32")


@keras.saving.register_keras_serializable("tests")
class Scaled(keras.layers.Layer):
    """A layer that only this script defines."""

    def build(self, shape):
        self.scale = self.add_weight(shape=(shape[-1],), initializer="ones")

    def call(self, inputs):
        return inputs * self.scale


def made(rate):
    model = keras.Sequential([keras.Input((20,)), Scaled(), keras.layers.Dense(64, "relu"), keras.layers.Dense(1)])
    loss = keras.losses.BinaryCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(rate), loss)
    return model


def train(rate):
    keras.utils.set_random_seed(1)
    model = made(rate)
    model.fit(train_x, train_y, epochs=12, batch_size=10, validation_data=(test_x, test_y), verbose=0)


if __name__ == "__main__":
    found = dike.tune(train, {"rate": [0.02]}, metric="val_loss", name="overfitting", slot_mem=1024)
    best = found.best
    with warnings.catch_warnings(action="error"):
        loaded = best.load_into(made(0.1))
    best.export("last.keras", epoch="last")
    last = keras.models.load_model("last.keras")
    losses = [model.evaluate(test_x, test_y, batch_size=10, verbose=0) for model in (loaded, last)]
    print("FOUND", best.step, best.best_step, best.best_value, best.value, *losses)
