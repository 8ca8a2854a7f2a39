"""Records learning curves of small models that no policy was designed on.

    python -m benchmarks.search.record_curves SET FILE.csv.gz

A trial's number seeds its parameters. Seconds are CPU time, on one thread.
"""

from __future__ import annotations

import csv
import gzip
import math
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from sklearn.datasets import load_breast_cancer, load_diabetes, load_digits, load_sample_image
from sklearn.ensemble import GradientBoostingClassifier
from sklearn.metrics import log_loss
from sklearn.model_selection import train_test_split
from sklearn.neural_network import MLPClassifier, MLPRegressor
from threadpoolctl import threadpool_limits

TRIALS = 64
EPOCHS = 60
CUTS = {"none": (), "one": (0.6,), "two": (0.4, 0.75)}
"""Progress at which the learning rate is divided by ten."""
PIXELS = 5000
TREES = 5
"""Trees of an epoch of `boosting`."""

Row = tuple[int, float, float, float]
"""Epoch, seconds, training loss, validation loss."""
Data = tuple[Any, Any, Any, Any]


def digits() -> Data:
    """Handwritten digits of scikit-learn."""
    images, labels = load_digits(return_X_y=True)
    return tuple(train_test_split(images / 16, labels, test_size=0.4, random_state=0))


def photo() -> Data:
    """A pixel's colour in scikit-learn's photo of a flower, from sines of its position."""
    image = load_sample_image("flower.jpg")[::4, ::4] / 255
    rows, columns = np.mgrid[0 : image.shape[0], 0 : image.shape[1]]
    places = np.stack([rows.ravel() / image.shape[0], columns.ravel() / image.shape[1]], axis=1)
    waves = places @ np.random.default_rng(0).normal(0.0, 4.0, (2, 24)) * 2 * math.pi
    inputs = np.concatenate([np.sin(waves), np.cos(waves)], axis=1)
    chosen = np.random.default_rng(1).permutation(len(inputs))[: 2 * PIXELS]
    colours = image.reshape(-1, 3)[chosen]
    return inputs[chosen][:PIXELS], inputs[chosen][PIXELS:], colours[:PIXELS], colours[PIXELS:]


def diabetes() -> Data:
    """Progression of a disease after a year, from ten measurements."""
    inputs, wanted = load_diabetes(return_X_y=True)
    split = train_test_split(inputs * 20, wanted / 100, test_size=0.4, random_state=0)
    return tuple(split)


def cancer() -> Data:
    """Whether a tumour is malignant, from thirty measurements."""
    inputs, wanted = load_breast_cancer(return_X_y=True)
    return tuple(train_test_split(inputs, wanted, test_size=0.5, random_state=0))


def draw_parameters(number: int) -> dict[str, Any]:
    rng = np.random.default_rng(number)
    return {
        "solver": str(rng.choice(["sgd", "adam"])),
        "lr": float(10 ** rng.uniform(-4.5, 0.0)),
        "momentum": float(rng.uniform(0.0, 0.98)),
        "batch": int(2 ** rng.integers(4, 9)),
        "width": int(2 ** rng.integers(3, 8)),
        "depth": int(rng.integers(1, 4)),
        "alpha": float(10 ** rng.uniform(-7, -1)),
        "cuts": str(rng.choice(list(CUTS))),
    }


