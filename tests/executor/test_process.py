"""A child process: its output, its end, and that nothing of it stays behind."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path

import pytest

from executor import output
from executor.process import ChildProcess, Command, describe_exit
from tests.waiting import is_alive, wait_until

pytestmark = pytest.mark.integration

DEADLINE_S = 120.0


@pytest.fixture(autouse=True)
def patient_copiers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Output is not to be missing because the machine has stood still for a moment."""
    monkeypatch.setattr(output, "DRAIN_S", DEADLINE_S)


class Run:
    """Runs a Python program as a child in a thread of its own."""

    def __init__(self, program: str, folder: Path) -> None:
        self.output: dict[str, bytearray] = {"stdout": bytearray(), "stderr": bytearray()}
        self.started = threading.Event()
        self.exit_code: int | None = None
        command = Command([sys.executable, "-c", program], folder, dict(os.environ))
        self.child = ChildProcess(command, self._on_output)
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _run(self) -> None:
        self.exit_code = self.child.run(self.started.set)

    def _on_output(self, stream: str, data: bytes) -> None:
        self.output[stream] += data

    def join(self) -> int | None:
        self.thread.join(DEADLINE_S)
        assert not self.thread.is_alive()
        return self.exit_code


def test_output_of_both_streams_is_copied_whole(tmp_path: Path) -> None:
    run = Run("import sys; sys.stdout.write('a' * 100_000); sys.stderr.write('b' * 5)", tmp_path)
    assert run.join() == 0
    assert bytes(run.output["stdout"]) == b"a" * 100_000
    assert bytes(run.output["stderr"]) == b"b" * 5
    assert run.child.log_bytes == {"stdout": 100_000, "stderr": 5}
    assert len(run.child.tail) < 10_000


def test_exit_codes_and_signals_are_told_apart(tmp_path: Path) -> None:
    assert Run("raise SystemExit(3)", tmp_path).join() == 3
    assert Run("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", tmp_path).join() == -9
    assert describe_exit(3) == "exited with status 3"
    assert describe_exit(-9) == "ended by signal 9 (SIGKILL)"


def test_a_child_that_ignores_sigterm_is_killed(tmp_path: Path) -> None:
    run = Run(
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(600)",
        tmp_path,
    )
    wait_until(lambda: run.output["stdout"], "the child's output")
    run.child.kill(grace_s=0.2)
    assert run.join() == -9
    assert run.child.kill_requested


def test_grandchildren_go_with_the_child(tmp_path: Path) -> None:
    run = Run(
        "import subprocess, sys; p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']);"
        "print(p.pid, flush=True)",
        tmp_path,
    )
    assert run.join() == 0
    grandchild = int(run.output["stdout"])
    wait_until(lambda: not is_alive(grandchild), "the grandchild's end")


def test_a_kill_before_the_start_prevents_it(tmp_path: Path) -> None:
    command = Command([sys.executable, "-c", "raise SystemExit(1)"], tmp_path, dict(os.environ))
    child = ChildProcess(command, lambda *_: None)
    child.kill(grace_s=1)
    assert child.run(lambda: pytest.fail("it was started")) is None


def test_a_program_that_does_not_exist_is_an_os_error(tmp_path: Path) -> None:
    child = ChildProcess(Command([str(tmp_path / "nothing")], tmp_path, {}), lambda *_: None)
    with pytest.raises(FileNotFoundError):
        child.run(lambda: None)
