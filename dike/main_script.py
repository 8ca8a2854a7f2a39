"""Runs a user's script as Python itself would: as `__main__`, with its own arguments and import path."""

from __future__ import annotations

import builtins
import os
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import TypeVar

from dike.exceptions import DikeError

T = TypeVar("T")


class ScriptFailedError(Exception):
    """The script ended with an exception, whose traceback has been printed; the message is one clause about it."""


class ScriptSyntaxError(ScriptFailedError):
    """The script is not Python."""


def run_as_main(script: str, arguments: Sequence[str]) -> None:
    """Runs the script in this process to its end.

    Raises:
        ScriptSyntaxError: if the script is not Python.
        ScriptFailedError: if the script raises anything but what follows.
        SystemExit, KeyboardInterrupt: if the script raises it.
        DikeError: what Dike itself raised inside the script.
        OSError: if the script cannot be read.
    """
    with open(script, "rb") as file:
        source = file.read()
    path = os.path.abspath(script)
    module = ModuleType("__main__")
    module.__dict__.update(__file__=path, __builtins__=builtins, __cached__=None)
    sys.modules["__main__"] = module
    sys.argv[:] = [script, *arguments]
    folder = os.path.dirname(os.path.realpath(script))
    if sys.flags.safe_path:
        sys.path.insert(0, folder)
    else:
        sys.path[0] = folder
    try:
        code = compile(source, path, "exec", dont_inherit=True)
    except (SyntaxError, ValueError) as error:
        traceback.print_exception(type(error), error, None)
        line = f" in line {error.lineno}" if isinstance(error, SyntaxError) and error.lineno else ""
        reason = error.msg if isinstance(error, SyntaxError) else str(error)
        raise ScriptSyntaxError(f"has a syntax error{line} ({reason})") from error
    call_script(lambda: exec(code, module.__dict__))  # noqa: S102 - running the script is what this module is for


def call_script(function: Callable[[], T]) -> T:
    """Calls what is the script's own, and returns what it returns.

    Args:
        function: calls it at once: its own frame is left out of tracebacks.

    Raises:
        ScriptFailedError: if it raises anything but what follows.
        SystemExit, KeyboardInterrupt: if it raises it.
        DikeError: what Dike itself raised inside.
    """
    try:
        return function()
    except DikeError:
        raise
    except Exception as error:
        # The first frames are this function and the one given, which Python itself would not show.
        trace = error.__traceback__
        for _ in range(2):
            trace = trace.tb_next if trace is not None else None
        traceback.print_exception(type(error), error, trace)
        raise ScriptFailedError(f"failed ({one_line(error)})") from error


def exit_code_of(request: SystemExit) -> int:
    """The exit code that Python itself would end with; text is printed as it would be."""
    if request.code is None:
        return 0
    if isinstance(request.code, int):
        return request.code
    print(request.code, file=sys.stderr)
    return 1


def join_threads() -> None:
    """Waits for the script's threads, as Python does at its end; daemons are left."""
    for function in reversed(threading._threading_atexits):  # type: ignore[attr-defined]
        function()  # lets the idle threads of pools end
    while living := [
        thread for thread in threading.enumerate() if not thread.daemon and thread is not threading.main_thread()
    ]:
        for thread in living:
            thread.join()


def one_line(error: Exception) -> str:
    """Type and first line of an error's message, without a full stop."""
    first = (str(error).strip().splitlines() or [""])[0].rstrip(".")
    return f"{type(error).__name__}: {first}" if first else type(error).__name__
