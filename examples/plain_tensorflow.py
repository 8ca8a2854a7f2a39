"""An ordinary TensorFlow script that knows nothing of Dike: a multi-layer perceptron on tf.data.

python examples/plain_tensorflow.py
dike run examples/plain_tensorflow.py
"""

import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits

tf.keras.utils.set_random_seed(7)
features, labels = load_digits(return_X_y=True)
features = (features / 16.0).astype(np.float32)
order = np.random.default_rng(7).permutation(len(features))
train, test = order[:1440], order[1440:]

dataset = tf.data.Dataset.from_tensor_slices((features[train], labels[train])).shuffle(1440, seed=7).batch(32)
test_dataset = tf.data.Dataset.from_tensor_slices((features[test], labels[test])).batch(64)

inputs = tf.keras.Input((64,))
hidden = tf.keras.layers.Dense(256, activation="relu")(inputs)
hidden = tf.keras.layers.BatchNormalization()(hidden)
hidden = tf.keras.layers.Dense(128, activation="relu")(hidden)
outputs = tf.keras.layers.Dense(10, activation="softmax")(hidden)
model = tf.keras.Model(inputs, outputs)
model.compile(optimizer="rmsprop", loss="sparse_categorical_crossentropy", metrics=["accuracy"])
model.summary()

model.fit(dataset, epochs=8, verbose=2)
loss, accuracy = model.evaluate(test_dataset, verbose=0)
print(f"test loss: {loss:.4f}")
print(f"test accuracy: {accuracy:.4f}")
