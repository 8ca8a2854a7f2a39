"""Runs the user's script as `python SCRIPT ARGS` would, with TensorFlow intercepted for the task's role."""

from __future__ import annotations

import os
import runpy
import sys
import traceback
from collections.abc import Sequence
from types import ModuleType, TracebackType

from dike.exceptions import DikeError
from dike.interception import after_import
from dike.profile import Api
from dike.reporting import reporter
from dike.roles.process import termination
from dike.task import TaskSpec


def run(task: TaskSpec, argv: Sequence[str]) -> int:
    """Runs `argv[0]` with the arguments after it; returns the exit code.

    Raises:
        DikeError: what Dike itself raised inside the script.
    """
    path = os.path.abspath(argv[0])
    if task.is_chief:
        termination.install()
    after_import("tensorflow", lambda tensorflow: _install(task, tensorflow))
    reporter().started()
    sys.argv = [argv[0], *argv[1:]]
    sys.path.insert(0, os.path.dirname(path))
    try:
        runpy.run_path(path, run_name="__main__")
    except SystemExit as exit_request:
        return _exit_code(exit_request)
    except DikeError:
        raise
    except KeyboardInterrupt:
        return 130
    except BaseException as error:  # as the interpreter does: whatever the script raises is shown and ends it
        traceback.print_exception(type(error), error, _of_script(error.__traceback__, path))
        return 1
    return 0


def _install(task: TaskSpec, tensorflow: ModuleType) -> None:
    """Imports the role's interception only now, because it needs TensorFlow."""
    if task.api is Api.GRAPH:
        from dike.roles import graph

        graph.install(task, tensorflow)
    elif task.api is Api.KERAS:
        from dike.roles import keras_fit

        keras_fit.install(task)
    elif task.api is Api.TF_KERAS:
        from dike.roles import tf_keras_fit

        tf_keras_fit.install(task)
    else:
        from dike.roles import coordinated

        coordinated.install(task)


def _exit_code(exit_request: SystemExit) -> int:
    if exit_request.code is None:
        return 0
    if isinstance(exit_request.code, int):
        return exit_request.code
    print(exit_request.code, file=sys.stderr)
    return 1


def _of_script(trace: TracebackType | None, path: str) -> TracebackType | None:
    """The part of a traceback that begins in the script; all of it where it never got there."""
    frame = trace
    while frame is not None:
        if frame.tb_frame.f_code.co_filename == path:
            return frame
        frame = frame.tb_next
    return trace
