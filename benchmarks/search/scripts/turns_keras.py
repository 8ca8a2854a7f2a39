"""Trains the CNN of `examples/digits_cnn.py` with Keras on random images, in turns (see `turns`)."""

from __future__ import annotations

import argparse
from typing import Any

import keras
import numpy as np
from turns import Turns

BATCH_SIZE = 64
EPOCHS = 1_000_000


class TakeTurns(keras.callbacks.Callback):
    def __init__(self, epochs: int) -> None:
        super().__init__()
        self._epochs = epochs
        self._turns = Turns()

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        if epoch % self._epochs == 0:
            self._turns.next()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epoch-steps", type=int, required=True)
    parser.add_argument("--turn-steps", type=int, required=True)
    arguments = parser.parse_args()
    keras.utils.set_random_seed(7)
    random = np.random.default_rng(7)
    count = BATCH_SIZE * arguments.epoch_steps
    images = random.random((count, 8, 8, 1), dtype=np.float32)
    labels = random.integers(0, 10, count)
    layers = keras.layers
    model = keras.Sequential(
        [
            layers.Input((8, 8, 1)),
            layers.Conv2D(16, 3, padding="same", activation="relu"),
            layers.Conv2D(32, 3, padding="same", activation="relu"),
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.Dropout(0.25),
            layers.Dense(64, activation="relu"),
            layers.Dense(10),
        ]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer=keras.optimizers.Adam(0.001), loss=loss, metrics=["accuracy"])
    turns = TakeTurns(arguments.turn_steps // arguments.epoch_steps)
    model.fit(images, labels, batch_size=BATCH_SIZE, epochs=EPOCHS, verbose=0, callbacks=[turns])


if __name__ == "__main__":
    main()
