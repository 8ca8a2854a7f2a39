"""Trains two Keras models by hand and writes down every loss of the first."""

import keras
import numpy as np

one, two = (keras.Sequential([keras.layers.Dense(1)]) for _ in range(2))
for model in (one, two):
    model.compile("sgd", "mse", metrics=["mae"])
with open("expected.txt", "w", encoding="utf-8") as file:
    for step in range(1, 4):
        loss, _ = one.train_on_batch(np.ones((4, 2)), np.zeros(4))
        two.train_on_batch(np.ones((4, 2)), np.ones(4))
        file.write(f"{step} {float(loss).hex()}\n")
