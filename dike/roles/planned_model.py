"""The chief of a job that was planned for a model read earlier makes sure that it still is the model.

Dike reads a script's model again where anything has changed that it knows of. A script may read what Dike does not know
of, such as a data set elsewhere. The chief notices before anything is trained or written, and reads the model itself.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from dike import checkpoints
from dike.profile import VariableSpec
from dike.reporting import reporter
from dike.task import VARIABLE, TaskSpec


@dataclass(frozen=True)
class _Start:
    """How this process has begun to run the script."""

    command: tuple[str, ...]
    folder: str
    environment: dict[str, str]


_start: _Start | None = None


def remember_start(argv: Sequence[str]) -> None:
    """To be called before the script runs, which may change all of it.

    Args:
        argv: the script and its arguments.
    """
    global _start
    environment = {name: value for name, value in os.environ.items() if name not in (VARIABLE, "TF_CONFIG")}
    _start = _Start(tuple(argv), os.getcwd(), environment)


def check(task: TaskSpec, variables: Callable[[], Iterable[tuple[str, Any]]]) -> None:
    """Compares the model's variables with the planned ones; to be called by the chief before it touches checkpoints.

    Where they differ it does not come back: in the place of this process `dike.capture` reads the script's model,
    reports it, and ends with `EXIT_CODE_OTHER_MODEL`.

    Args:
        task: the chief's task.
        variables: gives unique name and variable of all that a profile would hold.
    """
    if task.kept_batch_size is None or task.report_fd is None or not task.is_chief or _start is None:
        return
    specs = [VariableSpec.of(name, variable, is_trained=True) for name, variable in variables()]
    if checkpoints.fingerprint_of(specs) == task.fingerprint:
        return
    print("dike: the model is not the one that was planned for; reading it again.", file=sys.stderr, flush=True)
    sys.stdout.flush()
    reporter().close()
    os.set_inheritable(task.report_fd, True)
    options = ["--report-fd", str(task.report_fd), "--batch-size", str(task.kept_batch_size)]
    os.chdir(_start.folder)
    # -P: a script's folder may hold files named as our packages or as Python's own.
    command = [sys.executable, "-P", "-u", "-m", "dike.capture", *options, *_start.command]
    os.execve(sys.executable, command, _start.environment)  # noqa: S606 (its own interpreter)
