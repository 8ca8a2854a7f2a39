"""A search whose best epoch is not its last: its model, exported, is as good as the search says, in plain Keras."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests import warm
from tests.running import dike_environment, run_dike
from tests.warm import WarmTensorFlow

pytestmark = [pytest.mark.mesos, pytest.mark.timeout(300)]

SCRIPT = Path(__file__).parent / "scripts" / "overfitting.py"
PLAIN = """
import sys
sys.path.insert(0, sys.argv[1])
import keras, overfitting
assert "Scaled" in str(keras.models.load_model("best.keras").layers)
model = overfitting.made(1.0)
model.load_weights("best.weights.h5")
for each in (keras.models.load_model("best.keras"), model):
    print("LOSS", each.evaluate(overfitting.test_x, overfitting.test_y, batch_size=10, verbose=0))
"""


def python(*arguments: str | Path, cwd: Path) -> str:
    command = [sys.executable, *arguments]
    done = warm.run(command, cwd=cwd, env=dike_environment(), timeout=200, process_class=WarmTensorFlow)
    assert done.returncode == 0, done.stderr
    return done.stdout


def refused(folder: Path, *arguments: str) -> str:
    done = run_dike("export", "overfitting", *arguments, cwd=folder)
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    (sentence,) = done.stderr.strip().splitlines()
    return sentence


def test_the_best_epoch_is_loaded_and_exported(tmp_path: Path) -> None:
    said = next(line for line in python(SCRIPT, cwd=tmp_path).splitlines() if line.startswith("FOUND"))
    step, best_step, best, last, loaded, of_last = map(float, said.split()[1:])
    assert step == 72
    assert best_step < step
    assert best < last
    assert (loaded, of_last) == (pytest.approx(best, abs=1e-6), pytest.approx(last, abs=1e-6))

    told = run_dike("export", "overfitting", "-o", "best.keras", cwd=tmp_path)
    assert f"trial 0 at step {best_step:.0f}, val_loss {best:.6g}, to best.keras" in told.stdout, told.stderr
    assert run_dike("export", "overfitting", "-o", "best.weights.h5", cwd=tmp_path).returncode == 0
    lines = python("-c", PLAIN, SCRIPT.parent, cwd=tmp_path).splitlines()
    losses = [float(line.split()[1]) for line in lines if line.startswith("LOSS")]
    assert losses == [pytest.approx(best, abs=1e-6)] * 2

    assert "exists already" in refused(tmp_path, "-o", "best.keras")
    assert "end it in .keras or .weights.h5" in refused(tmp_path, "-o", "best.h5")
    assert "has no trial 7" in refused(tmp_path, "--trial", "7")
    shown = run_dike("trials", "overfitting", cwd=tmp_path).stdout
    assert f"at best {best:.4g} at step {best_step:.0f}" in shown
    for checkpoint in (tmp_path / "dike-runs" / "overfitting" / "trial-0").glob("*-step-*"):
        (checkpoint / "dike-trial.json").unlink()
    assert "There is no whole checkpoint" in refused(tmp_path)
