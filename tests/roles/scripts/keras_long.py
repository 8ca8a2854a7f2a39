"""A longer Keras 3 fit, to be interrupted: EPOCHS."""

import json
import sys

import data
import keras

inputs, labels = data.samples(3200)
model = keras.Sequential([keras.Input((32,)), keras.layers.Dense(16, activation="relu"), keras.layers.Dense(10)])
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
model.compile(keras.optimizers.Adam(0.01), loss, metrics=["accuracy"])
history = model.fit(inputs, labels, batch_size=16, epochs=int(sys.argv[1]), verbose=0)
result = {
    "history": history.history,
    "epochs": history.epoch,
    "iterations": int(model.optimizer.iterations),
    "evaluated": model.evaluate(inputs, labels, verbose=0, return_dict=True),
}
print("RESULT", json.dumps(result), flush=True)
