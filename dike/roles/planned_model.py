"""Checks in the chief that the script's model is the planned one, if its profile was cached by an earlier command.

Dike reads a model again if anything has changed that it tracks. A script may depend on more, such as a data set
elsewhere; so the chief compares the variables before anything is trained or written.
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
    command: tuple[str, ...]
    folder: str
    environment: dict[str, str]


_start: _Start | None = None


def remember_start(argv: Sequence[str]) -> None:
    """Must be called before the script, which is `argv[0]`, runs, as it may change all of it."""
    global _start
    environment = {name: value for name, value in os.environ.items() if name not in (VARIABLE, "TF_CONFIG")}
    _start = _Start(tuple(argv), os.getcwd(), environment)


def check(task: TaskSpec, variables: Callable[[], Iterable[tuple[str, Any]]]) -> None:
    """Compares the variables, by unique name, with the planned ones. Chiefs call it before they use checkpoints.

    If they differ, `dike.capture` replaces this process, reports the script's model, and ends with
    `EXIT_CODE_OTHER_MODEL`.
    """
    if task.cached_batch_size is None or task.report_fd is None or not task.is_chief or _start is None:
        return
    specs = [VariableSpec.of(name, variable, is_trained=True) for name, variable in variables()]
    if checkpoints.fingerprint_of(specs) == task.fingerprint:
        return
    print("dike: the model is not the planned one; reading it again.", file=sys.stderr, flush=True)
    sys.stdout.flush()
    reporter().close()
    os.set_inheritable(task.report_fd, True)
    options = ["--report-fd", str(task.report_fd), "--batch-size", str(task.cached_batch_size)]
    os.chdir(_start.folder)
    # -P: a script's folder may hold files named as our packages or as Python's own.
    command = [sys.executable, "-P", "-u", "-m", "dike.capture", *options, *_start.command]
    os.execve(sys.executable, command, _start.environment)  # noqa: S606 (its own interpreter)
