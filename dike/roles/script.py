"""Runs the user's script as `python SCRIPT ARGS` would, with TensorFlow intercepted for the task's role."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import ModuleType

from dike.interception import after_import
from dike.main_script import ScriptFailedError, run_as_main
from dike.profile import Api
from dike.reporting import reporter
from dike.roles.process import termination
from dike.task import TaskSpec


def run(task: TaskSpec, argv: Sequence[str]) -> int:
    """Runs `argv[0]` with the arguments after it; returns the exit code.

    Raises:
        DikeError: what Dike itself raised inside the script.
    """
    if task.is_chief:
        termination.install()
    after_import("tensorflow", lambda tensorflow: _install(task, tensorflow))
    reporter().started()
    try:
        run_as_main(argv[0], argv[1:])
    except SystemExit as exit_request:
        return _exit_code(exit_request)
    except ScriptFailedError:
        return 1
    except KeyboardInterrupt:
        return 130
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
