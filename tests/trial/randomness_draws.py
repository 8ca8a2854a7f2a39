"""Draws from generators of all kinds, saves their state, and continues in a second process with that state.

`python randomness_draws.py FOLDER`: what the first process drew after it saved -> FOLDER/drawn.json, what the second
one drew -> FOLDER/again.json, both as lists by kind. Both are forks of one process that has imported all libraries.
"""

from __future__ import annotations

import importlib.util
import json
import os
import random
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import tensorflow as tf

from dike import randomness

HAS_TORCH = importlib.util.find_spec("torch") is not None
if HAS_TORCH:
    import torch

Draw = Callable[[], float]


def early() -> dict[str, Draw]:
    """Generators that a script makes at its top; none is seeded."""
    made = np.random.default_rng()
    legacy = np.random.RandomState()
    python = random.Random()
    same_line = [np.random.default_rng() for _ in range(3)]
    bits = {kind: np.random.default_rng(getattr(np.random, kind)()) for kind in ("MT19937", "Philox", "SFC64")}
    tf.random.set_seed(random.randrange(1000))
    draws: dict[str, Draw] = {
        "random": random.random,
        "random.gauss": lambda: random.gauss(0.0, 1.0),
        "random.Random": python.random,
        "numpy": lambda: float(np.random.rand()),
        "numpy.normal": lambda: float(np.random.normal()),
        "RandomState": lambda: float(legacy.rand()),
        "default_rng": made.random,
        # Half of a 64-bit word is kept for the next call.
        "default_rng.integers": lambda: int(made.integers(1 << 20, dtype=np.int32)),
        "tensorflow": lambda: float(tf.random.uniform([])),
        "tensorflow.generator": lambda: float(tf.random.get_global_generator().uniform([])),
    }
    draws.update({f"default_rng {number}": each.random for number, each in enumerate(same_line)})
    draws.update({kind: each.random for kind, each in bits.items()})
    if HAS_TORCH:
        draws["torch"] = lambda: float(torch.rand(()))
    return draws


def late() -> dict[str, Draw]:
    """Generators that it makes after the place where it is resumed."""
    return {"late": np.random.default_rng().random, "late seeded": np.random.default_rng(3).random}


def draw(draws: dict[str, Draw], times: int) -> dict[str, list[float]]:
    return {name: [each() for _ in range(times)] for name, each in draws.items()}


def first(folder: Path) -> None:
    randomness.install(7)
    draws = {**early(), **late()}
    np.random.default_rng(1).random()  # is gone when the state is saved
    draw(draws, 3)
    (folder / "state.json").write_text(json.dumps(randomness.state()))
    (folder / "drawn.json").write_text(json.dumps(draw(draws, 5)))


def second(folder: Path) -> None:
    randomness.install(7)
    draws = early()
    draw(draws, 7)
    randomness.restore(json.loads((folder / "state.json").read_text()))
    # What waits for its generator is not lost if the trial is saved again before.
    assert randomness.state() == json.loads((folder / "state.json").read_text())
    draws.update(late())
    (folder / "again.json").write_text(json.dumps(draw(draws, 5)))


def main() -> None:
    folder = Path(sys.argv[1])
    for part in (first, second):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                part(folder)
                code = 0
            finally:
                if code:
                    sys.excepthook(*sys.exc_info())
                os._exit(code)
        if os.waitpid(child, 0)[1]:
            sys.exit(f"{part.__name__} failed")


if __name__ == "__main__":
    main()
