"""Trains with one kind of input data: `python keras_inputs.py KIND`; `KIND-unseeded` without any seed.

`KIND-job` is the
same as `KIND`.

Each step's loss and a digest of the weights go to the file descriptor that `OBSERVED_FD` names, as do the results at
the end. A kind is a function that trains; several kinds differ only in their data.
"""

import collections
import hashlib
import os
import random
import sys

import keras
import numpy as np
import tensorflow as tf

EPOCHS = 3
BATCH = 3
rng = np.random.default_rng(5)
X = rng.normal(size=(11, 4)).astype(np.float32)
Y = X.sum(1, keepdims=True)
SPEC = (tf.TensorSpec((None, 4)), tf.TensorSpec((None, 1)))
WORDS = np.array([f"word{n} word{n % 3} word{n % 2}" for n in range(11)])
KINDS = {}


def observe(*words):
    os.write(int(os.environ["OBSERVED_FD"]), (" ".join(map(str, words)) + "\n").encode())


class Recorder(keras.callbacks.Callback):
    """Observes every step; its own attributes have to survive as well."""

    def __init__(self, fit=0):
        super().__init__()
        self.fit, self.steps, self.epoch = fit, 0, -1
        self.random = np.random.default_rng(8)
        self.batches, self.last = set(), collections.deque(maxlen=3)

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch

    def on_train_batch_end(self, batch, logs=None):
        self.steps += 1
        self.batches.add(f"batch {batch}")
        self.last.append(batch)
        observe(
            "step",
            self.fit,
            self.epoch,
            batch,
            self.steps,
            len(self.batches),
            list(self.last),
            self.random.random(),
            random.random(),
            logs["loss"].hex(),
            digest(self.model),
        )

    def on_epoch_end(self, epoch, logs=None):
        observe("epoch", self.fit, epoch, {name: float(value).hex() for name, value in logs.items()})


def digest(model):
    values = [np.asarray(value).tobytes() for value in (*model.weights, *model.optimizer.variables)]
    return hashlib.sha1(b"".join(values)).hexdigest()[:12]


def small(*first):
    model = keras.Sequential([*(first or [keras.Input((4,))]), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.05, momentum=0.9), "mse", jit_compile=False)
    return model


def train(x, y=None, *, model=None, epochs=EPOCHS, fit=0, **more):
    model = small() if model is None else model
    stop = keras.callbacks.EarlyStopping("loss", patience=2, restore_best_weights=True)
    history = model.fit(x, y, epochs=epochs, verbose=0, callbacks=[Recorder(fit), stop], **more)
    losses = {name: [float(value).hex() for value in values] for name, values in history.history.items()}
    observe("fit", fit, history.epoch, losses, stop.wait, stop.best, digest(model))
    return model


def kind(function):
    KINDS[function.__name__] = function
    return function


def pairs(x=X, y=Y):
    return tf.data.Dataset.from_tensor_slices((x, y))


class Reader:
    """Reads other rows in each epoch."""

    def __init__(self):
        self.epoch = 0

    def __call__(self):
        self.epoch += 1
        for number in range(9):
            yield X[number] / self.epoch, Y[number]


