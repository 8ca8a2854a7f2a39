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
from keras.src.losses import loss as losses

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


class Batches(keras.utils.PyDataset):  # type: ignore[misc]
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


def _read_by_a_callback() -> Floats:
    rate = Rate()
    rate.seen = []
    _model().fit(X, Y, callbacks=[rate], **ORDERED)
    return rate.seen


CASES: dict[str, Callable[[], Floats]] = {
    "arrays": lambda: _model().fit(X, Y, **ORDERED).history["loss"],
    "shuffled": lambda: _model().fit(X, Y, epochs=2, verbose=0).history["loss"],
    "generator": lambda: _model().fit(_batches(), steps_per_epoch=10, **ORDERED).history["loss"],
    "py_dataset": lambda: _model().fit(Batches(), **ORDERED).history["loss"],
    "data_set": _of_a_data_set,
    "validated": _validated,
    "weighted": _weighted,
    "two_inputs": _two_inputs,
    "adapted": _adapted,
    "saved": _saved,
    "jit_compile": lambda: _compiled(jit_compile=True).fit(X, Y, **ORDERED).history["loss"],
    "activity": lambda: _compiled(layers.Dense(8, activity_regularizer="l2")).fit(X, Y, **ORDERED).history["loss"],
    "of_one_size": lambda: _compiled(keras.Input((8,), batch_size=32)).fit(X, Y, **ORDERED).history["loss"],
    "read_by_a_callback": _read_by_a_callback,
    "decay": lambda: _model(keras.optimizers.AdamW(0.01, use_ema=True)).fit(X, Y, **ORDERED).history["loss"],
    "layer_norm": lambda: _model("sgd", layers.LayerNormalization()).fit(X, Y, **ORDERED).history["loss"],
    "lstm": lambda: _model("sgd", layers.Reshape((4, 4)), layers.LSTM(8)).fit(X, Y, **ORDERED).history["loss"],
}


class Rate(keras.callbacks.Callback):  # type: ignore[misc]
    """Reads scalars as scripts do."""

    seen: list[float]

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        optimizer = self.model.optimizer
        self.seen += [float(optimizer.learning_rate), int(optimizer.iterations)]


class OwnStep(keras.Sequential):  # type: ignore[misc]
    def train_step(self, data: Any) -> Any:
        return super().train_step(data)


class Adding(layers.Layer):  # type: ignore[misc]
    def call(self, inputs: Any) -> Any:
        self.add_loss(keras.ops.sum(inputs**2))
        return inputs


class Counting(layers.Layer):  # type: ignore[misc]
    def build(self, _: Any) -> None:
        self.calls = self.add_weight(shape=(), trainable=False)

    def call(self, inputs: Any) -> Any:
        self.calls.assign_add(1.0)
        return inputs


class OwnCall(keras.losses.Loss):  # type: ignore[misc]
    def __call__(self, truth: Any, guess: Any, sample_weight: Any = None) -> Any:
        return keras.ops.mean(LOSS.call(truth, guess))


class OwnLoss(keras.Sequential):  # type: ignore[misc]
    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        return keras.ops.mean(super().compute_loss(*args, **kwargs))


def _compiled(*added: Any, kind: Any = keras.Sequential, optimizer: Any = "sgd", **how: Any) -> Any:
    model = kind([*added, layers.Dense(4)])
    model.compile(optimizer, **{"loss": LOSS, **how})
    return model


def _mean(truth: Any, guess: Any) -> Any:
    return keras.ops.mean(keras.losses.sparse_categorical_crossentropy(truth, guess, from_logits=True))


REFUSED: dict[str, Callable[[], Any]] = {
    "a train_step of its own": lambda: _compiled(kind=OwnStep),
    "a compute_loss of its own": lambda: _compiled(kind=OwnLoss),
    "compiled with run_eagerly": lambda: _compiled(run_eagerly=True),
    "compiled with steps_per_execution": lambda: _compiled(steps_per_execution=4),
    "compiled with clipnorm": lambda: _compiled(optimizer=keras.optimizers.SGD(clipnorm=1.0)),
    "compiled with clipvalue": lambda: _compiled(optimizer=keras.optimizers.SGD(clipvalue=1.0)),
    "compiled with inner_optimizer": lambda: _compiled(
        optimizer=keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD())
    ),
    "adds a loss": lambda: _compiled(Adding()),
    "has variables that are not trained": lambda: _compiled(Counting()),
    "a loss has a __call__ of its own": lambda: _compiled(loss=OwnCall()),
    "compiled with ema_overwrite_frequency": lambda: _compiled(
        optimizer=keras.optimizers.SGD(use_ema=True, ema_overwrite_frequency=2)
    ),
    "is stateful": lambda: _compiled(layers.Reshape((4, 2)), layers.LSTM(4, stateful=True)),
    "one number for the whole batch": lambda: _compiled(loss=_mean),
    "ignores masked values": lambda: _compiled(
        layers.Reshape((4, 2)),
        layers.Masking(),
        layers.LSTM(4, return_sequences=True),
        loss=lambda _, guess: keras.ops.mean(guess * guess, axis=-1),
    ),
    "divided by the samples' weights": lambda: _compiled(
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="mean_with_sample_weight")
    ),
}


def _refused() -> dict[str, str]:
    """Of each the error of a `fit` that several devices are to share."""
    said = {}
    for name, make in REFUSED.items():
        model = make()
        try:
            if "clip" in name:
                model.train_on_batch(X[:32], Y[:32])
            model.fit(X, Y, verbose=0, sample_weight=np.ones(len(X)) if "weights" in name else None)
            said[name] = "nothing"
        except BadInputError as error:
            said[name] = str(error)
    return said


def _fewer_samples_than_devices() -> list[float]:
    """Of a model with averages over batches, the last of which is one sample."""
    model = _model("adam", layers.BatchNormalization())
    found = model.fit(X[:161], Y[:161], batch_size=40, validation_data=(X, Y), **ORDERED).history
    return [*found["val_loss"], *(float(value) for each in model.get_weights() for value in each.ravel())]


def _odd_losses() -> list[str]:
    """Messages about losses that are not tensors."""
    said: list[str] = []
    end = mirrored.watch_losses(said.append)
    losses.reduce_weighted_values(0.0)
    losses.reduce_weighted_values([0.0, 1.0])
    end()
    return said


def _with_a_gpu_where_it_is_read() -> str:
    """Why not, of a plain model that is compiled where TensorFlow sees a GPU."""
    own = tf.config.list_physical_devices
    gpu = tf.config.PhysicalDevice("/physical_device:GPU:0", "GPU")
    tf.config.list_physical_devices = lambda *_: [*own(), gpu]
    try:
        model = _compiled()
        assert model.jit_compile, "Keras would have it compiled"
        return mirrored.unsupported_reason(model)
    finally:
        tf.config.list_physical_devices = own


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
    seen_by_a_gpu = _with_a_gpu_where_it_is_read()
    alone = _run()
    mirrored.install(2)
    both = _run()
    few = _fewer_samples_than_devices()
    replicas = _model()._distribute_strategy.num_replicas_in_sync
    print(
        json.dumps(
            {
                "alone": alone,
                "both": both,
                "replicas": replicas,
                "refused": _refused(),
                "gpu": seen_by_a_gpu,
                "few": few,
                "odd": _odd_losses(),
            }
        )
    )


if __name__ == "__main__":
    sys.exit(main())
