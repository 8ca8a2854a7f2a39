"""A trial with Keras: dropout, Adam, shuffled arrays. Says at every step which process it is, and the loss."""

import argparse
import os
import time
from pathlib import Path

import keras
import numpy as np

EPOCHS = 1_000_000

parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float, required=True)
parser.add_argument("--steps", type=int, required=True)
parser.add_argument("--pause", type=float, default=0.0)
parser.add_argument("--diary", type=Path, required=True)
arguments = parser.parse_args()
end = arguments.diary.parent / f"end-{arguments.lr}"


class Diary(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        step = int(self.model.optimizer.iterations)
        with arguments.diary.open("a") as file:
            file.write(f"\n{arguments.lr} {os.getpid()} {step} {float(logs['loss']).hex()} .\n")
        time.sleep(arguments.pause)
        self.model.stop_training = step >= arguments.steps or end.exists()


keras.utils.set_random_seed(1)
rng = np.random.default_rng(2)
x = rng.normal(size=(256, 8)).astype(np.float32)
y = x @ rng.normal(size=(8, 1)).astype(np.float32)
model = keras.Sequential(
    [
        keras.layers.Input((8,)),
        keras.layers.Dense(16, activation="relu"),
        keras.layers.Dropout(0.2),
        keras.layers.Dense(1),
    ]
)
model.compile(keras.optimizers.Adam(arguments.lr), "mse")
model.fit(x, y, batch_size=32, epochs=EPOCHS, verbose=0, callbacks=[Diary()])