def datasets():
    """Data sets of `tf.data`, by name."""

    def rows():
        for number in range(11):
            yield X[number], Y[number]

    def counted():
        made.append(0)
        for number in range(11):
            yield X[number] * (1 + len(made)), Y[number]

    def drawn():
        for number in range(8):
            yield X[number] + np.random.normal(size=4).astype(np.float32), Y[number]

    def reordered():
        random.shuffle(order)
        for number in order:
            yield X[number], Y[number]

    def scaled(x):
        made.append(0)
        return x * np.float32(1 + len(made))

    made, order = [], list(range(11))
    one = (tf.TensorSpec((4,)), tf.TensorSpec((1,)))

    def noisy(x, y):
        return x + tf.random.normal(tf.shape(x), stddev=0.1), y

    def stateless(number, row):
        x, y = row
        return x + tf.random.stateless_normal(tf.shape(x), [1, tf.cast(number, tf.int32)]), y

    shuffled = pairs().shuffle(11)
    return {
        "exact": lambda: pairs(X[:9], Y[:9]).batch(BATCH),
        "remainder": lambda: pairs().batch(BATCH),
        "drop_remainder": lambda: pairs().batch(BATCH, drop_remainder=True),
        "shuffled": lambda: shuffled.batch(BATCH),
        "shuffled_seed": lambda: pairs().shuffle(11, seed=3).batch(BATCH),
        "shuffled_small_buffer": lambda: pairs().shuffle(4, seed=3).batch(BATCH),
        "shuffled_once": lambda: pairs().shuffle(11, seed=3, reshuffle_each_iteration=False).batch(BATCH),
        "shuffled_once_no_seed": lambda: pairs().shuffle(11, reshuffle_each_iteration=False).batch(BATCH),
        "shuffled_batches": lambda: pairs().batch(2).shuffle(9),
        "repeated_twice": lambda: shuffled.repeat(2).batch(BATCH),
        "filtered": lambda: pairs().filter(lambda x, y: x[0] > -1.0).batch(BATCH),
        "filtered_shuffled": lambda: shuffled.filter(lambda x, y: x[0] > -1.0).batch(BATCH),
        "filtered_exact": lambda: pairs(X[:9], Y[:9]).shuffle(9, seed=1).filter(lambda x, y: True).batch(BATCH),
        "from_generator": lambda: tf.data.Dataset.from_generator(rows, output_signature=one).batch(BATCH),
        "generator_shuffled": lambda: (
            tf.data.Dataset.from_generator(rows, output_signature=one).shuffle(11, seed=2).batch(BATCH)
        ),
        "generator_counts": lambda: tf.data.Dataset.from_generator(counted, output_signature=one).batch(BATCH),
        "generator_draws": lambda: tf.data.Dataset.from_generator(drawn, output_signature=one).batch(BATCH),
        "generator_shuffles": lambda: tf.data.Dataset.from_generator(reordered, output_signature=one).batch(BATCH),
        "generator_object": lambda: (
            tf.data.Dataset.from_generator(Reader(), output_signature=one).batch(BATCH).prefetch(2)
        ),
        "function_counts": lambda: (
            pairs()
            .map(lambda x, y: (tf.ensure_shape(tf.numpy_function(scaled, [x], tf.float32), (4,)), y))
            .batch(BATCH)
        ),
        "interleaved": lambda: (
            tf.data.Dataset.range(3)
            .interleave(lambda n: pairs().skip(n).take(3), cycle_length=2, block_length=1)
            .shuffle(5)
            .batch(BATCH)
        ),
        "interleaved_parallel": lambda: (
            tf.data.Dataset.range(3)
            .interleave(lambda n: pairs().skip(n).take(3), cycle_length=3, num_parallel_calls=2)
            .batch(BATCH)
        ),
        "prefetched": lambda: shuffled.batch(BATCH).prefetch(2),
        "prefetched_autotune": lambda: shuffled.map(lambda x, y: (2 * x, y), -1).batch(BATCH).prefetch(-1),
        "cached": lambda: pairs().cache().shuffle(11, seed=4).batch(BATCH),
        "cached_order": lambda: pairs().shuffle(11, seed=4).cache().batch(BATCH),
        "mapped_random": lambda: pairs().map(noisy).batch(BATCH),
        "mapped_stateless": lambda: pairs().enumerate().map(stateless).shuffle(11, seed=4).batch(BATCH),
        "numpy_function": lambda: (
            pairs()
            .map(lambda x, y: (tf.ensure_shape(tf.numpy_function(lambda a: a * 2, [x], tf.float32), (4,)), y))
            .shuffle(5, seed=1)
            .batch(BATCH)
        ),
        "sampled": lambda: tf.data.Dataset.sample_from_datasets([pairs(), pairs(-X, Y)], seed=4).batch(BATCH),
        "concatenated": lambda: shuffled.concatenate(pairs()).batch(BATCH),
        "bucketed": lambda: (
            pairs()
            .bucket_by_sequence_length(lambda x, y: tf.cast(x[0] > 0, tf.int32) + 1, [2], [2, 3])
            .shuffle(3, seed=1)
        ),
        "taken_while": lambda: shuffled.take_while(lambda x, y: x[0] < 2.0).batch(BATCH),
        "unbatched": lambda: pairs().batch(5).unbatch().shuffle(7, seed=3).batch(BATCH),
    }


