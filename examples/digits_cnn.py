"""Trains a small CNN on scikit-learn's handwritten digits with Keras.

    python examples/digits_cnn.py         trains here, as with plain TensorFlow
    dike run examples/digits_cnn.py       trains on a Mesos cluster, in as many processes as are fastest

The only line that is not ordinary TensorFlow is the first import.
"""

import argparse

import numpy as np
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import dike as tf


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lr", type=float, default=0.01, help="learning rate")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--optimizer", choices=["adam", "sgd"], default="adam")
    return parser.parse_args()


def build_model() -> tf.keras.Model:
    layers = tf.keras.layers
    return tf.keras.Sequential(
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


def main() -> None:
    arguments = parse_arguments()
    tf.keras.utils.set_random_seed(7)
    digits = load_digits()
    images = (digits.images / 16.0).astype(np.float32)[..., np.newaxis]
    train_x, test_x, train_y, test_y = train_test_split(
        images, digits.target, test_size=0.2, random_state=7, stratify=digits.target
    )

    model = build_model()
    if arguments.optimizer == "adam":
        optimizer = tf.keras.optimizers.Adam(arguments.lr)
    else:
        optimizer = tf.keras.optimizers.SGD(arguments.lr, momentum=0.9)
    model.compile(
        optimizer=optimizer,
        loss=tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    model.fit(
        train_x,
        train_y,
        batch_size=arguments.batch_size,
        epochs=arguments.epochs,
        validation_data=(test_x, test_y),
        verbose=2,
    )
    _, accuracy = model.evaluate(test_x, test_y, verbose=0)
    print(f"test accuracy: {accuracy:.4f}")


if __name__ == "__main__":
    main()
