"""A search of trials that do nothing: `python trivial.py TRIALS SLOTS`."""

from __future__ import annotations

import sys

import dike


def train(x: float, y: float) -> float:
    return (x - 1) ** 2 + y**2


dike.tune(
    train,
    {"x": (-2.0, 2.0), "y": (-2.0, 2.0)},
    trials=int(sys.argv[1]),
    slots=int(sys.argv[2]),
    sampler="random",
    policy="fifo",
    name="many",
)