DATASETS = tuple(datasets())
for _name in DATASETS:
    KINDS[_name] = lambda name=_name: train(datasets()[name]())
    KINDS[f"validated_{_name}"] = lambda name=_name: train(X, Y, batch_size=4, validation_data=datasets()[name]())


@kind
def arrays():
    train(X, Y, batch_size=BATCH, validation_split=0.2)


@kind
def arrays_exact():
    train(X[:9], Y[:9], batch_size=BATCH, validation_data=(X[9:], Y[9:]))


@kind
def arrays_in_order():
    train(X, Y, batch_size=BATCH, shuffle=False)


@kind
def arrays_shuffled_batches():
    train(X, Y, batch_size=BATCH, shuffle="batch")


@kind
def tensors():
    train(tf.constant(X), tf.constant(Y), batch_size=BATCH)


@kind
def arrays_fewer_steps():
    train(X, Y, batch_size=BATCH, steps_per_epoch=3)


@kind
def several_steps():
    model = small()
    model.compile(keras.optimizers.SGD(0.02), "mse", steps_per_execution=2, jit_compile=False)
    train(X, Y, batch_size=2, model=model)


@kind
def several_steps_unknown():
    model = small()
    model.compile(keras.optimizers.SGD(0.02), "mse", steps_per_execution=2, jit_compile=False)
    train(datasets()["filtered_exact"]().unbatch().batch(1), model=model)


@kind
def fewer_steps():
    train(pairs().shuffle(11).batch(BATCH), steps_per_epoch=3)


@kind
def fewer_steps_unknown():
    train(datasets()["filtered_shuffled"](), steps_per_epoch=2, epochs=4)


@kind
def more_steps():
    train(pairs().shuffle(11).batch(BATCH), steps_per_epoch=6)


@kind
def more_steps_unknown():
    train(datasets()["filtered_shuffled"](), steps_per_epoch=6)


@kind
def as_many_steps():
    train(pairs().shuffle(11).batch(BATCH), steps_per_epoch=4)


@kind
def endless():
    train(pairs().shuffle(11).repeat().batch(BATCH), steps_per_epoch=3)


@kind
def endless_batches():
    train(pairs().shuffle(11).batch(BATCH).repeat(), steps_per_epoch=3)


@kind
def endless_generator():
    def rows():
        while True:
            for number in range(11):
                yield X[number], Y[number]

    one = (tf.TensorSpec((4,)), tf.TensorSpec((1,)))
    train(tf.data.Dataset.from_generator(rows, output_signature=one).batch(BATCH), steps_per_epoch=3)


@kind
def endless_validation():
    # The other way round it is chance whether the shuffle has begun again, ahead of what is used.
    train(X, Y, batch_size=4, validation_data=pairs().repeat().shuffle(11).batch(BATCH), validation_steps=2)


@kind
def ragged():
    parts = tf.RaggedTensor.from_row_lengths(np.arange(30.0, dtype=np.float32), [1, 5, 4, 2, 8, 3, 1, 4, 2])
    data = tf.data.Dataset.from_tensor_slices((parts, Y[:9])).shuffle(9, seed=1)
    data = data.map(lambda x, y: (tf.pad(x[:4], [[0, 4 - tf.minimum(4, tf.shape(x)[0])]]), y))
    train(
        data.ragged_batch(BATCH).map(
            lambda x, y: (
                tf.ensure_shape(x if not hasattr(x, "to_tensor") else x.to_tensor(shape=(None, 4)), (None, 4)),
                y,
            )
        )
    )


@kind
def text():
    vectorize = keras.layers.TextVectorization(20, output_sequence_length=4)
    vectorize.adapt(WORDS)
    model = small(keras.layers.Embedding(20, 3), keras.layers.GlobalAveragePooling1D())
    data = tf.data.Dataset.from_tensor_slices((WORDS, Y)).shuffle(11, seed=2).batch(BATCH)
    train(data.map(lambda x, y: (vectorize(x), y)), model=model)


