"""Starts the process of a training job that `DIKE_TASK` describes: `python -P -m dike.launch SCRIPT [ARGS...]`.

A zygote's forks call `run` instead. Exit code: the script's own; 2 for input Dike cannot use; 143 after SIGTERM.
"""

from __future__ import annotations

import atexit
import json
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from dike import task as tasks
from dike.exceptions import DikeError
from dike.process_end import end_process
from dike.reporting import reporter
from dike.roles import process, script, server

COMPANIONS = {
    "tensorflow": "dike.roles.graph.plain",
    "keras": "dike.roles.keras_fit.fit",
    "tf_keras": "dike.roles.tf_keras_fit",
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
    os.environ["TF_CONFIG"] = json.dumps(task.tf_config)
    # Without it a call to a server that is still starting fails instead of waiting.
    os.environ.setdefault("GRPC_FAIL_FAST", "use_caller")
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    try:
        if server.is_server(task):
            server.serve(task)
        return script.run(task, argv)
    except DikeError as error:
        print(f"dike: {error}", file=sys.stderr)
        return error.exit_code


def _leave(code: int) -> NoReturn:
    """Ends the process at once: a gRPC server may never end."""
    process.teardown.exit_code = code
    atexit._run_exitfuncs()  # the script's own; those of TensorFlow have limited time
    process.teardown.end()
    reporter().close()
    if code == 0 and process.termination.is_the_scripts:
        # It was told to end, and did; that is not the end of its work.
        code = process.EXIT_CODE_TERMINATED
    end_process(code)


if __name__ == "__main__":
    run(sys.argv[1:])
