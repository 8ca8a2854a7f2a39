"""How processes have ended, in words."""

from __future__ import annotations

from executor.process import describe_exit


def test_exit_codes_and_signals_are_told_apart() -> None:
    assert describe_exit(3) == "exited with status 3"
    assert describe_exit(-9) == "ended by signal 9 (SIGKILL)"
    assert describe_exit(-200) == "ended by signal 200 (unknown)"
    assert describe_exit(None) == "was never started"
