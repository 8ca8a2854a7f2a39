"""Runs the trial that `DIKE_TRIAL` describes: `python -P -m dike.trial.launch SCRIPT [ARGS...]`.

A zygote's forks call `run` instead. Exit code: 0 at the end of the script, EXIT_SUSPENDED (see `dike.trial.spec`), 2
for unusable input, else the script's own.
"""

from __future__ import annotations

import argparse
import atexit
import faulthandler
import functools
import importlib
import os
import re
import shutil
import sys
import threading
import traceback
import zlib
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, NoReturn

from dike import own_distribution, process, randomness
from dike.exceptions import BadInputError, DikeError
from dike.interception import after_import
from dike.main_script import ScriptFailedError, exit_code_of, join_threads, run_as_main
from dike.trial import folders
from dike.trial.pickled import FUNCTION_SUFFIX
from dike.trial.runtime import TrialRuntime, runtime
from dike.trial.spec import EXIT_BAD_INPUT, GPU_MEMORY_VARIABLE
from dike.trial.train_function import train_from_file

INTERCEPTIONS = {
    "tensorflow": "dike.v1.trial",
    "keras": "dike.keras3.trial",
    "tf_keras": "dike.tf_keras.trial",
}
"""Library -> our module whose `install` makes its training loops report and suspend. It may import the library."""
COMPANIONS = {**INTERCEPTIONS, "torch": "torch._dynamo"}
"""Library -> module that its trials also import: Dike's interception; for PyTorch, what the first optimizer imports."""

_EXIT_INTERRUPTED = 130


def run(argv: Sequence[str]) -> NoReturn:
    """Runs the script `argv[0]` with the arguments after it, or the function pickled in it. Ends the process."""
    trial = runtime()
    if trial is None or not argv:
        print("dike: This process is not a trial; start searches with 'dike tune SCRIPT'.", file=sys.stderr)
        sys.exit(EXIT_BAD_INPUT)
    process.set_name(f"dike trial {trial.spec.number}")
    faulthandler.enable()  # shows where a native library crashed
    os.environ["DIKE_CHECKPOINT_DIR"] = trial.spec.folder
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    trial.spec = folders.adopt(trial.spec)
    if trial.spec.processes > 1:
        _start_others(trial)
    randomness.install(zlib.crc32(f"{trial.spec.search} {trial.spec.number}".encode()))
    trial.listen()
    trial.started()
    for library, module in INTERCEPTIONS.items():
        after_import(library, functools.partial(_install, trial, module))
    if gpu_memory := os.environ.get(GPU_MEMORY_VARIABLE):
        for library, limit in (("tensorflow", limit_tensorflow), ("torch", limit_torch)):
            after_import(library, functools.partial(limit, int(gpu_memory)))
    conclude(trial, lambda: _run(trial, argv), argv[1:])


def _start_others(trial: TrialRuntime) -> None:
    """Forks the other processes of a trial whose script distributes itself; returns in each of them.

    Each has its own GPU, if there are as many, and a copy of the working folder. They end with the first process.
    """
    first, size = os.getpid(), trial.spec.processes
    addresses = [f"{own_distribution.LOCALHOST}:{port}" for port in own_distribution.free_ports(size)]
    own = os.getcwd()
    folders = [f"{own}-process-{number}" for number in range(size)]
    for folder in folders[1:]:
        shutil.rmtree(folder, ignore_errors=True)  # of an earlier run
        shutil.copytree(own, folder, symlinks=True)
    others, index = [], 0
    for number in range(1, size):
        pid = os.fork()
        if not pid:
            index = number
            break
        others.append(pid)
    devices = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    has_gpu = len(devices) == size
    if has_gpu:
        os.environ["CUDA_VISIBLE_DEVICES"] = devices[index]
    own_distribution.install(addresses, index, has_gpu=has_gpu)
    if not index:
        for number, pid in enumerate(others, 1):
            threading.Thread(
                target=_end_with, args=(trial, number, pid), name=f"dike-rank-{number}", daemon=True
            ).start()
        return
    process.die_with_parent(first)
    trial.follow()
    os.chdir(folders[index])
    os.environ["DIKE_OUTPUT_DIR"] = folders[index]
    # What they print counts from the first process only; errors are shown.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _end_with(trial: TrialRuntime, number: int, pid: int) -> None:
    """Fails the trial when another of its processes fails."""
    _, status = os.waitpid(pid, 0)
    code = os.waitstatus_to_exitcode(status)
    if code and not trial.has_ended:
        trial.failed(f"process {number} of {trial.spec.processes} ended with exit code {code}")
        trial.leave(1)


