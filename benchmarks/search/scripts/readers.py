"""A trial of the search on different slots: a NumPy network on scikit-learn's digits with slow input.

Reading a sample takes 50 microseconds, as from remote storage. A narrow network mostly waits for samples, a wide one
mostly computes.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from sklearn.datasets import load_digits

import dike

READ_S = 5e-5
"""Time to read a sample."""
SEED = 7
CLASSES = 10

Array = np.ndarray[Any, Any]


class Network:
    """Two hidden layers of rectified units, trained by gradient descent with momentum."""

    def __init__(self, inputs: int, width: int, lr: float) -> None:
        generator = np.random.default_rng(SEED)
        sizes = (inputs, width, width, CLASSES)
        self._lr = lr
        self.weights = [
            (generator.standard_normal(shape) * np.sqrt(2 / shape[0])).astype(np.float32)
            for shape in itertools.pairwise(sizes)
        ]
        self.velocities = [np.zeros_like(weights) for weights in self.weights]

    def train(self, samples: Array, labels: Array) -> float:
        """Makes one step; returns the mean cross-entropy before it."""
        layers = [samples]
        for weights in self.weights[:-1]:
            layers.append(np.maximum(layers[-1] @ weights, 0))
        logits = layers[-1] @ self.weights[-1]
        shifted = np.exp(logits - logits.max(axis=1, keepdims=True))
        shares = shifted / shifted.sum(axis=1, keepdims=True)
        rows = np.arange(len(labels))
        loss = float(-np.log(shares[rows, labels] + 1e-12).mean())
        delta = shares
        delta[rows, labels] -= 1
        delta /= len(labels)
        for number in reversed(range(len(self.weights))):
            gradient = layers[number].T @ delta
            delta = (delta @ self.weights[number].T) * (layers[number] > 0)
            self.velocities[number] = 0.9 * self.velocities[number] - self._lr * gradient
            self.weights[number] += self.velocities[number]
        return loss


def batches(
    samples: Array, labels: Array, size: int, from_step: int, epochs: int
) -> Iterator[tuple[int, Array, Array]]:
    """Yields step, samples and labels of the steps after `from_step`."""
    per_epoch = len(samples) // size
    for epoch in range(from_step // per_epoch, epochs):
        order = np.random.default_rng([SEED, epoch]).permutation(len(samples))
        for batch in range(per_epoch):
            step = epoch * per_epoch + batch + 1
            if step > from_step:
                chosen = order[batch * size : (batch + 1) * size]
                time.sleep(READ_S * size)
                yield step, samples[chosen], labels[chosen]


def main() -> None:
    parser = argparse.ArgumentParser(description="Trains a small network on scikit-learn's handwritten digits.")
    parser.add_argument("--lr", type=float, required=True)
    parser.add_argument("--width", type=int, required=True)
    parser.add_argument("--batch-size", type=int, required=True)
    parser.add_argument("--epochs", type=int, required=True)
    parser.add_argument("--logs", type=Path, required=True)
    arguments = parser.parse_args()
    # `CpuLimiter` finds the processes to limit here.
    (arguments.logs / f"{os.getpid()}.pid").touch()
    digits = load_digits()
    network = Network(digits.data.shape[1], arguments.width, arguments.lr)

    def save(folder: str) -> None:
        arrays = [*network.weights, *network.velocities]
        np.savez(Path(folder, "network.npz"), **{str(number): array for number, array in enumerate(arrays)})

    def restore(folder: str) -> None:
        with np.load(Path(folder, "network.npz")) as saved:
            arrays = [saved[str(number)] for number in range(len(saved.files))]
        network.weights, network.velocities = arrays[: len(arrays) // 2], arrays[len(arrays) // 2 :]

    name = f"lr={arguments.lr:g},width={arguments.width},batch_size={arguments.batch_size}"
    samples, labels = (digits.data / 16).astype(np.float32), digits.target
    start = dike.checkpoint(save, restore)
    with (arguments.logs / f"{name}.jsonl").open("a", encoding="utf-8", buffering=1) as epoch_log:
        for step, some, of_them in batches(samples, labels, arguments.batch_size, start, arguments.epochs):
            loss = network.train(some, of_them)
            epoch_log.write(json.dumps({"time": time.time(), "step": step, "loss": loss}) + "\n")
            dike.report(step, loss=loss)


if __name__ == "__main__":
    main()
