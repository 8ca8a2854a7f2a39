"""Keras 3 scripts as people write them, several in one: each `fit` leaves its findings in the result."""

import json
import os
import sys

import data
import keras
import numpy as np
import tensorflow as tf

keras.utils.set_random_seed(1)
inputs, labels = data.samples(1000)
test_inputs, test_labels = data.samples(300, seed=1)
result = {}


class Samples(keras.metrics.Metric):
    """Counts the samples that were trained."""

    def __init__(self, name="samples", dtype=None):
        super().__init__(name=name, dtype=dtype)
        self.count = self.add_variable((), "zeros", name="count")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.count.assign_add(keras.ops.cast(keras.ops.shape(y_pred)[0], "float32"))

    def result(self):
        return self.count + 0.0


class Batches(keras.callbacks.Callback):
    """Records the arguments of a callback for batches."""

    def __init__(self):
        super().__init__()
        self.begun, self.ended, self.samples = [], [], []

    def on_train_batch_begin(self, batch, logs=None):
        self.begun.append(batch)

    def on_train_batch_end(self, batch, logs=None):
        self.ended.append(batch)
        self.samples.append(logs["samples"])
        self.steps = int(self.model.optimizer.iterations)


def compiled(model, rate=0.01):
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(rate), loss, metrics=["accuracy", Samples()])
    return model


# Arrays, with everything that has state, and callbacks that change the model between epochs.
model = compiled(
    keras.Sequential(
        [
            keras.Input((32,)),
            keras.layers.Dense(32),
            keras.layers.BatchNormalization(momentum=0.8),
            keras.layers.Activation("relu"),
            keras.layers.Dropout(0.1),
            keras.layers.Dense(10),
        ]
    )
)
batches = Batches()
rates = []
history = model.fit(
    inputs,
    labels,
    batch_size=48,
    epochs=4,
    verbose=2,
    validation_data=(test_inputs, test_labels),
    callbacks=[
        batches,
        keras.callbacks.LearningRateScheduler(lambda epoch, rate: 0.01 / (epoch + 1)),
        keras.callbacks.ReduceLROnPlateau(monitor="loss", patience=1),
        keras.callbacks.EarlyStopping(monitor="val_loss", patience=3, restore_best_weights=True),
        keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: rates.append(float(logs["learning_rate"]))),
    ],
)
path = os.path.join(os.environ["FOLDER"], "saved.keras")
model.save(path)
predicted = np.argmax(model.predict(test_inputs, verbose=0), axis=1)
result["arrays"] = {
    "history": history.history,
    "epochs": history.epoch,
    "rates": rates,
    "begun": batches.begun,
    "ended": batches.ended,
    "samples": batches.samples,
    "iterations": int(model.optimizer.iterations),
    "evaluated": model.evaluate(test_inputs, test_labels, verbose=0, return_dict=True),
    "predicted": float(np.mean(predicted == test_labels)),
    "loaded": keras.models.load_model(path, custom_objects={"Samples": Samples}).evaluate(
        test_inputs, test_labels, verbose=0, return_dict=True
    ),
    "moving_mean_moved": float(np.abs(np.asarray(model.layers[1].moving_mean)).max()),
}
# The same model again: the training continues with its weights.
result["again"] = model.fit(inputs, labels, epochs=1, verbose=0, class_weight={0: 2.0}).history


class Subclassed(keras.Model):
    """A model with its own training step and its own metric."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(10)
        self.seen = Samples("seen")

    def call(self, x):
        return self.dense(x)

    def train_step(self, batch):
        x, y = batch
        with tf.GradientTape() as tape:
            logits = self(x, training=True)
            loss = keras.ops.mean(keras.losses.sparse_categorical_crossentropy(y, logits, from_logits=True))
        self.optimizer.apply_gradients(
            zip(tape.gradient(loss, self.trainable_variables), self.trainable_variables, strict=True)
        )
        self.seen.update_state(y, logits)
        return {"loss": loss, "own": self.seen.result()}


def generator():
    while True:
        for begin in range(0, 1000, 50):
            yield inputs[begin : begin + 50], labels[begin : begin + 50]


own = Subclassed()
own.compile(keras.optimizers.SGD(0.5, momentum=0.9))
dataset = tf.data.Dataset.from_tensor_slices((inputs, labels)).shuffle(1000).batch(64)
first = own.fit(dataset, epochs=3, verbose=0).history
result["subclassed"] = {"history": first, "seen": float(own.seen.result())}
plain = compiled(keras.Sequential([keras.Input((32,)), keras.layers.Dense(10)]), rate=0.05)
result["generator"] = plain.fit(
    generator(), steps_per_epoch=20, epochs=3, verbose=0, validation_data=dataset, validation_freq=3
).history
result["split"] = plain.fit(
    inputs, labels, sample_weight=np.ones(1000), validation_split=0.2, initial_epoch=1, epochs=2, verbose=0
).history


class Pair(keras.Model):
    """Two models without a call() between them, each with an optimizer of the same name, as a GAN has them."""

    def __init__(self):
        super().__init__()
        self.first, self.second = (
            keras.Sequential([keras.Input((32,)), keras.layers.Dense(10, name="dense")], name=name)
            for name in ("first", "second")
        )
        self.loss_tracker = keras.metrics.Mean(name="both")

    def compile(self, first_optimizer, second_optimizer):
        super().compile()
        self.first_optimizer, self.second_optimizer = first_optimizer, second_optimizer

    @property
    def metrics(self):
        return [self.loss_tracker]

    def train_step(self, batch):
        x, y = batch
        for part, optimizer in ((self.first, self.first_optimizer), (self.second, self.second_optimizer)):
            with tf.GradientTape() as tape:
                logits = part(x, training=True)
                loss = keras.ops.mean(keras.losses.sparse_categorical_crossentropy(y, logits, from_logits=True))
            optimizer.apply_gradients(
                zip(tape.gradient(loss, part.trainable_weights), part.trainable_weights, strict=True)
            )
            self.loss_tracker.update_state(loss)
        return {"both": self.loss_tracker.result()}


pair = Pair()
pair.compile(keras.optimizers.Adam(0.01, name="same"), keras.optimizers.Adam(0.01, name="same"))
result["pair"] = {
    "history": pair.fit(inputs, labels, batch_size=50, epochs=2, verbose=0).history,
    "iterations": [int(pair.first_optimizer.iterations), int(pair.second_optimizer.iterations)],
    "velocities": [
        float(np.abs(np.asarray(optimizer._velocities[0])).max())
        for optimizer in (pair.first_optimizer, pair.second_optimizer)
    ],
}


def refusal(call):
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "not refused"


result["refused"] = {"argument": refusal(lambda: plain.fit(inputs, labels, use_multiprocessing=True))}
plain.compile("sgd", "mse", run_eagerly=True)
result["refused"]["run_eagerly"] = refusal(lambda: plain.fit(inputs, labels, verbose=0))
plain.compile(keras.optimizers.SGD(gradient_accumulation_steps=2), "mse")
result["refused"]["accumulation"] = refusal(lambda: plain.fit(inputs, labels, verbose=0))
plain.compile(keras.optimizers.Adam(use_ema=True, ema_overwrite_frequency=2), "mse")
result["refused"]["averages"] = refusal(lambda: plain.fit(inputs, labels, verbose=0))
print("RESULT", json.dumps(result), flush=True)
sys.exit(0)
