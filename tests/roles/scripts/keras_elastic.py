"""Several fits whose weights count how often each sample was trained; each attempt but the last is interrupted."""

import json
import os
import signal
import sys

import keras
import numpy as np
import tensorflow as tf

SAMPLES, BATCH = 240, 8
PER_EPOCH = SAMPLES // BATCH
EPOCHS = 3
if "SEED" in os.environ:
    keras.utils.set_random_seed(int(os.environ["SEED"]))
split = np.random.permutation(SAMPLES)
numbers = np.arange(SAMPLES)
attempt = json.loads(os.environ["DIKE_TASK"])["attempt"]
result = {"fits": {}}
print("SPLIT", split[:9].tolist(), flush=True)


class Count(keras.losses.Loss):
    """Its gradient adds one to the weight of each sample in the batch."""

    def call(self, y_true, y_pred):
        return -y_pred[:, 0, 0]


class Interrupt(keras.callbacks.Callback):
    """Ends the process in the middle of an epoch or a validation; counts the steps of all attempts."""

    def __init__(self, fit, in_validation):
        super().__init__()
        self.fit, self.in_validation, self.epoch, self.steps = fit, in_validation, 0, 0

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch

    def on_train_batch_end(self, batch, logs=None):
        self.steps += 1
        self.end(batch, not self.in_validation)

    def on_test_batch_end(self, batch, logs=None):
        self.end(batch, self.in_validation)

    def end(self, batch, now):
        if now and self.fit == attempt and self.epoch == 1 and batch == 5:
            os.kill(os.getpid(), signal.SIGTERM)


class Shuffled(keras.utils.PyDataset):
    """Batches of the samples, in another order in every epoch."""

    def __init__(self):
        super().__init__()
        self.order = np.random.permutation(SAMPLES)

    def __len__(self):
        return PER_EPOCH

    def __getitem__(self, index):
        chosen = self.order[index * BATCH : (index + 1) * BATCH]
        return chosen, np.zeros(BATCH)

    def on_epoch_end(self):
        np.random.shuffle(self.order)


def generator():
    while True:
        for batch in np.split(numbers, PER_EPOCH):
            yield batch, np.zeros(BATCH)


dataset = tf.data.Dataset.from_tensor_slices((numbers, np.zeros(SAMPLES)))
kinds = {
    "arrays": {"x": numbers, "y": np.zeros(SAMPLES), "batch_size": BATCH},
    "dataset": {"x": dataset.shuffle(50).batch(BATCH)},
    "endless": {"x": dataset.shuffle(SAMPLES).repeat().batch(BATCH), "steps_per_epoch": PER_EPOCH // 2},
    "py_dataset": {"x": Shuffled()},
    "generator": {"x": generator(), "steps_per_epoch": PER_EPOCH},
}
for fit, kind in enumerate(sys.argv[1:]):
    model = keras.Sequential(
        [keras.Input((1,), dtype="int32"), keras.layers.Embedding(SAMPLES, 1, embeddings_initializer="zeros")]
    )
    model.compile(keras.optimizers.SGD(1.0), Count(reduction="sum"))
    epochs = EPOCHS * (2 if kind == "endless" else 1)
    interrupt = Interrupt(fit, kind == "endless")
    validation = (numbers, np.zeros(SAMPLES)) if kind == "endless" else None
    history = model.fit(**kinds[kind], epochs=epochs, verbose=0, callbacks=[interrupt], validation_data=validation)
    counts = np.asarray(model.weights[0]).ravel()
    result["fits"][kind] = {
        "counts": sorted(set(counts.tolist())),
        "steps": interrupt.steps,
        "losses": history.history["loss"],
        "validations": len(history.history.get("val_loss", ())),
    }
print("RESULT", json.dumps(result), flush=True)
