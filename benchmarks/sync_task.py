"""A Keras script of the benchmark `sync`: prints the time after each step, with the loss.

    python -P -m dike.launch sync_task.py PARAMETER_MB COMPUTE_S STEPS

An accelerator computes a step in COMPUTE_S: one machine has too few cores for several, so a layer waits as long, in
proportion to its part of the batch.
"""

import sys
import time
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from tensorflow.python.data.experimental.ops.testing import sleep

PARAMETER_MB, COMPUTE_S, STEPS = float(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])
BATCH = 24
WIDTH = 500
"""Inputs and outputs of each layer: 1 MB of weights."""

keras.utils.set_random_seed(1)


class Accelerator(keras.layers.Layer):
    def call(self, x: tf.Tensor) -> tf.Tensor:
        # An operation of the graph, which a worker of parameter servers runs, too. It waits before the end as well.
        microseconds = tf.cast(COMPUTE_S / 2 * 1e6 / BATCH * tf.cast(tf.shape(x)[0], tf.float32), tf.int64)
        waited = tf.data.Dataset.from_tensors(0.0).apply(sleep(microseconds)).get_single_element()
        return x + waited


class Clock(keras.callbacks.Callback):
    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        print("STEP", batch, time.monotonic(), float(logs["loss"]), flush=True)


layers = [keras.layers.Dense(WIDTH, use_bias=False) for _ in range(round(PARAMETER_MB))]
model = keras.Sequential([keras.Input((WIDTH,)), Accelerator(), *layers, keras.layers.Dense(1)])
model.compile(keras.optimizers.SGD(1e-4), "mse")
rng = np.random.default_rng(0)
x = rng.normal(size=(BATCH * STEPS, WIDTH)).astype("float32")
model.fit(x, x.mean(axis=1), batch_size=BATCH, shuffle=False, verbose=0, callbacks=[Clock()])
