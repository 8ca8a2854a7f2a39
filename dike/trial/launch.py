"""Runs the trial that `DIKE_TRIAL` describes: `python -P -m dike.trial.launch SCRIPT [ARGS...]`.

A zygote's forks call `run` instead. Exit codes: see `dike.trial.spec`.
"""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from dike.exceptions import BadInputError, DikeError
from dike.interception import after_import
from dike.main_script import ScriptFailedError, join_threads, run_as_main
from dike.trial import randomness
from dike.trial.runtime import TrialRuntime, runtime
from dike.trial.spec import EXIT_BAD_INPUT


def run(argv: Sequence[str]) -> NoReturn:
    """Runs `argv[0]` with the arguments after it as `__main__`, and ends the process."""
    trial = runtime()
    if trial is None or not argv:
        print("dike: this is no trial; start searches with 'dike tune SCRIPT'.", file=sys.stderr)
        sys.exit(EXIT_BAD_INPUT)
    os.environ["DIKE_CHECKPOINT_DIR"] = trial.spec.folder
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    randomness.install()
    trial.listen()
    trial.started()
    after_import("tensorflow", lambda _: _watch_sessions(trial))
    after_import("keras", lambda _: _watch_fit(trial))
    try:
        code = _run_script(trial, argv)
        atexit._run_exitfuncs()
    except BadInputError as error:
        trial.refuse(str(error))
        print(f"dike: {error}", file=sys.stderr)
        code = EXIT_BAD_INPUT
    except DikeError as error:
        trial.failed(str(error))
        print(f"dike: {error}", file=sys.stderr)
        code = error.exit_code
    trial.leave(code)


def _run_script(trial: TrialRuntime, argv: Sequence[str]) -> int:
    try:
        run_as_main(argv[0], argv[1:])
    except ScriptFailedError as error:
        trial.failed(str(error))
        return 1
    except SystemExit as request:
        code = _exit_code(request)
        if code != 0:
            _explain_exit(trial, code)
            return code
    except KeyboardInterrupt:
        return 130
    join_threads()
    trial.check_reported()
    if trial.save_at_end is not None:
        trial.save_at_end()
    return 0


def _explain_exit(trial: TrialRuntime, code: int) -> None:
    """A script that ends with 2 before its first step has refused its arguments, as argparse does."""
    if code == EXIT_BAD_INPUT and not trial.is_training:
        trial.refuse("The script has refused its arguments; its own message is above.")
    else:
        trial.failed(f"the script has ended itself with exit code {code}")


def _exit_code(request: SystemExit) -> int:
    if request.code is None:
        return 0
    if isinstance(request.code, int):
        return request.code
    print(request.code, file=sys.stderr)
    return 1


def _watch_sessions(trial: TrialRuntime) -> None:
    from dike.trial import graph

    graph.install(trial)


def _watch_fit(trial: TrialRuntime) -> None:
    from dike.trial import keras_fit

    keras_fit.install(trial)


def main() -> NoReturn:
    """Entry point of a trial that starts cold."""
    from dike.roles import process

    process.die_with_parent()
    run(sys.argv[1:])


if __name__ == "__main__":
    main()
