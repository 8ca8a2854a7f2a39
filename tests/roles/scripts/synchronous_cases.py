"""Trains small models with every feature of Keras' `fit` whose result several workers have to repeat.

Prints a line `RESULT {case: values}` for each.
"""

import json
import sys

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

SAMPLES, BATCH = 107, 16  # the last batch has 11 samples
rng = np.random.default_rng(0)
X = rng.normal(size=(SAMPLES, 12)).astype("float32")
Y = (X @ rng.normal(size=12) > 0).astype("float32")
CLASS = np.abs(X[:, :5]).argmax(1).astype("int64")
IMAGES = rng.normal(size=(SAMPLES, 8, 8, 3)).astype("float32")
WEIGHTS = rng.uniform(0.1, 2, size=SAMPLES).astype("float32")
TOKENS = rng.integers(1, 20, size=(SAMPLES, 9))
MASKED = TOKENS * (np.arange(9) < rng.integers(4, 10, size=(SAMPLES, 1)))
TAGS = rng.integers(0, 4, size=(SAMPLES, 9))
SETTINGS = {"epochs": 2, "batch_size": BATCH, "verbose": 0}
CASES = {}


def case(train):
    CASES[train.__name__] = train
    return train


def result(model, history):
    weights = [float(np.abs(each).astype("float64").sum()) for each in model.get_weights()]
    return {
        "history": {name: [float(np.mean(each)) for each in found] for name, found in history.history.items()},
        "weights": weights,
    }


def dense(*more, outputs=1, activation="sigmoid"):
    inputs = keras.Input((12,))
    hidden = layers.Dense(16, activation="relu")(inputs)
    for layer in more:
        hidden = layer(hidden)
    return keras.Model(inputs, layers.Dense(outputs, activation=activation)(hidden))


def fitted(model, *data, **others):
    return result(model, model.fit(*data, **{**SETTINGS, **others}))


@case
def arrays():
    model = dense()
    model.compile("adam", "binary_crossentropy", metrics=["accuracy", keras.metrics.AUC()])
    return fitted(model, X, Y, validation_split=0.2)


@case
def last_batch_of_one_sample():
    model = dense()
    model.compile("sgd", "binary_crossentropy", metrics=["accuracy"])
    return fitted(model, X[:33], Y[:33])


@case
def sample_weights():
    model = dense()
    model.compile("rmsprop", "binary_crossentropy", metrics=["accuracy"], weighted_metrics=["accuracy"])
    return fitted(model, X, Y, sample_weight=WEIGHTS, validation_data=(X, Y, WEIGHTS))


@case
def class_weights_in_the_mean():
    model = dense()
    model.compile("adam", keras.losses.BinaryCrossentropy(reduction="mean_with_sample_weight"))
    return fitted(model, X, Y, class_weight={0: 1.0, 1: 3.0})


@case
def sum_of_losses_and_regularizers():
    model = dense(layers.Dense(8, kernel_regularizer="l2", activity_regularizer="l2"))
    model.compile(keras.optimizers.SGD(0.001), keras.losses.BinaryCrossentropy(reduction="sum"))
    return fitted(model, X, Y)


@case
def batch_normalization():
    inputs = keras.Input((8, 8, 3))
    hidden = layers.ReLU()(layers.BatchNormalization()(layers.Conv2D(8, 3)(inputs)))
    hidden = layers.BatchNormalization()(layers.Conv2D(8, 3)(hidden))
    model = keras.Model(inputs, layers.Dense(5, activation="softmax")(layers.GlobalAveragePooling2D()(hidden)))
    model.compile(keras.optimizers.SGD(0.1), "sparse_categorical_crossentropy", metrics=["accuracy"])
    return fitted(model, IMAGES, CLASS, validation_data=(IMAGES, CLASS))


@case
def random_layers():
    inputs = keras.Input((8, 8, 3))
    hidden = layers.GaussianNoise(0.3)(layers.RandomFlip()(inputs))
    hidden = layers.SpatialDropout2D(0.3)(layers.Conv2D(8, 3)(hidden))
    hidden = layers.GaussianDropout(0.2)(layers.Dropout(0.5)(layers.Flatten()(hidden)))
    model = keras.Model(inputs, layers.Dense(5, activation="softmax")(hidden))
    model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    return fitted(model, IMAGES, CLASS)


@case
def masked_sequences():
    inputs = keras.Input((9,), dtype="int32")
    hidden = layers.LSTM(8, return_sequences=True, dropout=0.2)(layers.Embedding(20, 8, mask_zero=True)(inputs))
    model = keras.Model(inputs, layers.Dense(4, activation="softmax")(hidden))
    model.compile(keras.optimizers.SGD(0.1), "sparse_categorical_crossentropy", metrics=["accuracy"])
    return fitted(model, MASKED, TAGS)


