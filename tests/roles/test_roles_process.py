"""A chief that is asked to end saves first, as long as the environment gives it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.integration

CHIEF = """
import sys, time
from dike import process
process.SAVE_TIMEOUT_S = 0.0
process.termination.install()
process.termination.enable_saving()
print("trains", flush=True)
while not process.termination.requested:
    time.sleep(0.01)
time.sleep(float(sys.argv[1]))  # a save
print("saved", flush=True)
process.termination.exit()
"""


# The save that times out is a long one, because the thread that ends the process may be scheduled late.
@pytest.mark.parametrize(("timeout_s", "save_s", "does"), [("600", "0.5", "saved\n"), (None, "300", "")])
def test_the_environment_says_how_long_a_save_may_take(timeout_s: str | None, save_s: str, does: str) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "DIKE_SAVE_TIMEOUT_S"}
    if timeout_s is not None:
        environment["DIKE_SAVE_TIMEOUT_S"] = timeout_s
    command = [sys.executable, "-c", CHIEF, save_s]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as chief:
        assert chief.stdout is not None
        try:
            assert chief.stdout.readline() == "trains\n"
            chief.terminate()
            assert chief.stdout.read() == does
        except BaseException:
            chief.kill()
            raise
    assert chief.returncode == 143
