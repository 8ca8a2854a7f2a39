"""A trial of the measured searches: the CNN of `examples/digits_cnn.py`, with a diary of its epochs.

It is an ordinary Keras script. Dike runs it as it is; Ray Tune and Optuna call `train`.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

SEED = 7


class Diary(keras.callbacks.Callback):
    """Writes a line at the beginning and at the end of each epoch: the time, the epochs done, and the loss.

    Args:
        path: file to append to.
        tell: is told the same at the end of each epoch, and may raise an exception to stop the training.
    """

    def __init__(self, path: Path, tell: Callable[[int, float], object] | None) -> None:
        super().__init__()
        self._path = path
        self._tell = tell

    def on_train_begin(self, logs: Any = None) -> None:
        self._write({"epochs": 0})

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        loss = float(logs["loss"])
        self._write({"epochs": epoch + 1, "loss": loss})
        if self._tell is not None:
            self._tell(epoch + 1, loss)

    def _write(self, line: dict[str, float]) -> None:
        with self._path.open("a", encoding="utf-8") as diary:
            diary.write(json.dumps({"time": time.time(), **line}) + "\n")


def train(
    lr: float,
    optimizer: str,
    batch_size: int,
    epochs: int,
    diaries: Path,
    tell: Callable[[int, float], object] | None = None,
) -> None:
    """Trains one configuration.

    Args:
        lr: learning rate.
        optimizer: `adam` or `sgd`.
        batch_size: images in a batch.
        epochs: epochs to train.
        diaries: folder for the diary, whose name says the configuration.
        tell: see `Diary`.
    """
    keras.utils.set_random_seed(SEED)
    digits = load_digits()
    images = (digits.images / 16.0).astype(np.float32)[..., np.newaxis]
    train_x, test_x, train_y, test_y = train_test_split(
        images, digits.target, test_size=0.2, random_state=SEED, stratify=digits.target
    )
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
    chosen = keras.optimizers.Adam(lr) if optimizer == "adam" else keras.optimizers.SGD(lr, momentum=0.9)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer=chosen, loss=loss, metrics=["accuracy"])
    model.fit(
        train_x,
        train_y,
        batch_size=batch_size,
        epochs=epochs,
        validation_data=(test_x, test_y),
        verbose=0,
        callbacks=[Diary(diaries / f"lr={lr:g},optimizer={optimizer},batch_size={batch_size}.jsonl", tell)],
    )


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description="Trains a small CNN on scikit-learn's handwritten digits.")
    parser.add_argument("--lr", type=float, required=True)
    parser.add_argument("--optimizer", choices=("adam", "sgd"), required=True)
    parser.add_argument("--batch-size", type=int, required=True)
    parser.add_argument("--epochs", type=int, required=True)
    parser.add_argument("--diaries", type=Path, required=True)
    train(**vars(parser.parse_args()))


if __name__ == "__main__":
    main()
