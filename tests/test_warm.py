"""Forks that stand for Pythons of their own are like them."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests import warm
from tests.warm import Warm

pytestmark = pytest.mark.integration

LOOK = """
import os, sys
print(__name__, sys.argv, sys.path[0], os.getcwd(), os.environ["DIKE_TEST"], repr(sys.stdin.read()), flush=True)
print("framework.cli.tune" in sys.modules, file=sys.stderr)
if sys.argv[1] == "raise":
    raise ValueError("of the module")
if sys.argv[1] == "kill":
    os.kill(os.getpid(), int(sys.argv[2]))
sys.exit(int(sys.argv[2]))
"""


@pytest.mark.parametrize("does", [("exit", "3"), ("raise",), ("kill", "9"), ("kill", "2")], ids=" ".join)
def test_a_module_runs_as_in_a_python_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, does: tuple[str, ...]
) -> None:
    (tmp_path / "look.py").write_text(LOOK)
    monkeypatch.setenv("DIKE_TEST", "a value")
    command = [sys.executable, "-m", "look", *does]
    said = []
    for process_class in (Warm, subprocess.Popen):
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        with process_class(command, cwd=tmp_path, text=True, **pipes) as process:
            stdout, stderr = process.communicate("input", timeout=60)
        assert process.poll() == process.returncode
        forked, *errors = stderr.splitlines()
        assert forked == str(process_class is Warm)
        said.append((process.returncode, stdout, errors[-1:]))
    assert said[0] == said[1]


def test_it_is_waited_for_and_ended(tmp_path: Path) -> None:
    (tmp_path / "stay.py").write_text("import time\nprint('stays', flush=True)\ntime.sleep(600)\n")
    with Warm([sys.executable, "-m", "stay"], cwd=tmp_path, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"stays\n"
        assert process.poll() is None
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.01)
        process.terminate()
        assert process.wait(60) == -signal.SIGTERM


def test_a_variable_that_imports_may_read_makes_it_a_python_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "look.py").write_text(LOOK)
    monkeypatch.setenv("DIKE_TEST", "a value")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    done = warm.run([sys.executable, "-m", "look", "exit", "0"], timeout=60, cwd=tmp_path, stdin=subprocess.DEVNULL)
    assert (done.returncode, done.stderr) == (0, "False\n")