def train(model: Any, data: Data, parameters: dict[str, Any]) -> Iterator[Row]:
    train_inputs, test_inputs, train_wanted, test_wanted = data
    classes = {"classes": np.unique(train_wanted)} if model is MLPClassifier else {}
    network = model(
        activation=parameters.get("activation", "relu"),
        hidden_layer_sizes=(parameters["width"],) * parameters["depth"],
        solver=parameters["solver"],
        alpha=parameters["alpha"],
        batch_size=parameters["batch"],
        learning_rate_init=parameters["lr"],
        momentum=parameters["momentum"],
        random_state=0,
    )

    def loss(inputs: Any, wanted: Any) -> float:
        if classes:
            return float(log_loss(wanted, network.predict_proba(inputs), labels=network.classes_))
        return float(np.mean((network.predict(inputs) - wanted) ** 2))

    seconds = 0.0
    for epoch in range(1, EPOCHS + 1):
        began_s = time.process_time()
        network.partial_fit(train_inputs, train_wanted, **classes)
        seconds += time.process_time() - began_s
        if epoch in [round(cut * EPOCHS) for cut in CUTS[parameters["cuts"]]]:
            network._optimizer.learning_rate_init /= 10
            network._optimizer.learning_rate /= 10
        yield epoch, seconds, loss(train_inputs, train_wanted), loss(test_inputs, test_wanted)


def draw_with_activation(number: int) -> dict[str, Any]:
    activations = ["relu", "tanh", "logistic"]
    return draw_parameters(number) | {"activation": activations[int(np.random.default_rng([number, 1]).integers(3))]}


def draw_boosting(number: int) -> dict[str, Any]:
    rng = np.random.default_rng(number)
    return {
        "lr": float(10 ** rng.uniform(-3.0, 0.5)),
        "depth": int(rng.integers(1, 7)),
        "subsample": float(rng.uniform(0.2, 1.0)),
        "features": float(rng.uniform(0.05, 1.0)),
        "leaf": int(2 ** rng.integers(0, 6)),
    }


def boost(data: Data, parameters: dict[str, Any]) -> Iterator[Row]:
    train_inputs, test_inputs, train_wanted, test_wanted = data
    trees = GradientBoostingClassifier(
        n_estimators=0,
        warm_start=True,
        learning_rate=parameters["lr"],
        max_depth=parameters["depth"],
        subsample=parameters["subsample"],
        max_features=parameters["features"],
        min_samples_leaf=parameters["leaf"],
        random_state=0,
    )
    seconds = 0.0
    for epoch in range(1, EPOCHS + 1):
        trees.n_estimators += TREES
        began_s = time.process_time()
        trees.fit(train_inputs, train_wanted)
        seconds += time.process_time() - began_s
        ours, theirs = trees.predict_proba(train_inputs), trees.predict_proba(test_inputs)
        yield epoch, seconds, float(log_loss(train_wanted, ours)), float(log_loss(test_wanted, theirs))


Draw = Callable[[int], dict[str, Any]]
Train = Callable[[Data, dict[str, Any]], Iterator[Row]]
SETS: dict[str, tuple[Callable[[], Data], Draw, Train]] = {
    "digits": (digits, draw_parameters, partial(train, MLPClassifier)),
    "photo": (photo, draw_parameters, partial(train, MLPRegressor)),
    "diabetes": (diabetes, draw_with_activation, partial(train, MLPRegressor)),
    "boosting": (cancer, draw_boosting, boost),
}


def main() -> None:
    name, path = sys.argv[1], Path(sys.argv[2])
    load, draw, run = SETS[name]
    data = load()
    warnings.simplefilter("ignore")
    with threadpool_limits(1), gzip.open(path, "wt", encoding="utf-8", newline="") as file:
        columns = ["trial", "step", "seconds", "train_loss", "validation_loss", *draw(0)]
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(columns)
        for number in range(TRIALS):
            parameters = draw(number)
            shown = [f"{value:.4g}" if isinstance(value, float) else value for value in parameters.values()]
            epoch, seconds = 0, 0.01
            try:
                for epoch, seconds, *losses in run(data, parameters):
                    writer.writerow([number, epoch, f"{seconds:.4f}", *(f"{loss:.6g}" for loss in losses), *shown])
            except ValueError as error:
                if not any(word in str(error) for word in ("finite", "NaN", "infinity")):
                    raise
                # scikit-learn refuses weights that are not finite: the trial diverged.
                writer.writerow([number, epoch + 1, f"{seconds * 1.02:.4f}", "nan", "nan", *shown])
            print(number, parameters, flush=True)


if __name__ == "__main__":
    main()
