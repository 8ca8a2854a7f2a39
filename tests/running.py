"""The `dike` command as a process: run to its end, or running while a test observes it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

from tests import warm
from tests.waiting import Found, wait_until
from tests.warm import Warm

DEADLINE_S = 240.0
TIMEOUT_S = 300.0

Dike = Callable[..., subprocess.CompletedProcess[str]]


def dike_environment() -> dict[str, str]:
    """Our environment without what would change a run."""
    return {name: value for name, value in os.environ.items() if name not in ("DIKE_MASTER", "DIKE_TASK")}


def dike_command(*arguments: str | Path) -> list[str]:
    return [sys.executable, "-m", "framework", *map(str, arguments)]


def run_dike(*arguments: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Runs `dike ARGUMENTS...` and waits for its end."""
    return warm.run(dike_command(*arguments), cwd=cwd, env=dike_environment(), timeout=TIMEOUT_S)


class Running:
    """A `dike` process that runs while the test observes it.

    Args:
        folder: where it runs; gets its output.
        arguments: of the command.
    """

    started: ClassVar[list[subprocess.Popen[bytes]]] = []

    def __init__(self, folder: Path, *arguments: str | Path) -> None:
        self._log = folder / "stderr"
        self._output = folder / "stdout"
        with self._log.open("w") as stderr, self._output.open("w") as stdout:
            self.process = Warm(
                dike_command(*arguments), cwd=folder, env=dike_environment(), stdout=stdout, stderr=stderr
            )
        self.started.append(self.process)

    @classmethod
    def end_all(cls) -> None:
        """Kills all that still run."""
        for process in cls.started:
            process.kill()
            process.wait()
        cls.started.clear()

    @property
    def log(self) -> str:
        """What it has said on standard error."""
        return self._log.read_text()

    def wait_for(self, condition: Callable[[], Found | None], what: str) -> Found:
        """Waits for something while it runs."""
        return wait_until(condition, what, said=lambda: self.log, lost=self._has_ended, deadline_s=DEADLINE_S)

    def wait_for_text(self, text: str, times: int = 1) -> None:
        """Waits until the text was printed that number of times."""
        self.wait_for(lambda: self.log.count(text) >= times, f"'{text}' on standard error")

    def result(self, exit_code: int = 0) -> dict[str, Any]:
        """Waits for its end; what it has printed."""
        wait_until(self._has_ended, "its end", said=lambda: self.log, deadline_s=DEADLINE_S)
        assert self.process.returncode == exit_code, self.log
        text = self._output.read_text()
        return dict(json.loads(text)) if text else {}

    def _has_ended(self) -> bool:
        return self.process.poll() is not None
