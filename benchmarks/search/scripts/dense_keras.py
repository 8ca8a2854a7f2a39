"""Trains a Keras model of 25 million parameters, 100 MB, until it is killed."""

from __future__ import annotations

import keras
import numpy as np

WIDTH = 5000
BATCH_SIZE = 8


def main() -> None:
    keras.utils.set_random_seed(7)
    random = np.random.default_rng(7)
    inputs = random.random((32 * BATCH_SIZE, WIDTH), dtype=np.float32)
    layers = keras.layers
    model = keras.Sequential([layers.Input((WIDTH,)), layers.Dense(WIDTH, activation="relu"), layers.Dense(1)])
    model.compile(optimizer=keras.optimizers.SGD(1e-5), loss="mse")
    model.fit(inputs, inputs.mean(1), batch_size=BATCH_SIZE, epochs=1_000_000, verbose=0)


if __name__ == "__main__":
    main()