def _run(trial: TrialRuntime, argv: Sequence[str]) -> None:
    if argv[0].endswith(FUNCTION_SUFFIX):
        train_from_file(trial, argv[0])
    else:
        run_as_main(argv[0], argv[1:])


def conclude(trial: TrialRuntime, body: Callable[[], object], arguments: Sequence[str] = ()) -> NoReturn:
    """Runs the rest of a trial, reports its outcome and ends the process.

    `arguments` are the script's, to recognize a complaint about one of them.
    """
    code = _run_to_end(trial, body, arguments)
    process.teardown.exit_code = code
    # The script's exit functions have no time limit; those of TensorFlow have.
    atexit._run_exitfuncs()
    process.teardown.end()
    trial.leave(code)


def _run_to_end(trial: TrialRuntime, body: Callable[[], object], arguments: Sequence[str]) -> int:
    pid = os.getpid()
    try:
        try:
            body()
        except SystemExit as request:
            code = exit_code_of(request)
            process.end_if_forked(pid, code)
            if code:
                return _explain_exit(trial, request, code, arguments)
        process.end_if_forked(pid, 0)
        trial.has_ended = True
        join_threads()
        trial.check_reported()
        trial.end()
    except DikeError as error:
        print(f"dike: {error}", file=sys.stderr)
        (trial.refuse if isinstance(error, BadInputError) else trial.failed)(str(error))
        return error.exit_code
    except ScriptFailedError as error:
        process.end_if_forked(pid, 1)
        trial.failed(f"the script {error}")
        return 1
    except KeyboardInterrupt:
        return _EXIT_INTERRUPTED
    return 0


def _explain_exit(trial: TrialRuntime, request: SystemExit, code: int, arguments: Sequence[str]) -> int:
    """Reports an exit with an error code and returns it; code 2 before the first step means an unknown argument."""
    complaint = None if trial.is_training else _argument_error(request, arguments)
    if complaint is None and (trial.is_training or code != EXIT_BAD_INPUT):
        why = f": {request.code}" if isinstance(request.code, str) else f" with exit code {code}"
        trial.failed(f"the script exited{why}")
        return code
    detail = f": {complaint.rstrip('.')}" if complaint else ", see its own message"
    trial.refuse(
        f"The script refuses its arguments{detail}; name the parameters as its flags, add --param-style key=value if "
        "it takes lr=0.1, or read them with dike.params() and add --param-style none."
    )
    return EXIT_BAD_INPUT


def _argument_error(request: SystemExit, arguments: Sequence[str]) -> str | None:
    """Returns the message of the argument parser that ended the script; None if no parser did."""
    if isinstance(request.code, str) and any(_names_argument(request.code, word) for word in arguments):
        return request.code.strip().partition("\n")[0]
    cause = request.__context__
    if type(cause).__module__.startswith("absl.flags"):
        return str(cause).partition("\n")[0]
    if callable(describe := getattr(cause, "format_message", None)):
        return str(describe())  # click and typer
    for frame, _ in traceback.walk_tb(request.__traceback__):
        if frame.f_code.co_name == "error" and isinstance(frame.f_locals.get("self"), argparse.ArgumentParser):
            return str(frame.f_locals.get("message"))
    return None


def _names_argument(text: str, word: str) -> bool:
    """Whether a text names an argument or its flag. A value alone may appear in it by chance."""
    flag, equals, _ = word.partition("=")
    named = flag if flag.startswith("-") else word if equals else ""
    return bool(named) and re.search(rf"(?<![\w-]){re.escape(named)}(?![\w-])", text) is not None


def limit_tensorflow(mib: int, tensorflow: Any) -> None:
    """Limits the GPU memory that TensorFlow allocates in this process, before it uses a GPU."""
    config = tensorflow.config
    gpus = config.list_physical_devices("GPU")
    for gpu in gpus:
        config.set_logical_device_configuration(gpu, [config.LogicalDeviceConfiguration(memory_limit=mib)])
    if gpus:
        # TensorFlow refuses this call of many scripts beside a limit; memory grows anyway (TF_FORCE_GPU_ALLOW_GROWTH).
        config.experimental.set_memory_growth = lambda device, enable: None


def limit_torch(mib: int, torch: Any) -> None:
    """Limits the GPU memory that PyTorch allocates in this process."""
    for device in range(torch.cuda.device_count()):
        share = (mib << 20) / torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, share), device)


def _install(trial: TrialRuntime, module: str, library: ModuleType) -> None:
    if library.__name__ == "tensorflow":
        # Exit functions run last in, first out: the script's run before this one, TensorFlow's own after it.
        atexit.register(process.teardown.begin)
    importlib.import_module(module).install(trial)


def main() -> NoReturn:
    process.die_with_parent()
    run(sys.argv[1:])


if __name__ == "__main__":
    main()
