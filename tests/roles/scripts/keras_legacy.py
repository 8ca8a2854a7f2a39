"""A tf_keras script: EPOCHS."""

import json
import os
import sys

os.environ["TF_USE_LEGACY_KERAS"] = "1"

import data
import numpy as np
import tensorflow as tf


class Count(tf.keras.callbacks.Callback):
    """What it keeps is set anew when a training begins, as that of `EarlyStopping` is."""

    def on_train_begin(self, logs=None):
        self.epochs, self.losses = 0, np.zeros(0)

    def on_epoch_end(self, epoch, logs=None):
        self.epochs, self.losses = self.epochs + 1, np.append(self.losses, logs["loss"])


inputs, labels = data.samples(1000)
test_inputs, test_labels = data.samples(301, seed=1)
model = tf.keras.Sequential([tf.keras.layers.InputLayer((32,)), tf.keras.layers.Dense(16), tf.keras.layers.Dense(10)])
loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
model.compile(tf.keras.optimizers.Adam(0.01), loss, metrics=["accuracy"])
epochs = int(sys.argv[1])
callbacks = [count := Count()]
validation = (test_inputs, test_labels)
history = model.fit(inputs, labels, epochs=epochs, verbose=1, validation_data=validation, callbacks=callbacks)
predicted = np.argmax(model.predict(test_inputs, verbose=0), axis=1)
result = {
    "keras": tf.keras.__name__,
    "history": history.history,
    "epochs": history.epoch,
    "counted": [count.epochs, count.losses.tolist()],
    "evaluated": model.evaluate(test_inputs, test_labels, verbose=0)[1],
    "predicted": float(np.mean(predicted == test_labels)),
    "devices": {variable.name.partition(":")[0]: variable.device for variable in model.variables},
}
print("RESULT", json.dumps(result), flush=True)
