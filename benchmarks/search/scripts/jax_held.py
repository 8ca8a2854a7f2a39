"""Trains a multilayer perceptron with JAX on a GPU; `--mib` allocates additional GPU memory."""

from __future__ import annotations

import argparse
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import dike

parser = argparse.ArgumentParser()
parser.add_argument("--mib", type=int, default=0)
arguments = parser.parse_args()

SIZES = ((256, 1024), (1024, 1024), (1024, 1))
key = jax.random.key(7)
inputs = jax.random.normal(key, (8192, SIZES[0][0]))
targets = jnp.sin(inputs.sum(1))
held = jnp.zeros(arguments.mib << 20, jnp.uint8)
weights = [
    jax.random.normal(jax.random.fold_in(key, number), size) * size[0] ** -0.5 for number, size in enumerate(SIZES)
]


def loss_of(weights, inputs, targets):
    hidden = jnp.tanh(jnp.tanh(inputs @ weights[0]) @ weights[1])
    return jnp.mean((hidden @ weights[2] - targets[:, None]) ** 2)


@jax.jit
def trained(weights, key):
    chosen = jax.random.randint(key, (256,), 0, len(inputs))
    loss, gradients = jax.value_and_grad(loss_of)(weights, inputs[chosen], targets[chosen])
    return [old - 0.05 * gradient for old, gradient in zip(weights, gradients, strict=True)], loss


def save(folder: str) -> None:
    np.savez(Path(folder, "weights.npz"), *weights)


def restore(folder: str) -> None:
    with np.load(Path(folder, "weights.npz")) as file:
        weights[:] = [jnp.asarray(file[name]) for name in file.files]


step = dike.checkpoint(save, restore)
while True:
    weights[:], loss = trained(weights, jax.random.fold_in(key, step))
    step += 1
    dike.report(step, loss=float(loss))
