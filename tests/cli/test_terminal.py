"""Commands at a terminal, where they show live tables and escape what scripts print."""

from __future__ import annotations

import os
import pty
import subprocess
from pathlib import Path

import pytest

from tests.running import TIMEOUT_S, dike_command, dike_environment

pytestmark = [pytest.mark.mesos, pytest.mark.timeout(400)]

TRAINING = """
import keras, numpy as np
model = keras.Sequential([keras.layers.Dense(1)])
model.compile("sgd", "mse")
x = np.ones((64, 2), "float32")
print("BEFORE \\x1b]0;title\\x07")
model.fit(x, x[:, :1], epochs=3, verbose=2)
print("AFTER")
"""
REPORTING = """
import dike
for step in range(1, 4):
    print("STEP", step)
    dike.report(step, loss=dike.params()["lr"] / step)
"""


def at_terminal(folder: Path, *arguments: str) -> tuple[int, str]:
    """Runs a command whose streams are all a terminal; returns its exit code and what the terminal gets."""
    leader, follower = pty.openpty()
    try:
        process = subprocess.Popen(
            dike_command(*arguments),
            cwd=folder,
            env={**dike_environment(), "TERM": "xterm", "COLUMNS": "140"},
            stdin=follower,
            stdout=follower,
            stderr=follower,
        )
    finally:
        os.close(follower)
    shown = b""
    try:
        while data := os.read(leader, 1 << 16):
            shown += data
    except OSError:
        pass  # the terminal has ended with its last process
    finally:
        os.close(leader)
    return process.wait(TIMEOUT_S), shown.decode(errors="replace")


@pytest.mark.tensorflow
@pytest.mark.parametrize("options", [(), ("--strategy", "ps", "--max-workers", "1")], ids=["plain", "ps"])
def test_run_shows_what_the_script_prints(tmp_path: Path, options: tuple[str, ...]) -> None:
    (tmp_path / "train.py").write_text(TRAINING)
    code, shown = at_terminal(tmp_path, "run", *options, "train.py")
    assert code == 0, shown[-4000:]
    assert "BEFORE" in shown
    assert "AFTER" in shown
    assert "Epoch 3/3" in shown
    assert "\x1b]0;title" not in shown, "a script must not control the terminal"
    assert "worker:0" in shown, "the live table"
    assert "Traceback" not in shown


def test_tune_shows_its_table_and_its_result(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(REPORTING)
    code, shown = at_terminal(tmp_path, "tune", "train.py", "--param", "lr=1,2", "--name", "s", "--slot-mem", "256")
    assert code == 0, shown[-4000:]
    assert "Best trials" in shown
    assert "Traceback" not in shown
    for command in (("trials", "s"), ("logs", "s", "--trial", "0"), ("timeline", "s"), ("trials",)):
        code, shown = at_terminal(tmp_path, *command)
        assert code == 0, shown[-4000:]
    code, shown = at_terminal(tmp_path, "logs", "s", "--trial", "1")
    assert "STEP 3" in shown
