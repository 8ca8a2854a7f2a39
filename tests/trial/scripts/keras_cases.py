"""Trainings with Keras 3 that write down every loss: `python keras_cases.py NAME`.

`losses.txt` gets a line for each step. `interrupts.json` may name a step at which the process asks itself to suspend
(SIGUSR1, which its runtime has to handle) or kills itself.
"""

import json
import os
import signal
import sys

import keras
import numpy as np
import tensorflow as tf

CLASSES = 3
rng = np.random.default_rng(5)
X = rng.normal(size=(44, 6)).astype(np.float32)
Y = rng.integers(0, CLASSES, size=44)
layers = keras.layers


class Recorder(keras.callbacks.Callback):
    """Counts in an attribute, which has to survive as well."""

    def __init__(self, fit):
        super().__init__()
        self.fit = fit
        self.steps = 0
        self.random = []
        with open("interrupts.json", encoding="utf-8") as file:
            self.interrupts = json.load(file)

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch
        self.epochs_begun = getattr(self, "epochs_begun", 0) + 1

    def on_train_batch_end(self, batch, logs=None):
        self.steps += 1
        self.random.append(float(np.random.random()))
        with open("losses.txt", "a", encoding="utf-8") as file:
            file.write(f"{self.fit} {self.epoch} {batch} {self.steps} {self.random[-1].hex()} {logs['loss'].hex()}\n")
        for fit, epoch, at, how in self.interrupts:
            if (fit, epoch, at) == (self.fit, self.epoch, batch):
                os.kill(os.getpid(), signal.SIGKILL if how == "kill" else signal.SIGUSR1)


def classifier(*inner, built=True):
    first = [layers.Input((6,))] if built else []
    return keras.Sequential([*first, *inner, layers.Dense(CLASSES)])


def loss():
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def arrays():
    model = classifier(layers.Dense(8), layers.BatchNormalization(), layers.Dropout(0.3), built=False)
    model.compile(keras.optimizers.Adam(0.05), loss(), metrics=["accuracy"])
    stop = keras.callbacks.EarlyStopping(patience=2, restore_best_weights=True)
    plateau = keras.callbacks.ReduceLROnPlateau(factor=0.5, patience=1)
    csv = keras.callbacks.CSVLogger("log.csv")
    recorder = Recorder(0)
    result = model.fit(
        X,
        Y,
        8,
        6,
        callbacks=[recorder, stop, plateau, csv],
        validation_split=0.2,
        class_weight={0: 1.0, 1: 2.0, 2: 1.5},
    )
    return result, model, [stop.stopped_epoch, stop.wait, recorder.epochs_begun, open("log.csv").read()]


def dataset():
    model = classifier(layers.Dense(8, activation="relu"))
    schedule = keras.optimizers.schedules.ExponentialDecay(0.1, 3, 0.9)
    optimizer = keras.optimizers.SGD(schedule, momentum=0.9, use_ema=True, ema_overwrite_frequency=5)
    model.compile(optimizer, loss(), metrics=["accuracy"])
    data = tf.data.Dataset.from_tensor_slices((X, Y)).shuffle(44).batch(10)
    validation = tf.data.Dataset.from_tensor_slices((X[:20], Y[:20])).shuffle(20).batch(6)
    return model.fit(data, epochs=3, validation_data=validation, verbose=2, callbacks=[Recorder(0)]), model, []


def repeated():
    keras.mixed_precision.set_global_policy("mixed_float16")
    model = classifier(layers.GaussianNoise(0.1))
    model.compile("adam", loss(), steps_per_execution=2)
    data = tf.data.Dataset.from_tensor_slices((X, Y)).shuffle(44).batch(10).repeat()
    return model.fit(data, epochs=3, steps_per_epoch=6, verbose=0, callbacks=Recorder(0)), model, []


class Shuffled(keras.utils.PyDataset):
    """Shuffles in place, and draws random numbers for every batch."""

    def __init__(self):
        super().__init__()
        self.order = np.arange(len(X))
        self.generator = np.random.default_rng(3)

    def __len__(self):
        return 4

    def __getitem__(self, index):
        chosen = self.order[index * 11 : index * 11 + 11]
        return X[chosen] + self.generator.normal(size=(11, 6)).astype(np.float32), Y[chosen]

    def on_epoch_end(self):
        np.random.shuffle(self.order)


def py_dataset():
    model = classifier()
    model.compile("sgd", loss())
    recorder = Recorder(0)
    return model.fit(Shuffled(), epochs=3, verbose=0, callbacks=[recorder]), model, []


