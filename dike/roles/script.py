"""Runs the user's script as `python SCRIPT ARGS` would, with TensorFlow intercepted for the task's role."""

from __future__ import annotations

import atexit
import zlib
from collections.abc import Sequence
from types import ModuleType

from dike.interception import after_import
from dike.main_script import ScriptFailedError, exit_code_of, join_threads, run_as_main
from dike.profile import Api
from dike.reporting import reporter
from dike.roles.process import teardown, termination
from dike.task import TaskSpec
from dike.trial import randomness


def run(task: TaskSpec, argv: Sequence[str]) -> int:
    """Runs `argv[0]` with the arguments after it; returns the exit code.

    Raises:
        DikeError: what Dike itself raised inside the script.
    """
    if task.is_chief:
        termination.install()
    if task.api.has_separate_chief:
        # A script that is run again for the next attempt has to split its data as the first one did.
        randomness.install(zlib.crc32(task.job_id.encode()))
    after_import("tensorflow", lambda tensorflow: _install(task, tensorflow))
    reporter().started()
    code = 0
    try:
        run_as_main(argv[0], argv[1:])
    except SystemExit as exit_request:
        code = exit_code_of(exit_request)
    except ScriptFailedError:
        code = 1
    except KeyboardInterrupt:
        return 130
    try:
        join_threads()
    except KeyboardInterrupt:
        return 130
    return code


def _install(task: TaskSpec, tensorflow: ModuleType) -> None:
    """Imports the role's interception only now, because it needs TensorFlow."""
    # Last in, first out: what the interception and the script do at exit has all the time it needs, and only
    # TensorFlow's own functions, which may hang, are limited.
    atexit.register(teardown.begin)
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
