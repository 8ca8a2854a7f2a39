"""A trial of the measured population: the CNN of `digits.py` with one parameter, the learning rate, which may change.

It is an ordinary Keras script. Dike runs it unchanged; Ray Tune calls `train`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import keras
from digits import SEED, build, load_split

BATCH_SIZE = 16


def train(
    lr: float,
    *,
    epochs: int,
    on_epoch: Callable[[int, float, keras.Model], object] | None = None,
    saved: Path | None = None,
    initial_epoch: int = 0,
) -> None:
    """Trains up to `epochs`, from scratch or from the model `saved` after `initial_epoch`.

    `on_epoch` gets the number of epochs, the validation loss and the model.
    """
    keras.utils.set_random_seed(SEED)
    train_x, test_x, train_y, test_y = load_split()
    model = build(lr, "sgd") if saved is None else keras.saving.load_model(saved)
    model.optimizer.learning_rate = lr
    callbacks = []
    if on_epoch is not None:
        callbacks.append(
            keras.callbacks.LambdaCallback(
                on_epoch_end=lambda epoch, logs: on_epoch(epoch + 1, float(logs["val_loss"]), model)
            )
        )
    model.fit(
        train_x,
        train_y,
        batch_size=BATCH_SIZE,
        epochs=epochs,
        initial_epoch=initial_epoch,
        validation_data=(test_x, test_y),
        verbose=0,
        callbacks=callbacks,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Trains a small CNN on scikit-learn's handwritten digits.")
    parser.add_argument("--lr", type=float, required=True)
    parser.add_argument("--epochs", type=int, required=True)
    train(**vars(parser.parse_args()))


if __name__ == "__main__":
    main()
