"""Small data that a linear model can learn: ten classes, each a noisy pattern of 32 numbers."""

from __future__ import annotations

import numpy as np


def samples(count: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    patterns = np.random.RandomState(42).rand(10, 32)
    random = np.random.RandomState(seed)
    labels = random.randint(0, 10, count)
    return (patterns[labels] + 0.3 * random.randn(count, 32)).astype("float32"), labels.astype("int32")


def halves(count: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """The same in two classes: labels 0.0 and 1.0, of shape [count, 1]."""
    inputs, classes = samples(count, seed)
    return inputs, (classes[:, None] > 4).astype("float32")
