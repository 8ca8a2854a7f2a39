"""What the tests of clusters of several hosts share: a script, and a look at the machines."""

from __future__ import annotations

import json
import re

from benchmarks.cluster_hosts import ClusterHosts

RESOURCES = ("cpus:1;mem:4000", "cpus:1;mem:4000", "cpus:1;mem:4000")
SCRIPT = """
import argparse, time
import numpy as np, keras

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--lr", type=float, default=0.01)
parser.add_argument("--pause", type=float, default=0.0)
options = parser.parse_args()
keras.utils.set_random_seed(1)
x = np.random.RandomState(0).rand(400, 20).astype("float32")
model = keras.Sequential([keras.Input((20,)), keras.layers.Dense(16, "relu"), keras.layers.Dense(1)])
model.compile(keras.optimizers.SGD(options.lr), "mse")


class Pause(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        time.sleep(options.pause)


history = model.fit(x, x.sum(1, keepdims=True), epochs=options.epochs, batch_size=40, verbose=2, callbacks=[Pause()])
model.save("model.keras")
print("final", history.history["loss"][-1])
"""


def final_loss(output: str) -> float:
    found = re.search(r"^final ([\d.e-]+)$", output, re.MULTILINE)
    assert found is not None, output
    return float(found[1])


def machines(hosts: ClusterHosts) -> dict[str, bool]:
    """Name -> whether it is active; empty while the master does not answer."""
    done = hosts.run(0, "dike", "cluster", "status", "--format", "json")
    if done.returncode:
        return {}
    return {one["name"]: one["active"] for one in json.loads(done.stdout)["machines"]}
