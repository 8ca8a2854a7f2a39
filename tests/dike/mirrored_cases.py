"""Trains models on one device and, with the same data and seeds, on two that share each batch; prints both's losses."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers

from dike.exceptions import BadInputError
from dike.keras3 import mirrored

Floats = Any
X = np.random.default_rng(0).normal(size=(320, 8)).astype("f")
Y = X[:, :4].argmax(1).astype("i")
LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
ORDERED: dict[str, Any] = {"shuffle": False, "epochs": 2, "verbose": 0}


def _model(optimizer: Any = "adam", *middle: Any) -> Any:
    model = keras.Sequential([layers.Dense(16, "relu"), *middle, layers.Dense(4)])
    model.compile(optimizer, LOSS, metrics=["accuracy"])
    return model


def _batches() -> Any:
    for start in list(range(0, 320, 32)) * 2:
        yield X[start : start + 32], Y[start : start + 32]


class _Batches(keras.utils.PyDataset):  # type: ignore[misc]
    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> Any:
        return X[index * 32 :][:32], Y[index * 32 :][:32]


def _two_inputs() -> Floats:
    first, second = keras.Input((4,), name="first"), keras.Input((4,), name="second")
    outputs = [layers.Dense(4)(layers.Concatenate()([first, second])), layers.Dense(1)(first)]
    model = keras.Model({"first": first, "second": second}, outputs)
    model.compile("sgd", [LOSS, "mse"])
    return model.fit({"first": X[:, :4], "second": X[:, 4:]}, [Y, X[:, 0]], **ORDERED).history["loss"]


def _saved() -> Floats:
    model = _model()
    kept = keras.callbacks.ModelCheckpoint("best.keras", monitor="loss", save_best_only=True)
    model.fit(X, Y, callbacks=[kept], **ORDERED)
    model.save("model.keras")
    loaded = keras.models.load_model("model.keras")
    return [*loaded.evaluate(X, Y, verbose=0), *loaded.fit(X, Y, **ORDERED).history["loss"]]


def _validated() -> Floats:
    stop = keras.callbacks.EarlyStopping(patience=1)
    return _model().fit(X, Y, validation_data=(X[:99], Y[:99]), callbacks=[stop], **ORDERED).history["val_loss"]


def _weighted() -> Floats:
    weights = np.linspace(0.5, 1.5, 320).astype("f")
    return _model().fit(X, Y, sample_weight=weights, **ORDERED).history["loss"]


def _of_a_data_set() -> Floats:
    data = tf.data.Dataset.from_tensor_slices((X, Y)).shuffle(320, seed=1).batch(40)
    return _model().fit(data, epochs=2, verbose=0).history["loss"]


def _adapted() -> Floats:
    scaled = layers.Normalization()
    scaled.adapt(X)
    model = keras.Sequential([scaled, layers.Dense(4)])
    model.compile("sgd", LOSS)
    return [*model.fit(X, Y, **ORDERED).history["loss"], *model.predict(X[:33], verbose=0).ravel()]


CASES: dict[str, Callable[[], Floats]] = {
    "arrays": lambda: _model().fit(X, Y, **ORDERED).history["loss"],
    "shuffled": lambda: _model().fit(X, Y, epochs=2, verbose=0).history["loss"],
    "generator": lambda: _model().fit(_batches(), steps_per_epoch=10, **ORDERED).history["loss"],
    "py_dataset": lambda: _model().fit(_Batches(), **ORDERED).history["loss"],
    "data_set": _of_a_data_set,
    "validated": _validated,
    "weighted": _weighted,
    "two_inputs": _two_inputs,
    "adapted": _adapted,
    "saved": _saved,
    "decay": lambda: (
        _model(keras.optimizers.AdamW(0.01, clipnorm=1.0, use_ema=True)).fit(X, Y, **ORDERED).history["loss"]
    ),
    "layer_norm": lambda: _model("sgd", layers.LayerNormalization()).fit(X, Y, **ORDERED).history["loss"],
    "lstm": lambda: _model("sgd", layers.Reshape((4, 4)), layers.LSTM(8)).fit(X, Y, **ORDERED).history["loss"],
}


class _OwnStep(keras.Sequential):  # type: ignore[misc]
    def train_step(self, data: Any) -> Any:
        return super().train_step(data)


def _refused() -> str:
    model = _OwnStep([layers.Dense(4)])
    model.compile("sgd", LOSS)
    try:
        mirrored.shares(model)
    except BadInputError as error:
        return str(error)
    return ""


def _run() -> dict[str, list[float]]:
    done = {}
    for name, case in CASES.items():
        keras.backend.clear_session()
        keras.utils.set_random_seed(3)
        done[name] = [float(value) for value in case()]
    return done


def main() -> None:
    """Prints the losses of each case on one device and on two, and the sentence for what cannot be shared."""
    (processor,) = tf.config.list_physical_devices("CPU")
    tf.config.set_logical_device_configuration(processor, [tf.config.LogicalDeviceConfiguration()] * 2)
    alone = _run()
    mirrored.install(2)
    both = _run()
    replicas = _model()._distribute_strategy.num_replicas_in_sync
    print(json.dumps({"alone": alone, "both": both, "replicas": replicas, "refused": _refused()}))


if __name__ == "__main__":
    sys.exit(main())
