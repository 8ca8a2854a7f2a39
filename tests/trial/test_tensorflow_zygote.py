"""Trials that train with TensorFlow, forked from a zygote that has imported it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.trial.slot_stage import SlotStage, slot, trial

pytestmark = pytest.mark.tensorflow

EXAMPLES = Path(__file__).parents[2] / "examples"
LOOK = """
import sys
assert "tensorflow" in sys.modules and "keras" in sys.modules
from tensorflow.python.eager import context
assert not context.context()._initialized
import dike as tf
assert float(tf.reduce_sum(tf.data.Dataset.range(4).batch(4).get_single_element())) == 6
tf.report(1, loss=0.5)
"""


@pytest.fixture(scope="module")
def tensorflow_slot(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlotStage]:
    with slot(tmp_path_factory.mktemp("tensorflow"), ["tensorflow", "keras", "sklearn.datasets"]) as ready:
        yield ready


def test_nothing_has_run_in_the_zygote(tensorflow_slot: SlotStage, tmp_path: Path) -> None:
    run = tensorflow_slot.run(tensorflow_slot.write("look.py", LOOK), trial(tmp_path))
    assert run.code == 0, run.output
    assert "not preloaded" not in (tensorflow_slot.folder / "zygote.out").read_text()
    assert "DIKE_MASTER" not in (tensorflow_slot.folder / "zygote.out").read_text()


def test_a_script_of_sessions_is_suspended(tensorflow_slot: SlotStage, tmp_path: Path) -> None:
    run = tensorflow_slot.start(EXAMPLES / "digits_v1.py", trial(tmp_path), ["--steps", "100000", "--seed", "1"])
    run.read(until=lambda report: report["type"] == "progress")
    run.suspend()
    run.read()
    assert run.code == 75, run.output
    assert run.of("training") == [{"type": "training", "preemptible": True}]
    assert run.of("progress")[0]["loss"] > 0
    path, step = (run.reports[-1][name] for name in ("path", "step"))
    run = tensorflow_slot.run(
        EXAMPLES / "digits_v1.py", trial(tmp_path, run=1, resume_from=path), ["--steps", str(step + 20), "--seed", "1"]
    )
    assert run.code == 0, run.output
    assert run.of("restored")[0]["step"] == step
    assert run.reports[-1]["step"] == step + 20


def test_a_function_of_an_example_trains(tensorflow_slot: SlotStage, tmp_path: Path) -> None:
    spec = trial(tmp_path, call=0, parameters={"lr": 0.01, "units": 16}, metric="test_accuracy")
    run = tensorflow_slot.run(EXAMPLES / "tune_function.py", spec)
    assert run.code == 0, run.output
    assert run.reports[-1]["type"] == "result"
    assert run.reports[-1]["value"] > 0.8
    assert "best of" not in run.output
