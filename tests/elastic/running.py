"""A `dike` command that goes on while a test looks at it."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest

from tests.framework.conftest import dike_command, dike_environment

DEADLINE_S = 240.0


class Running:
    """A `dike` that goes on while the test looks at it."""

    started: ClassVar[list[subprocess.Popen[bytes]]] = []

    def __init__(self, folder: Path, *arguments: str | Path) -> None:
        self._log = folder / "stderr"
        self._output = folder / "stdout"
        with self._log.open("w") as stderr, self._output.open("w") as stdout:
            self.process = subprocess.Popen(
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
        return self._log.read_text()

    def wait_for(self, look: Callable[[], Any], what: str) -> Any:
        deadline = time.monotonic() + DEADLINE_S
        while not (found := look()):
            if time.monotonic() > deadline or self.process.poll() is not None:
                self.process.kill()
                pytest.fail(f"{what} did not come true\n{self.log}")
            time.sleep(0.05)
        return found

    def wait_for_text(self, text: str, times: int = 1) -> None:
        self.wait_for(lambda: self.log.count(text) >= times, f"'{text}' on standard error")

    def result(self) -> dict[str, Any]:
        self.process.wait(DEADLINE_S)
        assert self.process.returncode == 0, self.log
        return dict(json.loads(self._output.read_text()))
