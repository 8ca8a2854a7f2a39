"""What the framework's tests share: the `dike` command as a process, and a private Mesos."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 300.0

Dike = Callable[..., subprocess.CompletedProcess[str]]


def dike_environment() -> dict[str, str]:
    """Our environment without what would change a run."""
    return {name: value for name, value in os.environ.items() if name not in ("DIKE_MASTER", "DIKE_TASK")}


def dike_command(*arguments: str | Path) -> list[str]:
    return [sys.executable, "-m", "framework", *map(str, arguments)]


def run_dike(*arguments: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Runs `dike ARGUMENTS...` and waits for its end."""
    return subprocess.run(
        dike_command(*arguments), cwd=cwd, env=dike_environment(), capture_output=True, text=True, timeout=TIMEOUT_S
    )


@pytest.fixture
def dike(tmp_path: Path) -> Dike:
    """Runs `dike ARGUMENTS...` in a folder of its own and waits for its end."""
    return functools.partial(run_dike, cwd=tmp_path)


@pytest.fixture
def examples() -> Path:
    return ROOT / "examples"
