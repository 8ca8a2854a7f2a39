"""A model whose learning rate is varied while it trains; prints the rates and the weight of each epoch."""

from __future__ import annotations

import argparse
import time

import keras
import numpy as np

parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float, required=True)
parser.add_argument("--epochs", type=int, default=40)
options = parser.parse_args()


class Rate(keras.callbacks.Callback):
    def on_epoch_end(self, epoch: int, logs: dict[str, float] | None = None) -> None:
        rate = float(self.model.optimizer.learning_rate)
        print(f"given {options.lr:.6g} used {rate:.6g} weight {float(self.model.kernel[0, 0]):.6g}", flush=True)
        time.sleep(0.05)


class Model(keras.Model):
    """Starts at 1 and goes to 0, by the learning rate."""

    def build(self, shape: tuple[int, ...]) -> None:
        self.kernel = self.add_weight(shape=(1, 1), initializer="ones", name="kernel")

    def call(self, inputs: object) -> object:
        return inputs @ self.kernel


model = Model()
model.compile(keras.optimizers.Adam(options.lr), "mse")
data = np.ones((8, 1), "float32")
model.fit(data, 0 * data, batch_size=4, epochs=options.epochs, verbose=0, callbacks=[Rate()])
