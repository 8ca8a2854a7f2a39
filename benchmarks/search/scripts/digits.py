"""A trial of the measured searches: the CNN of `examples/digits_cnn.py`, with a log of its epochs.

It is an ordinary Keras script. Dike runs it unchanged; Ray Tune and Optuna call `train`.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import keras
import numpy as np
from epoch_log import EpochLog, OnEpoch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

SEED = 7


def train(
    lr: float,
    optimizer: str,
    batch_size: int,
    *,
    epochs: int,
    logs: Path,
    on_epoch: OnEpoch | None = None,
    saved: Path | None = None,
    initial_epoch: int = 0,
) -> None:
    """Trains one configuration up to `epochs`, from scratch or from the model `saved` after `initial_epoch`."""
    keras.utils.set_random_seed(SEED)
    train_x, test_x, train_y, test_y = load_split()
    model = build(lr, optimizer) if saved is None else keras.saving.load_model(saved)
    configuration = {"lr": lr, "optimizer": optimizer, "batch_size": batch_size}
    model.fit(
        train_x,
        train_y,
        batch_size=batch_size,
        epochs=epochs,
        initial_epoch=initial_epoch,
        validation_data=(test_x, test_y),
        verbose=0,
        callbacks=[EpochLog(logs, configuration, on_epoch, initial_epoch)],
    )


def load_split() -> list[np.ndarray]:
    """Loads images and digits: those to train with, images x 8 x 8 x 1, those to test with, and the digits of both."""
    digits = load_digits()
    images = (digits.images / 16.0).astype(np.float32)[..., np.newaxis]
    split: list[np.ndarray] = train_test_split(
        images, digits.target, test_size=0.2, random_state=SEED, stratify=digits.target
    )
    return split


def build(lr: float, optimizer: str) -> keras.Model:
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
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description="Trains a small CNN on scikit-learn's handwritten digits.")
    parser.add_argument("--lr", type=float, required=True)
    parser.add_argument("--optimizer", choices=("adam", "sgd"), required=True)
    parser.add_argument("--batch-size", type=int, required=True)
    parser.add_argument("--epochs", type=int, required=True)
    parser.add_argument("--logs", type=Path, required=True)
    train(**vars(parser.parse_args()))


if __name__ == "__main__":
    main()
