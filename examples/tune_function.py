"""Searches the hyper-parameters of a Keras model from within Python, then trains the best one for longer.

    python examples/tune_function.py

No Mesos is needed: without a master the search runs on a private one on this machine. With DIKE_MASTER=HOST:PORT, or
`master=` in the call, it runs on that cluster.
"""

from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import dike as tf

digits = load_digits()
train_x, test_x, train_y, test_y = train_test_split(digits.data / 16.0, digits.target, test_size=0.2, random_state=7)


def train(lr: float, units: int, dropout: float = 0.0, epochs: int = 5) -> float:
    """Returns the accuracy on the test set."""
    tf.keras.utils.set_random_seed(7)
    model = tf.keras.Sequential(
        [
            tf.keras.layers.Dense(units, activation="relu"),
            tf.keras.layers.Dropout(dropout),
            tf.keras.layers.Dense(10, activation="softmax"),
        ]
    )
    model.compile(tf.keras.optimizers.Adam(lr), "sparse_categorical_crossentropy", metrics=["accuracy"])
    model.fit(train_x, train_y, batch_size=64, epochs=epochs, verbose=0)
    return model.evaluate(test_x, test_y, verbose=0)[1]


found = tf.grid_search(train, {"lr": [0.01, 0.001], "units": [16, 64]}, metric="test_accuracy", mode="max")
print(f"best of {len(found.trials)}: {found.best_params}, test accuracy {found.best_value:.3f}")
print(f"trained for longer: {train(**found.best_params, epochs=20):.3f}")
