"""Starts the process of a training job that `DIKE_TASK` describes: `python -P -m dike.launch SCRIPT [ARGS...]`.

A ps, and a worker whose chief hands out the steps, run a TensorFlow server. Any other process runs the user's script as
`python SCRIPT ARGS` would, with TensorFlow intercepted for its role. A zygote's forks call `run` instead. Exit code:
the script's own; 2 for bad input; 143 after SIGTERM.
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

from dike import own_distribution, plain_task, process, randomness
from dike import task as tasks
from dike.exceptions import DikeError
from dike.interception import after_import
from dike.main_script import ScriptFailedError, exit_code_of, join_threads, run_as_main
from dike.profile import Api
from dike.reporting import reporter
from dike.roles import planned_model, server
from dike.task import Role, TaskSpec

INTERCEPTIONS = {
    Api.GRAPH: "dike.v1.job",
    Api.KERAS: "dike.keras3.job",
    Api.TF_KERAS: "dike.tf_keras.job",
    Api.COORDINATOR: "dike.roles.cluster",
}
"""How the script trains -> our module whose `install` distributes it; it may import TensorFlow."""
COMPANIONS = {
    "tensorflow": "dike.v1.job.plain",
    "keras": "dike.keras3.job.fit",
    "tf_keras": "dike.tf_keras.job",
}
"""Library -> our module that a zygote imports with it."""


def run(argv: Sequence[str]) -> NoReturn:
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        # All forks of a zygote would draw the same numbers. Python reseeds its own generator in a fork.
        numpy_random.seed()
    _exit(main(argv))


def main(argv: Sequence[str]) -> int:
    """Returns the exit code."""
    task = tasks.current()
    if task is None:
        print(f"dike: {tasks.VARIABLE} is not set; start jobs with 'dike run'.", file=sys.stderr)
        return 2
    if not argv:
        print("dike: The script is missing; start jobs with 'dike run SCRIPT'.", file=sys.stderr)
        return 2
    process.die_with_parent()
    process.set_name(f"dike {task.name}")
    faulthandler.enable()
    if not task.is_plain:
        os.environ["TF_CONFIG"] = json.dumps(task.tf_config)
        # Without it a call to a server that is still starting fails instead of waiting.
        os.environ.setdefault("GRPC_FAIL_FAST", "use_caller")
    elif task.distributes_itself:
        own_distribution.install(task.cluster[Role.WORKER], task.index, has_gpu=task.gpus > 0)
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    try:
        if server.is_server(task):
            server.serve(task)
        return _run_script(task, argv)
    except DikeError as error:
        print(f"dike: {error}", file=sys.stderr)
        return error.exit_code


def _run_script(task: TaskSpec, argv: Sequence[str]) -> int:
    if task.is_chief or task.is_synchronous:
        process.termination.install()
    if task.is_plain or task.api.has_separate_chief:
        # The script has to split its data in the same way in every attempt.
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
            # For the framework these codes have a meaning of Dike's.
            print(f"dike: the script exits with exit code {code}; it counts as 1.", file=sys.stderr)
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
    # Exit handlers run last in, first out: those of the interception and the script have no time limit, but those of
    # TensorFlow, which may hang, have.
    atexit.register(process.teardown.begin)
    if not task.is_plain:
        if task.is_chief:
            plain_task.check_layout(task)
        importlib.import_module(INTERCEPTIONS[task.api]).install(task)


def _exit(code: int) -> NoReturn:
    """Ends the process immediately: a gRPC server may never end."""
    process.teardown.exit_code = code
    atexit._run_exitfuncs()
    process.teardown.end()
    reporter().close()
    if code == 0 and process.termination.handled_by_script:
        # The script ended early because of SIGTERM.
        code = process.EXIT_CODE_TERMINATED
    process.end_process(code)


if __name__ == "__main__":
    run(sys.argv[1:])