@case
def attention():
    inputs = keras.Input((9,), dtype="int32")
    hidden = layers.Embedding(20, 8)(inputs)
    hidden = layers.LayerNormalization()(layers.MultiHeadAttention(2, 4, dropout=0.1)(hidden, hidden))
    model = keras.Model(inputs, layers.Dense(5, activation="softmax")(layers.GlobalAveragePooling1D()(hidden)))
    model.compile("sgd", "sparse_categorical_crossentropy", metrics=["accuracy"])
    return fitted(model, TOKENS, CLASS)


@case
def several_inputs_and_outputs():
    first, second = keras.Input((12,), name="first"), keras.Input((8, 8, 3), name="second")
    hidden = layers.Concatenate()([layers.Dense(8)(first), layers.Flatten()(second)])
    outputs = {
        "one": layers.Dense(1, activation="sigmoid", name="one")(hidden),
        "many": layers.Dense(5, activation="softmax", name="many")(hidden),
    }
    model = keras.Model([first, second], outputs)
    losses = {"one": "binary_crossentropy", "many": "sparse_categorical_crossentropy"}
    metrics = {"one": ["accuracy"], "many": ["accuracy"]}
    model.compile("adam", losses, loss_weights={"one": 0.3, "many": 1.0}, metrics=metrics)
    return fitted(model, {"first": X, "second": IMAGES}, {"one": Y, "many": CLASS})


@case
def clipped_accumulated_averaged():
    model = dense()
    optimizer = keras.optimizers.Adam(
        0.01, global_clipnorm=0.1, use_ema=True, ema_overwrite_frequency=3, gradient_accumulation_steps=2
    )
    model.compile(optimizer, "binary_crossentropy", metrics=["accuracy"])
    return fitted(model, X, Y)


@case
def schedule_and_steps_per_execution():
    model = dense()
    rate = keras.optimizers.schedules.CosineDecay(0.1, 20)
    model.compile(keras.optimizers.SGD(rate, momentum=0.9, clipnorm=0.5), "mse", steps_per_execution=3)
    data = tf.data.Dataset.from_tensor_slices((X, Y)).shuffle(SAMPLES, seed=1).batch(BATCH)
    return fitted(model, data, batch_size=None)


@case
def generator():
    def batches():
        order = np.random.default_rng(5)
        while True:
            some = order.integers(0, SAMPLES, size=13)
            yield X[some], Y[some]

    model = dense()
    model.compile("adam", "binary_crossentropy")
    return fitted(model, batches(), steps_per_epoch=5, batch_size=None)


@case
def py_dataset():
    class Batches(keras.utils.PyDataset):
        def __len__(self):
            return 7

        def __getitem__(self, index):
            return X[index * 15 : (index + 1) * 15], Y[index * 15 : (index + 1) * 15]

    model = dense()
    model.compile("adam", "binary_crossentropy")
    return fitted(model, Batches(workers=2), batch_size=None)


def dice(true, predicted):
    return (2 * ops.sum(true * predicted) + 1) / (ops.sum(true) + ops.sum(predicted) + 1)


class Worst(keras.metrics.Metric):
    def __init__(self):
        super().__init__(name="worst")
        self.value = self.add_variable((), "zeros")

    def update_state(self, true, predicted, sample_weight=None):
        self.value.assign(ops.maximum(self.value, ops.max(ops.abs(ops.cast(true, "float32") - predicted))))

    def result(self):
        return self.value


@case
def own_loss_and_metrics():
    model = dense()
    metrics = [dice, Worst(), keras.metrics.F1Score(threshold=0.5), keras.metrics.R2Score()]
    model.compile("adam", lambda true, predicted: ops.mean(ops.square(true - predicted)), metrics=metrics)
    return fitted(model, X, Y[:, None], validation_data=(X, Y[:, None]))


def accuracy_of_bytes(true, predicted):
    return ops.mean(ops.cast(ops.equal(ops.cast(true, "int64")[:, 0], ops.argmax(predicted, -1)), "float32"))


@case
def labels_of_one_byte():
    model = dense(outputs=5, activation="softmax")
    model.compile("adam", "sparse_categorical_crossentropy", metrics=[accuracy_of_bytes])
    return fitted(model, X, CLASS.astype("uint8")[:, None])


class OwnStep(keras.Model):
    def __init__(self):
        super().__init__()
        self.hidden, self.norm = layers.Dense(8, activation="relu"), layers.BatchNormalization()
        self.out = layers.Dense(1)
        self.loss_mean, self.error = keras.metrics.Mean(name="loss"), keras.metrics.MeanAbsoluteError(name="mae")

    def call(self, x, training=False):
        return self.out(self.norm(self.hidden(x), training=training))

    @property
    def metrics(self):
        return [self.loss_mean, self.error]

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            predicted = self(x, training=True)[:, 0]
            loss = tf.reduce_mean(tf.square(predicted - y))
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        self.loss_mean.update_state(loss)
        self.error.update_state(y, predicted)
        return {**{metric.name: metric.result() for metric in self.metrics}, "raw": loss}


