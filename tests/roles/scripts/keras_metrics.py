"""What `fit` reports of metrics in every way a script can use them; run on a cluster and by Python alone.

Its arguments are learning rates; of a rate with a `-` behind it only three ways are tried.
"""

import json
import os
import random
import sys
import tempfile

import data
import keras
import numpy as np
import tensorflow as tf

inputs, labels = data.halves(330)
test_inputs, test_labels = data.halves(100, seed=1)


class Largest(keras.metrics.Metric):
    """A metric whose state does not add up."""

    def __init__(self, name="largest", **settings):
        super().__init__(name=name, **settings)
        self.largest = self.add_variable((), "zeros", name="largest")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.largest.assign(keras.ops.maximum(self.largest, keras.ops.max(y_pred)))

    def result(self):
        return self.largest


class Logs(keras.callbacks.Callback):
    """Records the logs of a callback for batches."""

    def __init__(self):
        super().__init__()
        self.logs = []

    def on_train_batch_end(self, batch, logs=None):
        self.logs.append([batch, {name: np.asarray(value).tolist() for name, value in logs.items()}])


class Follows(keras.Model):
    """Returns what it makes of its metrics under names of its own, and other things besides."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(1, activation="sigmoid")
        self.total_loss_tracker = keras.metrics.Mean(name="total_loss")
        self.auc = keras.metrics.AUC(name="auc")
        self.recall = keras.metrics.Recall(name="recall")
        self.seen = keras.metrics.Sum(name="seen")
        self.largest = Largest()
        self.kept = keras.metrics.Sum(name="kept")

    @property
    def metrics(self):
        return [self.total_loss_tracker, self.auc, self.recall, self.seen, self.largest]

    def call(self, x):
        return self.dense(x)

    def train_step(self, batch):
        x, y = batch
        with tf.GradientTape() as tape:
            predicted = self(x, training=True)
            loss = keras.ops.mean(keras.losses.binary_crossentropy(y, predicted))
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        self.total_loss_tracker.update_state(loss)
        before = self.total_loss_tracker.result()
        self.total_loss_tracker.update_state(loss + 1.0)
        self.auc.update_state(y, predicted)
        self.recall.update_state(y, predicted)
        self.seen.update_state(keras.ops.shape(x)[0])
        self.kept.update_state(1.0)
        self.largest.update_state(y, predicted)
        return {
            "loss": self.total_loss_tracker.result(),
            "before": before,
            "train_auc": self.auc.result(),
            "train_recall": self.recall.result(),
            "n_seen": self.seen.result(),
            "largest": self.largest.result(),
            "kept": self.kept.result(),
            "ratio": self.recall.result() / (self.auc.result() + 1e-3),
            "batch_loss": loss,
            "columns": keras.ops.mean(x, axis=0),
            "lr": self.optimizer.learning_rate,
            "three": 3,
        }


class Decorated(Follows):
    @tf.function
    def train_step(self, batch):
        return super().train_step(batch)


class Branches(Follows):
    """Updates a metric where its state cannot be followed."""

    def train_step(self, batch):
        logs = super().train_step(batch)

        def update():
            self.seen.update_state(1.0)
            return 0

        tf.cond(keras.ops.shape(batch[0])[0] > 31, update, lambda: 0)
        return {**logs, "n_seen": self.seen.result()}


class Evaluates(Follows):
    """Decides by what it evaluates."""

    def test_step(self, batch):
        x, y = batch
        predicted = self(x, training=False)
        self.auc.update_state(y, predicted)
        self.largest.update_state(y, predicted)
        return {"auc": self.auc.result(), "twice": 2.0 * self.largest.result()}


class Batched(keras.utils.PyDataset):
    """Keras shuffles its batches by Python's random numbers.

    Args:
        varies: whether batches differ in their shapes.
    """

    def __init__(self, varies):
        super().__init__()
        self.varies = varies
        self.ended = 0

    def __len__(self):
        return 11

    def __getitem__(self, index):
        part = slice(30 * index, 30 * index + 30)
        shape = (30, 1 + index % 3, 32) if self.varies else (30, 32)
        return np.broadcast_to(inputs[part].reshape(30, *[1] * (len(shape) - 2), 32), shape), labels[part]

    def on_epoch_end(self):
        self.ended += 1


def plain(history):
    return {name: [np.asarray(value).tolist() for value in values] for name, values in history.items()}


def custom(kind, rate):
    keras.utils.set_random_seed(5)
    model, logs = kind(), Logs()
    model.compile(keras.optimizers.Adam(rate))
    validation = {"validation_data": (test_inputs, test_labels)} if kind is Evaluates else {}
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "{epoch}.weights.h5")
        best = keras.callbacks.ModelCheckpoint(
            path, monitor="train_auc", mode="min", save_best_only=True, save_weights_only=True
        )
        stop = keras.callbacks.EarlyStopping(monitor="loss", patience=0, min_delta=0.01)
        history = model.fit(
            inputs, labels, batch_size=32, epochs=3, verbose=0, callbacks=[logs, best, stop], **validation
        )
        saved = sorted(os.listdir(folder))
    return {"history": plain(history.history), "logs": logs.logs, "saved": saved, "kept": float(model.kept.result())}


def compiled(rate, batch_size=50, looks=True, shuffled=False, **settings):
    keras.utils.set_random_seed(6)
    model, logs = keras.Sequential([keras.Input((32,)), keras.layers.Dense(1, activation="sigmoid")]), Logs()
    model.compile(
        keras.optimizers.Adam(rate),
        "binary_crossentropy",
        metrics=[keras.metrics.AUC(name="auc"), Largest()],
        weighted_metrics=[keras.metrics.F1Score(threshold=0.5, name="f1"), "accuracy"],
    )
    data = {"x": inputs, "y": labels, "batch_size": batch_size}
    if shuffled:
        # Shuffled anew at each iteration: an extra pass over the data changes the order of the training.
        data = {"x": tf.data.Dataset.from_tensor_slices((inputs, labels)).shuffle(len(inputs)).batch(batch_size)}
    history = model.fit(
        **data,
        epochs=2,
        verbose=0,
        callbacks=[logs] if looks else [],
        validation_data=(test_inputs, test_labels),
        **settings,
    )
    return {"history": plain(history.history), "logs": logs.logs}


several = []
if "DIKE_TASK" in os.environ:
    from dike.keras3.job import epoch, step

    # Even on a slow machine, steps are grouped where no callback inspects each of them.
    epoch._SHORT_STEP_S = epoch._MAX_GROUP_S = 1e9
    epoch._MEASURED_STEPS = 5
    own = step.Step.multi_step
    step.Step.multi_step = lambda self, count: several.append(count) or own(self, count)


def drawn(rate, varies):
    """Data that draw random numbers, and what is drawn after the fit."""
    keras.utils.set_random_seed(7)
    batches, logs = Batched(varies), Logs()
    layers = [keras.Input((None, 32)), keras.layers.GlobalAveragePooling1D()] if varies else [keras.Input((32,))]
    model = keras.Sequential([*layers, keras.layers.Dense(1, activation="sigmoid")])
    model.compile(keras.optimizers.Adam(rate), "binary_crossentropy", metrics=["accuracy"])
    history = model.fit(batches, epochs=3, verbose=0, callbacks=[logs])
    return {"history": plain(history.history), "logs": logs.logs, "next": random.random(), "ended": batches.ended}


result = {}
looked_at = 0
for argument in sys.argv[1:] or ("0.0", "0.01"):
    before, rate = len(several), float(argument.rstrip("-"))
    weighted = compiled(rate, sample_weight=np.linspace(0.0, 2.0, len(inputs)))
    if argument.endswith("-"):
        ways = {kind.__name__: custom(kind, rate) for kind in (Follows, Branches)}
        result[f"rate {rate}"] = {**ways, "weighted": weighted}
        continue
    result[f"rate {rate}"] = {
        **{kind.__name__: custom(kind, rate) for kind in (Follows, Decorated, Branches, Evaluates)},
        "weighted": weighted,
        "classes": compiled(rate, class_weight={0: 1.0, 1: 3.0}),
        "shuffled": compiled(rate, shuffled=True),
        "drawn": drawn(rate, varies=False),
        "drawn and varied": drawn(rate, varies=True),
    }
    looked_at += len(several) - before
    result[f"rate {rate}"]["together"] = compiled(rate, batch_size=7, looks=False)
print("SEVERAL", json.dumps([looked_at, several]))
print("RESULT", json.dumps(result), flush=True)
