"""A trial of the measured searches: a neural language model of characters (Bengio et al., 2003), with a log.

It predicts the next character of Python's language reference, which comes with Python.

It is an ordinary Keras script. Dike runs it unchanged; Ray Tune and Optuna call `train`.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from pydoc_data.topics import topics

import keras
import numpy as np
from epoch_log import EpochLog, OnEpoch

SEED = 7
TRAIN_CHARACTERS = 8_000
TEST_CHARACTERS = 2_000


def train(
    lr: float,
    context: int,
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
    text = "".join(topics[name] for name in sorted(topics))[: context + TRAIN_CHARACTERS + TEST_CHARACTERS]
    characters, numbers = np.unique(list(text), return_inverse=True)
    before = np.lib.stride_tricks.sliding_window_view(numbers[:-1], context)
    after = numbers[context:]
    model = _build(lr, context, len(characters)) if saved is None else keras.saving.load_model(saved)
    configuration = {"lr": lr, "context": context, "batch_size": batch_size}
    model.fit(
        before[:TRAIN_CHARACTERS],
        after[:TRAIN_CHARACTERS],
        batch_size=batch_size,
        epochs=epochs,
        initial_epoch=initial_epoch,
        validation_data=(before[TRAIN_CHARACTERS:], after[TRAIN_CHARACTERS:]),
        verbose=0,
        callbacks=[EpochLog(logs, configuration, on_epoch, initial_epoch)],
    )


def _build(lr: float, context: int, characters: int) -> keras.Model:
    layers = keras.layers
    model = keras.Sequential(
        [
            layers.Input((context,), dtype="int32"),
            layers.Embedding(characters, 16),
            layers.Flatten(),
            layers.Dense(128, activation="tanh"),
            layers.Dropout(0.1),
            layers.Dense(characters),
        ]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer=keras.optimizers.Adam(lr), loss=loss, metrics=["accuracy"])
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description="Trains a small language model on Python's language reference.")
    parser.add_argument("--lr", type=float, required=True)
    parser.add_argument("--context", type=int, required=True)
    parser.add_argument("--batch-size", type=int, required=True)
    parser.add_argument("--epochs", type=int, required=True)
    parser.add_argument("--logs", type=Path, required=True)
    train(**vars(parser.parse_args()))


if __name__ == "__main__":
    main()