@case
def own_train_step():
    model = OwnStep()
    model.compile(keras.optimizers.SGD(0.05))
    return fitted(model, X, Y)


class Adversaries(keras.Model):
    def __init__(self):
        super().__init__()
        self.maker = keras.Sequential([layers.Input((4,)), layers.Dense(12)])
        self.judge = keras.Sequential([layers.Input((12,)), layers.Dense(8, activation="relu"), layers.Dense(1)])
        self.seed = keras.random.SeedGenerator(7)
        self.judged, self.made = keras.metrics.Mean(name="judged"), keras.metrics.Mean(name="made")

    def compile(self, first, second):
        super().compile()
        self.first, self.second = first, second
        self.compare = keras.losses.BinaryCrossentropy(from_logits=True)

    @property
    def metrics(self):
        return [self.judged, self.made]

    def train_step(self, real):
        count = ops.shape(real)[0]
        both = ops.concatenate([self.maker(keras.random.normal((count, 4), seed=self.seed)), real], 0)
        labels = ops.concatenate([ops.ones((count, 1)), ops.zeros((count, 1))], 0)
        with tf.GradientTape() as tape:
            judged = self.compare(labels, self.judge(both))
        weights = self.judge.trainable_weights
        self.first.apply_gradients(zip(tape.gradient(judged, weights), weights, strict=True))
        noise = keras.random.normal((count, 4), seed=self.seed)
        with tf.GradientTape() as tape:
            made = self.compare(ops.zeros((count, 1)), self.judge(self.maker(noise)))
        weights = self.maker.trainable_weights
        self.second.apply_gradients(zip(tape.gradient(made, weights), weights, strict=True))
        self.judged.update_state(judged)
        self.made.update_state(made)
        return {"judged": self.judged.result(), "made": self.made.result()}


@case
def adversarial():
    model = Adversaries()
    model.compile(keras.optimizers.Adam(1e-3), keras.optimizers.Adam(1e-3))
    return fitted(model, X[:96])


@case
def eagerly():
    model = dense(layers.Dropout(0.3))
    model.compile("adam", "binary_crossentropy", metrics=["accuracy"], run_eagerly=True)
    return fitted(model, X, Y)


@case
def by_train_on_batch():
    model = dense()
    model.compile("adam", "binary_crossentropy", metrics=["accuracy"])
    logs = []
    for start in range(0, SAMPLES, BATCH):
        logs += [float(each) for each in model.train_on_batch(X[start : start + BATCH], Y[start : start + BATCH])]
    tested = [float(each) for each in model.evaluate(X, Y, verbose=0)]
    return {"history": {"logs": logs, "tested": tested}, "weights": []}


@case
def callbacks():
    seen = []

    class Logs(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs):
            seen.append(float(logs["loss"]) + float(logs["accuracy"]))

    model = dense()
    model.compile(keras.optimizers.Adam(0.05), "binary_crossentropy", metrics=["accuracy"])
    stop = keras.callbacks.EarlyStopping(patience=2, restore_best_weights=True)
    slower = keras.callbacks.ReduceLROnPlateau(patience=1)
    found = fitted(model, X, Y, epochs=12, validation_split=0.3, callbacks=[Logs(), stop, slower])
    return {**found, "history": {**found["history"], "seen": seen}}


@case
def built_late():
    class Late(keras.Model):
        def __init__(self):
            super().__init__()
            self.parts = [layers.Dense(8, activation="gelu"), layers.Dropout(0.2), layers.Dense(5)]

        def call(self, x, training=False):
            for part in self.parts:
                x = part(x, training=training) if isinstance(part, layers.Dropout) else part(x)
            return x

    model = Late()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("lion", loss, metrics=["sparse_top_k_categorical_accuracy"])
    return fitted(model, X, CLASS)


@case
def metric_inside_a_layer_of_an_unbuilt_model():
    class Endpoint(layers.Layer):
        def __init__(self):
            super().__init__()
            self.loss = keras.losses.BinaryCrossentropy(from_logits=True)
            self.accuracy = keras.metrics.BinaryAccuracy(name="inner")

        def call(self, target, logits):
            self.add_loss(self.loss(target, logits))
            self.accuracy.update_state(target, logits)
            return ops.sigmoid(logits)

    class Logistic(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense, self.endpoint = layers.Dense(1), Endpoint()

        def call(self, inputs):
            return self.endpoint(inputs["y"], self.dense(inputs["x"]))

    model = Logistic()
    model.compile("adam")
    return fitted(model, {"x": X, "y": Y})


@case
def half_precision():
    keras.config.set_dtype_policy("mixed_float16")
    model = dense()
    model.compile(keras.optimizers.Adam(0.01), "binary_crossentropy", metrics=["accuracy"])
    return fitted(model, X, Y)


for name in sys.argv[1:] or CASES:
    keras.backend.clear_session()
    keras.utils.set_random_seed(3)
    keras.config.set_dtype_policy("float32")
    print("RESULT", json.dumps({name: CASES[name]()}), flush=True)