def generator():
    def batches():
        while True:
            for start in range(0, 40, 10):
                yield X[start : start + 10] * (1 + 0.01 * (start + len(made))), Y[start : start + 10]
                made.append(start)

    made = []
    model = classifier()
    model.compile("adam", loss(), run_eagerly=True)
    return model.fit(batches(), epochs=3, steps_per_epoch=3, verbose=0, callbacks=[Recorder(0)]), model, []


def unknown_length():
    """The end of an epoch comes as a surprise, the first time."""
    model = classifier()
    model.compile("adam", loss(), metrics=["accuracy"])
    data = tf.data.Dataset.from_tensor_slices((X, Y)).filter(lambda x, y: y != 1).batch(8)
    return model.fit(data, epochs=3, verbose=0, callbacks=[Recorder(0)]), model, []


def bfloat16():
    model = keras.Sequential([layers.Input((6,)), layers.Dense(5, dtype="bfloat16"), layers.Dense(3, dtype="float32")])
    model.compile(keras.optimizers.Lion(0.01), loss())
    return model.fit(X, Y, epochs=4, initial_epoch=1, verbose=0, callbacks=[Recorder(0)], shuffle="batch"), model, []


def other_shape():
    model = keras.Sequential([layers.Input((6,)), layers.Dense(7, dtype="bfloat16"), layers.Dense(3, dtype="float32")])
    model.compile(keras.optimizers.Lion(0.01), loss())
    return model.fit(X, Y, epochs=4, initial_epoch=1, verbose=0, callbacks=[Recorder(0)]), model, []


class TwoOptimizers(keras.Model):
    """Has a training step of its own."""

    def __init__(self):
        super().__init__()
        self.one, self.two = layers.Dense(8), layers.Dense(CLASSES)
        self.other = keras.optimizers.Adam(0.01)
        self.noise = keras.random.SeedGenerator(4)
        self.count = tf.Variable(0.0)

    def call(self, x):
        return self.two(self.one(x))

    def train_step(self, data):
        x, y = data
        with tf.GradientTape(persistent=True) as tape:
            noisy = x + keras.random.normal(tf.shape(x), stddev=0.1, seed=self.noise) + 0.01 * self.count
            loss = self.compute_loss(y=y, y_pred=self(noisy))
        self.optimizer.apply_gradients(
            zip(tape.gradient(loss, self.one.trainable_weights), self.one.trainable_weights, strict=True)
        )
        self.other.apply_gradients(
            zip(tape.gradient(loss, self.two.trainable_weights), self.two.trainable_weights, strict=True)
        )
        self.count.assign_add(1.0)
        return {"loss": loss}


def several():
    """Three trainings of two models; what comes of one decides about the next."""
    first = classifier(layers.Dense(4), layers.Dropout(0.2))
    first.compile(keras.optimizers.Adam(0.05), loss(), metrics=["accuracy"])
    halve = keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.7)
    history = first.fit(X, Y, epochs=2, verbose=0, callbacks=[Recorder(0), halve])
    between = [float(value) for value in first.evaluate(X, Y, verbose=0)]
    first.layers[0].trainable = False
    first.compile(keras.optimizers.SGD(between[0] * 0.01), loss())
    first.fit(X, Y, epochs=2, verbose=0, callbacks=[Recorder(1)])
    second = TwoOptimizers()
    second.compile("sgd", loss())
    result = second.fit(X, Y, epochs=2, batch_size=16, verbose=0, callbacks=[Recorder(2)])
    return result, first, [history.history, between, float(second.count)]


class Sample(keras.Model):
    """Its loss is the sample."""

    def __init__(self):
        super().__init__()
        self.weight = self.add_weight(shape=())

    def call(self, x):
        return x

    def train_step(self, data):
        return {"loss": tf.reduce_mean(data[0])}


def unseeded():
    """Sets no seed: the shuffling of an epoch cannot be reproduced."""
    model = Sample()
    model.compile("sgd", "mse")
    samples = np.arange(8.0)
    model.fit(samples, samples, batch_size=1, epochs=2, verbose=0, callbacks=[Recorder(0)])
    data = tf.data.Dataset.from_tensor_slices((samples, samples)).shuffle(8).batch(1)
    return model.fit(data, epochs=2, verbose=0, callbacks=[Recorder(1)]), model, []


def main():
    if sys.argv[1] != "unseeded":
        keras.utils.set_random_seed(7)
        np.random.seed(11)
    result, model, more = {
        function.__name__: function
        for function in (
            arrays,
            dataset,
            repeated,
            py_dataset,
            generator,
            unknown_length,
            bfloat16,
            other_shape,
            several,
            unseeded,
        )
    }[sys.argv[1]]()
    weights = [float(np.sum(np.asarray(weight, np.float64))).hex() for weight in model.get_weights()]
    with open("result.json", "w", encoding="utf-8") as file:
        json.dump([result.history, result.epoch, weights, more], file)


if __name__ == "__main__":
    main()
