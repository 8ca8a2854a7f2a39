"""Starts the process of a training job that `DIKE_TASK` describes: `python -P -m dike.launch SCRIPT [ARGS...]`.

A ps, and a worker whose chief hands out the steps, only serve. Any other process runs the user's script as
`python SCRIPT ARGS` would, with TensorFlow intercepted for its role; the only task of a job without parameter servers
is not even told of a cluster (`dike.plain_task`).

A zygote's forks call `run` instead. Exit code: the script's own; 2 for input Dike cannot use; 143 after SIGTERM.
"""

from __future__ import annotations

import atexit
import faulthandler
import importlib
import json
import os
import sys
import zlib
from collections.abc import Sequence
from typing import NoReturn

from dike import plain_task, process, randomness
from dike import task as tasks
from dike.exceptions import DikeError
from dike.interception import after_import
from dike.main_script import ScriptFailedError, exit_code_of, join_threads, run_as_main
from dike.profile import Api
from dike.reporting import reporter
from dike.roles import planned_model, server
from dike.task import TaskSpec

INTERCEPTIONS = {
    Api.GRAPH: "dike.v1.job",
    Api.KERAS: "dike.keras3.job",
    Api.TF_KERAS: "dike.tf_keras.job",
    Api.COORDINATOR: "dike.roles.cluster",
}
"""How a script trains -> our module whose `install` makes that distributed. It may import TensorFlow."""
COMPANIONS = {
    "tensorflow": "dike.v1.job.plain",
    "keras": "dike.keras3.job.fit",
    "tf_keras": "dike.tf_keras.job",
}
"""Library -> our module that makes its training distributed."""


def run(argv: Sequence[str]) -> NoReturn:
    """Plays the role of the task in the environment, and ends the process."""
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        # All forks of a zygote would draw the same numbers; Python's own generator sees to that itself.
        numpy_random.seed()
    _leave(main(argv))


def main(argv: Sequence[str]) -> int:
    """Plays the role of the task in the environment; returns the process' exit code."""
    task = tasks.current()
    if task is None:
        print(f"dike: {tasks.VARIABLE} is not set; start jobs with 'dike run'.", file=sys.stderr)
        return 2
    if not argv:
        print("dike: The script is missing; start jobs with 'dike run SCRIPT'.", file=sys.stderr)
        return 2
    process.die_with_parent()
    process.set_name(f"dike {task.name}")
    faulthandler.enable()  # a library that crashes says where
    if not task.is_plain:
        os.environ["TF_CONFIG"] = json.dumps(task.tf_config)
        # Without it a call to a server that is still starting fails instead of waiting.
        os.environ.setdefault("GRPC_FAIL_FAST", "use_caller")
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    try:
        if server.is_server(task):
            server.serve(task)
        return _run_script(task, argv)
    except DikeError as error:
        print(f"dike: {error}", file=sys.stderr)
        return error.exit_code


def _run_script(task: TaskSpec, argv: Sequence[str]) -> int:
    """Runs `argv[0]` with the arguments after it; returns the exit code.

    Raises:
        DikeError: what Dike itself raised inside the script.
    """
    if task.is_chief:
        process.termination.install()
    if task.is_plain or task.api.has_separate_chief:
        # A script that is run again for the next attempt has to split its data as the first one did.
        randomness.install(zlib.crc32(task.job_id.encode()))
    after_import("tensorflow", lambda _: _intercept(task))
    end = plain_task.install(task) if task.is_plain else None
    planned_model.remember_start(argv)
    reporter().started()
    process.before_exit(reporter().close)
    code, pid = 0, os.getpid()
    try:
        run_as_main(argv[0], argv[1:])
    except SystemExit as exit_request:
        code = exit_code_of(exit_request)
        if code in process.OWN_EXIT_CODES:
            # The framework would take it for what Dike says by it.
            print(f"dike: the script has ended itself with exit code {code}; it counts as 1.", file=sys.stderr)
            code = 1
    except ScriptFailedError:
        code = 1
    except KeyboardInterrupt:
        return 130
    process.end_if_forked(pid, code)
    try:
        join_threads()
        if end is not None and code == 0:
            end()
    except KeyboardInterrupt:
        return 130
    return code


def _intercept(task: TaskSpec) -> None:
    """Imports the interception only now, because it needs TensorFlow."""
    # Last in, first out: what the interception and the script do at exit has all the time it needs, and only
    # TensorFlow's own functions, which may hang, are limited.
    atexit.register(process.teardown.begin)
    if not task.is_plain:
        if task.is_chief:
            plain_task.check_layout(task)
        importlib.import_module(INTERCEPTIONS[task.api]).install(task)


def _leave(code: int) -> NoReturn:
    """Ends the process at once: a gRPC server may never end."""
    process.teardown.exit_code = code
    atexit._run_exitfuncs()  # the script's own; those of TensorFlow have limited time
    process.teardown.end()
    reporter().close()
    if code == 0 and process.termination.is_the_scripts:
        # It was told to end, and did; that is not the end of its work.
        code = process.EXIT_CODE_TERMINATED
    process.end_process(code)


if __name__ == "__main__":
    run(sys.argv[1:])
