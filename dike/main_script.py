"""Runs a user's script as Python itself would: as `__main__`, with its own arguments and import path."""

from __future__ import annotations

import builtins
import importlib.util
import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from importlib.machinery import ModuleSpec
from types import CellType, CodeType, ModuleType
from typing import Any, TypeVar

from dike.exceptions import BadInputError, DikeError
from dike.tracebacks import error_lines

T = TypeVar("T")

MODULE_VARIABLE = "DIKE_MODULE"
"""Environment variable: the module to run instead of the script, as `python -m` does."""


class ScriptFailedError(Exception):
    """The script raised an exception, whose traceback has been printed; the message is one clause about it."""


class ScriptSyntaxError(ScriptFailedError):
    """The script is not valid Python."""


def run_as_main(script: str, arguments: Sequence[str]) -> None:
    """Runs the script in this process to its end; or the module in `DIKE_MODULE`, as `python -m` does.

    `sys.argv[0]` becomes `script`, unchanged.

    Raises:
        ScriptSyntaxError: if the script is not valid Python.
        ScriptFailedError: if the script raises anything but what follows.
        SystemExit, KeyboardInterrupt: if the script raises it.
        DikeError: if Dike raised it inside the script, or there is no such module.
        OSError: if the script cannot be read.
    """
    # Processes that the script starts must not inherit it.
    name = os.environ.pop(MODULE_VARIABLE, "")
    path = os.path.abspath(script)
    folder = os.getcwd() if name else os.path.dirname(os.path.realpath(script))
    module = become_main([path if name else script, *arguments], folder)
    module.__dict__.update(__file__=path, __cached__=None)
    try:
        if name:
            code = _code_of_module(name, module)
        else:
            with open(path, "rb") as file:
                code = compile(file.read(), path, "exec", dont_inherit=True)
    except (SyntaxError, ValueError) as error:
        traceback.print_exception(type(error), error, None)
        line = f" in line {error.lineno}" if isinstance(error, SyntaxError) and error.lineno else ""
        reason = error.msg if isinstance(error, SyntaxError) else str(error)
        raise ScriptSyntaxError(f"has a syntax error{line} ({reason})") from error
    call_script(lambda: exec(code, module.__dict__))  # noqa: S102 - running the script is what this module is for


def become_main(argv: Sequence[str], folder: str) -> ModuleType:
    """Replaces `sys.argv`, the first entry of `sys.path` and `__main__`; returns the new, empty module."""
    module = ModuleType("__main__")
    module.__dict__.update(__builtins__=builtins)
    sys.modules["__main__"] = module
    sys.argv[:] = argv
    if sys.flags.safe_path:
        sys.path.insert(0, folder)
    else:
        sys.path[0] = folder
    return module


def _code_of_module(name: str, module: ModuleType) -> CodeType:
    """The code of a module, whose package gets imported; sets the attributes of `module` from its spec."""

    def find() -> ModuleSpec | None:
        spec = importlib.util.find_spec(name)
        is_package = spec is not None and spec.submodule_search_locations is not None
        return importlib.util.find_spec(f"{name}.__main__") if is_package else spec

    # Finding it imports its parent packages, which are code of the script.
    spec = call_script(find)
    get_code = getattr(None if spec is None else spec.loader, "get_code", None)
    code = None if spec is None or get_code is None else get_code(spec.name)
    if spec is None or code is None:
        raise BadInputError(f"There is no module {name} to run; name a module in the working folder with -m.")
    module.__dict__.update(
        __file__=spec.origin, __cached__=spec.cached, __spec__=spec, __loader__=spec.loader, __package__=spec.parent
    )
    sys.argv[0] = str(spec.origin)
    return code


def running_program() -> tuple[str, str] | None:
    """The file that this process runs, and its module name if started by `python -m`, else empty.

    None in a notebook, at a prompt, or if the module is outside the working folder.
    """
    if hasattr(sys, "ps1"):
        return None  # python -i: what is typed is not in the file
    main = sys.modules.get("__main__")
    path = getattr(main, "__file__", None)
    spec = getattr(main, "__spec__", None)
    if path is None or not os.path.isfile(path):
        return None
    if spec is None:
        return os.path.abspath(path), ""
    expected = os.path.join(os.getcwd(), *spec.name.split(".")) + ".py"
    is_in_working_folder = os.path.isfile(expected) and os.path.samefile(path, expected)
    return (os.path.abspath(path), spec.name.removesuffix(".__main__")) if is_in_working_folder else None


def call_script(function: Callable[[], T]) -> T:
    """Calls code of the script; wraps errors but DikeError, SystemExit and KeyboardInterrupt in ScriptFailedError."""
    try:
        return function()
    except DikeError:
        raise
    except Exception as error:
        sys.stderr.write("".join(error_lines(error)))
        raise ScriptFailedError(f"failed ({one_line(error)})") from error


def exit_code_of(request: SystemExit) -> int:
    """The exit code that Python would end with; a text is printed, as Python does."""
    if request.code is None:
        return 0
    if isinstance(request.code, int):
        return request.code
    print(request.code, file=sys.stderr)
    return 1


def join_threads() -> None:
    """Waits for non-daemon threads, as Python does at exit."""
    for function in reversed(threading._threading_atexits):  # type: ignore[attr-defined]
        function()  # ends idle threads of pools
    while living := [
        thread for thread in threading.enumerate() if not thread.daemon and thread is not threading.main_thread()
    ]:
        for thread in living:
            thread.join()


def one_line(error: Exception) -> str:
    """Type and first line of the message, without a full stop."""
    first = (str(error).strip().splitlines() or [""])[0].rstrip(".")
    return f"{type(error).__name__}: {first}" if first else type(error).__name__


def nested_code(code: CodeType) -> Iterator[CodeType]:
    """A function's code and that of all functions nested in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from nested_code(constant)


def cell_content(cell: CellType) -> Any:
    """The value of a closure's cell; None if it is empty."""
    try:
        return cell.cell_contents
    except ValueError:
        return None
