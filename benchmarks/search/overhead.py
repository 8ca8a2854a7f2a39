"""Compares steps of a trial with the same steps of plain TensorFlow, in two processes that alternate."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.search.slot import slot_environment
from dike.trial import spec as specs
from dike.trial.spec import TrialSpec

SCRIPTS = Path(__file__).parent / "scripts"
PROCESSES = 3
"""Pairs of processes."""
TURNS = 20
"""Turns of each process, after one for warm-up."""
STEPS = 250
"""Steps of a turn: few, so that both turns of a pair find the machine in the same state."""
_READ_BYTES = 1 << 16


@dataclass(frozen=True)
class Turn:
    """Wall time of a turn, and CPU seconds of all threads of the process."""

    clock_s: float
    cpu_s: float


Pair = tuple[Turn, Turn]
"""Two consecutive turns: of plain TensorFlow, and of the trial."""


def take_turns(folder: Path, script: str, arguments: Sequence[str]) -> list[Pair]:
    """Runs one of `SCRIPTS` (see `scripts.turns`) plainly and as a trial, in turns.

    Raises:
        RuntimeError: if one of them ends early.
    """
    pairs = []
    command = [str(SCRIPTS / script), *arguments, "--turn-steps", str(STEPS)]
    for number in range(PROCESSES):
        with _plain(command, folder / f"plain-{number}.err") as plain, _trial(command, folder, number) as dike:
            plain.run_turn()
            dike.run_turn()
            for turn in range(TURNS):
                first, second = (dike.run_turn(), plain.run_turn()) if turn % 2 else (plain.run_turn(), dike.run_turn())
                pairs.append((second, first) if turn % 2 else (first, second))
    return pairs


class _Training:
    def __init__(self, process: subprocess.Popen[str], errors: Path) -> None:
        self._process = process
        self._errors = errors

    def run_turn(self) -> Turn:
        """Runs one turn.

        Raises:
            RuntimeError: if the process has ended.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write("\n")
            self._process.stdin.flush()
            clock_s, cpu_s = map(float, self._process.stdout.readline().split())
        except (BrokenPipeError, ValueError):
            raise RuntimeError(f"the training ended early:\n{self._errors.read_text()[-4000:]}") from None
        return Turn(clock_s, cpu_s)


@contextlib.contextmanager
def _plain(
    command: Sequence[str], errors: Path, variables: Sequence[tuple[str, str]] = (), fds: Sequence[int] = ()
) -> Iterator[_Training]:
    with (
        errors.open("wb") as stderr,
        subprocess.Popen(
            [sys.executable, *command],
            env={**slot_environment(dict(variables)), "PYTHONPATH": str(SCRIPTS.parents[2])},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            pass_fds=fds,
        ) as process,
    ):
        try:
            yield _Training(process, errors)
        finally:
            process.kill()


@contextlib.contextmanager
def _trial(command: Sequence[str], folder: Path, number: int) -> Iterator[_Training]:
    reader, report_fd = os.pipe()
    control_fd, control = os.pipe()
    drain = threading.Thread(target=_drain, args=(reader,), daemon=True)
    drain.start()
    spec = TrialSpec(
        "overhead", number, 0, {}, str(folder / f"trial-{number}"), None, report_fd=report_fd, control_fd=control_fd
    )
    launch = ["-P", "-m", "dike.trial.launch", *command]
    try:
        with _plain(
            launch, folder / f"dike-{number}.err", [(specs.VARIABLE, spec.dumps())], (report_fd, control_fd)
        ) as training:
            yield training
    finally:
        for descriptor in (report_fd, control_fd, control):
            os.close(descriptor)
        drain.join()
        os.close(reader)


def _drain(reader: int) -> None:
    while os.read(reader, _READ_BYTES):
        pass