@kind
def text_lines():
    with open("lines.txt", "w") as file:
        file.write("\n".join(WORDS))
    vectorize = keras.layers.TextVectorization(20, output_sequence_length=4)
    lines = tf.data.TextLineDataset("lines.txt")
    vectorize.adapt(lines.batch(4))
    model = small(keras.layers.Embedding(20, 3), keras.layers.GlobalAveragePooling1D())
    data = lines.map(lambda line: (line, [tf.cast(tf.strings.length(line), tf.float32)]))
    train(data.shuffle(11, seed=2).batch(BATCH).map(lambda x, y: (vectorize(x), y)), model=model)


@kind
def python_generator():
    def batches():
        while True:
            for start in range(0, 11, BATCH):
                made.append(start)
                yield X[start : start + BATCH] * (1 + 0.1 * len(made)), Y[start : start + BATCH]

    made = []
    train(batches(), steps_per_epoch=3)


@kind
def python_generator_draws():
    def batches():
        own = np.random.default_rng(3)
        while True:
            chosen = own.integers(0, 11, BATCH)
            yield X[chosen] + np.random.normal(size=(BATCH, 4)).astype(np.float32), Y[chosen]

    train(batches(), steps_per_epoch=4)


@kind
def python_generator_ends():
    def batches():
        for start in range(0, 30, BATCH):
            yield X[start % 9 : start % 9 + BATCH], Y[start % 9 : start % 9 + BATCH]

    train(batches(), steps_per_epoch=4)


@kind
def python_generator_once():
    def batches():
        for start in range(0, 11, BATCH):
            yield X[start : start + BATCH], Y[start : start + BATCH]

    train(batches())


class Shuffled(keras.utils.PyDataset):
    """Shuffles in place between two epochs, and draws random numbers for every batch."""

    def __init__(self, *, draws=True, **how):
        super().__init__(**how)
        self.order, self.generator, self.draws = np.arange(11), np.random.default_rng(3), draws

    def __len__(self):
        return 4

    def __getitem__(self, index):
        chosen = self.order[index * BATCH : index * BATCH + BATCH]
        noise = self.generator.normal(size=(len(chosen), 4)).astype(np.float32) if self.draws else 0
        return X[chosen] + noise, Y[chosen]

    def on_epoch_end(self):
        np.random.shuffle(self.order)


@kind
def py_dataset():
    train(Shuffled(), validation_data=Shuffled(draws=False))


@kind
def py_dataset_workers():
    train(Shuffled(draws=False, workers=2, max_queue_size=3))


@kind
def py_dataset_endless():
    class Endless(Shuffled):
        @property
        def num_batches(self):
            return None

        def __getitem__(self, index):
            return super().__getitem__(index % 4)

        def on_epoch_end(self):
            pass  # batches are made ahead: which of them would be made before it, is chance

    train(Endless(), steps_per_epoch=3)


@kind
def generator_of_batches():
    def batches():
        own = np.random.default_rng(4)
        for _ in range(4):
            x = own.normal(size=(8, 4)).astype(np.float32)
            yield x, x.sum(1, keepdims=True)

    data = tf.data.Dataset.from_generator(batches, output_signature=SPEC)
    train(data, model=small(keras.Input((4,)), keras.layers.Dense(8, "relu")), epochs=4)


@kind
def several_fits():
    data = pairs().shuffle(11).batch(BATCH)
    model = train(data, epochs=2)
    train(data, model=model, epochs=2, fit=1)
    train(data.filter(lambda x, y: True), epochs=2, fit=2)


@kind
def dropout():
    train(datasets()["filtered_shuffled"](), model=small(keras.Input((4,)), keras.layers.Dropout(0.4)))


@kind
def eager():
    model = small()
    model.compile(keras.optimizers.SGD(0.02), "mse", run_eagerly=True)
    train(datasets()["filtered_shuffled"](), model=model)


ALL = [*KINDS, *(f"{name}-unseeded" for name in DATASETS), *(f"{name}-job" for name in KINDS)]


def main():
    name, _, suffix = sys.argv[1].partition("-")
    if suffix != "unseeded":
        keras.utils.set_random_seed(7)
    KINDS[name]()


if __name__ == "__main__":
    main()
