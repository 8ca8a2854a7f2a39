"""How processes have ended, in words."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from executor import forked
from executor.forked import ForkedProcess
from executor.process import describe_exit, oom_kills, wait_readable


def test_exit_codes_and_signals_are_distinguished() -> None:
    assert describe_exit(3) == "exited with status 3"
    assert describe_exit(-9) == "ended by signal 9 (SIGKILL)"
    assert describe_exit(-200) == "ended by signal 200 (unknown)"
    assert describe_exit(None) == "was never started"


def test_the_kernel_says_how_many_processes_it_has_ended_for_want_of_memory(tmp_path: Path) -> None:
    vmstat = tmp_path / "vmstat"
    assert oom_kills(vmstat) == 0
    vmstat.write_text("nr_free_pages 5516134\noom_kill 7\nnuma_hit 3\n")
    assert oom_kills(vmstat) == 7
    vmstat.write_text("nr_free_pages 5516134\n")  # a kernel before 4.13
    assert oom_kills(vmstat) == 0


@pytest.mark.integration
@pytest.mark.parametrize("oom_killed", [False, True])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_process_that_the_kernel_has_ended_for_want_of_memory_says_so(
    monkeypatch: pytest.MonkeyPatch, number: signal.Signals, oom_killed: bool
) -> None:
    counts = iter([3, 3 + oom_killed])
    monkeypatch.setattr(forked, "oom_kills", lambda: next(counts))
    process = _sleeping()
    os.kill(process.pid, number)
    _wait(process)
    said = process.describe_end("--slot-mem")
    assert said.startswith(describe_exit(-number))
    assert ("ran out of memory" in said and "--slot-mem" in said) == (oom_killed and number is signal.SIGKILL)


@pytest.mark.integration
def test_a_process_that_was_killed_as_its_time_was_up_says_nothing_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = iter([3, 4])
    monkeypatch.setattr(forked, "oom_kills", lambda: next(counts))
    process = _sleeping()
    process.set_deadline(0.0)
    assert process.kill_if_due()
    _wait(process)
    assert process.describe_end("--slot-mem") == "ended by signal 9 (SIGKILL)"


def _sleeping() -> ForkedProcess:
    return ForkedProcess(os.posix_spawn("/bin/sleep", ["sleep", "60"], os.environ, setpgroup=0))


def _wait(process: ForkedProcess) -> None:
    wait_readable(process.watched_fds, 60.0)
    process.poll()
