"""The random state of a trial, carried from one process to another."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from tests import warm
from tests.warm import WarmTensorFlow

pytestmark = pytest.mark.integration

HERE = Path(__file__).parent
ROOT = HERE.parent.parent

ORDINARY = """
import pickle, copy, random, sys
from dike import randomness
randomness.install(7)
import numpy as np
generator, legacy = np.random.default_rng(), np.random.RandomState(3)
assert isinstance(generator, np.random.Generator) and isinstance(legacy, np.random.RandomState)
assert isinstance(np.random.mtrand._rand, np.random.RandomState)
assert not isinstance(generator, np.random.RandomState)
assert np.random.default_rng(generator) is generator
assert repr(generator).startswith("Generator(PCG64)")
assert np.random.default_rng(7).random() == np.random.Generator(np.random.PCG64(7)).random()
assert legacy.rand() == np.random.RandomState(3).rand()
for each in (generator, legacy):
    for twin in (copy.deepcopy(each), pickle.loads(pickle.dumps(each))):
        assert twin.standard_normal() == copy.deepcopy(each).standard_normal()
assert len(generator.spawn(2)) == 2
assert random.Random(3).random() == random.Random(3).random()
assert 0.0 <= random.SystemRandom().random() < 1.0
before = len(randomness.state()["generators"])
del generator, legacy, each, twin
assert len(randomness.state()["generators"]) == before - 2
"""


def run(*command: str | Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "-1"}
    done = warm.run([sys.executable, *command], timeout=120, env=environment, process_class=WarmTensorFlow)
    assert done.returncode == 0, done.stderr


def test_generators_behave_as_numpys_own_and_are_forgotten_when_they_are_gone() -> None:
    run("-c", ORDINARY)


@pytest.mark.tensorflow
def test_every_generator_continues_where_it_was(tmp_path: Path) -> None:
    run(HERE / "randomness_draws.py", tmp_path)
    drawn = json.loads((tmp_path / "drawn.json").read_text())
    again = json.loads((tmp_path / "again.json").read_text())
    assert again == drawn
    assert all(len(set(values)) > 1 for values in drawn.values())


def test_forks_of_one_process_do_not_share_their_numbers() -> None:
    run(
        "-c",
        "import os, sys, numpy\n"
        "def draw(to, seed):\n"
        "    from dike import randomness\n"
        "    randomness.install(seed)\n"
        "    os.write(to, numpy.random.bytes(8)); os._exit(0)\n"
        "drawn = set()\n"
        "for seed in range(3):\n"
        "    source, to = os.pipe()\n"
        "    if os.fork() == 0: draw(to, seed)\n"
        "    os.wait(); drawn.add(os.read(source, 8))\n"
        "assert len(drawn) == 3, drawn\n",
    )
