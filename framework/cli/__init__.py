"""The `dike` command: one module per subcommand, and the conversion of errors to exit codes.

A subcommand's module is imported when the subcommand is used. At its top it imports what its options need and no more,
so that `--help` and shell completion are fast.
"""

from __future__ import annotations

import ast
import atexit
import contextlib
import functools
import gc
import importlib
import importlib.util
import logging
import math
import os
import platform
import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup, TyperOption
from typer.exceptions import TyperException
from typer.main import get_command

from dike._version import __version__
from dike.exceptions import BadInputError, DikeError
from dike.process import end_process
from dike.profile import ModelProfile
from framework.scheduler.background import is_busy
from solver.cli.help import MAX_WIDTH, with_panels

__all__ = ["app", "main"]

logger = logging.getLogger(__name__)

GC_THRESHOLD = 10_000
"""Number of allocations between two garbage collections."""
VERSIONED_PACKAGES = {"tensorflow": "TensorFlow", "keras": "Keras"}
"""Distribution -> name: those whose versions `--version` prints."""
SCRIPT_CONTEXT = {"ignore_unknown_options": True, "allow_interspersed_args": False}
"""Everything after SCRIPT belongs to the script, including options."""
OPTIONS_ENDED = "dike.options_ended"
"""Key in a context's `meta`: whether '--' precedes SCRIPT."""


class _LazyCommand(TyperCommand):
    """A subcommand whose module is imported on use.

    Args:
        target: `MODULE:FUNCTION`. If the module has an `app`, that is the subcommand, and the function its callback.
        context_settings: settings for click's context.
    """

    def __init__(self, name: str, target: str, context_settings: dict[str, Any] | None = None) -> None:
        super().__init__(name)
        self._settings = context_settings
        self._module, _, self._function = target.partition(":")

    def summary(self) -> str:
        """Returns the first sentence of its help, read from its source."""
        text = " ".join((_docstring(self._module, self._function) or "").split("\n\n")[0].split())
        return text.partition(". ")[0].rstrip(".")

    def get_short_help_str(self, limit: int = 45) -> str:
        return self.summary()

    def make_context(self, *arguments: Any, **settings: Any) -> Any:
        """Imports the subcommand's module and makes its context."""
        module = importlib.import_module(self._module)
        group = getattr(module, "app", None)
        if group is None:
            group = typer.Typer(add_completion=False, rich_markup_mode=None)
            command = with_panels(getattr(module, "PANELS", {}))
            group.command(self.name, cls=command, context_settings=self._settings)(getattr(module, self._function))
        words = list(settings["args"] if "args" in settings else arguments[1])  # typer empties it
        with _as_bad_input(f"dike {self.name}"):
            context: Any = get_command(group).make_context(*arguments, **settings)
        context.meta[OPTIONS_ENDED] = ("--", str(context.params.get("script"))) in pairwise(words)
        for param in context.command.params:
            value = context.params.get(param.name)
            if isinstance(value, float) and not math.isfinite(value):
                raise BadInputError(f"{param.opts[0]} is {value}; it must be a finite number.")
        return context


@contextlib.contextmanager
def _as_bad_input(command: str) -> Iterator[None]:
    """Converts typer's errors to `BadInputError`, worded like those of a service's requests."""
    try:
        yield
    except typer.BadParameter as error:
        raise BadInputError(f"{_refusal(error)}.") from error
    except TyperException as error:
        raise BadInputError(f"{error.format_message().rstrip('.')}; see {command} --help.") from error


def _refusal(error: Any) -> str:
    from pydantic import ValidationError

    from dike.described import refusal

    cause = error.__cause__
    if isinstance(cause, ValidationError) and error.param is not None:
        return refusal(error.param.opts[0], cause.errors()[0])
    return str(error.format_message()).rstrip(".")


SUBCOMMANDS = {
    "Train": (
        _LazyCommand("run", "framework.cli.run:run", SCRIPT_CONTEXT),
        _LazyCommand("submit", "framework.cli.submit:submit", SCRIPT_CONTEXT),
    ),
    "Search hyper-parameters": (
        _LazyCommand("tune", "framework.cli.tune:tune"),
        _LazyCommand("trials", "framework.cli.trials:trials"),
        _LazyCommand("timeline", "framework.cli.timeline:timeline"),
        _LazyCommand("export", "framework.cli.export:export_model"),
        _LazyCommand("plot", "framework.cli.plot:plot"),
    ),
    "Plan, without a cluster": (
        _LazyCommand("plan", "solver.cli.plan:plan"),
        _LazyCommand("profile", "framework.cli.profile:profile"),
    ),
    "Serve a team": (
        _LazyCommand("serve", "framework.cli.serve:serve_command"),
        _LazyCommand("users", "framework.cli.users:users"),
        _LazyCommand("cluster", "framework.cli.cluster:cluster"),
        _LazyCommand("mesos", "framework.cli.mesos:mesos"),
    ),
    "Look at jobs, and end them": (
        _LazyCommand("jobs", "framework.cli.jobs:jobs"),
        _LazyCommand("logs", "framework.cli.logs:logs"),
        _LazyCommand("outputs", "framework.cli.outputs:outputs"),
        _LazyCommand("explain", "framework.cli.explain:explain"),
        _LazyCommand("agents", "framework.cli.agents:agents"),
        _LazyCommand("kill", "framework.cli.kill:kill"),
        _LazyCommand("release", "framework.cli.kill:release"),
        _LazyCommand("clean", "framework.cli.clean:clean"),
    ),
}
"""Title in `--help` -> subcommands."""


class _CommandGroup(TyperGroup):
    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        for commands in SUBCOMMANDS.values():
            for command in commands:
                self.add_command(command)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Writes one section per title."""
        width = max(map(len, self.commands))
        for title, commands in SUBCOMMANDS.items():
            with formatter.section(title):
                formatter.write_dl([(f"{command.name:{width}}", command.summary()) for command in commands])

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        for param in self.get_params(ctx):
            if isinstance(param, TyperOption) and param.is_flag and param.default is None:
                # Typer's own completion options: it would import pydantic to check a default of None.
                param.default = False
        return super().parse_args(ctx, args)


def _docstring(module: str, function: str) -> str | None:
    """Reads a function's docstring without importing its module."""
    spec = importlib.util.find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    for node in ast.parse(Path(spec.origin).read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef) and node.name == function:
            return ast.get_docstring(node)
    return None


app = typer.Typer(
    name="dike",
    cls=_CommandGroup,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"max_content_width": MAX_WIDTH},
)


def _print_version(asked: bool) -> None:
    if asked:
        # Imported late: no other command needs it.
        from importlib.metadata import PackageNotFoundError, version

        parts = [f"Python {platform.python_version()}"]
        for distribution, name in VERSIONED_PACKAGES.items():
            try:
                parts.append(f"{name} {version(distribution)}")
            except PackageNotFoundError:
                parts.append(f"no {name}")
        print(f"dike {__version__} ({', '.join(parts)})")
        raise typer.Exit


@app.callback()
def dike(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_print_version, help="Show the version and exit.")
    ] = False,
) -> None:
    """Plans and runs deep-learning work on an Apache Mesos cluster."""


def main() -> None:
    """Entry point of the `dike` console script."""
    run_command(_dike)


def _dike() -> None:
    app(obj=_load_profile, prog_name="dike")


def run_command(command: Callable[[], object]) -> None:
    """Runs a command and ends the process. Exit codes: 0 done, 1 failed, 2 bad input, 130 interrupted."""
    # A command allocates modules, hardly garbage: collections would be up to a fifth of its start time.
    gc.set_threshold(GC_THRESHOLD)
    try:
        _report_errors(command)
    except SystemExit as end:
        if not _flush_output() and not end.code:
            end.code = 1
        if is_busy():
            # The command has released all it owned; only the planning of a job that has ended still runs in a thread.
            atexit._run_exitfuncs()
            end_process(int(end.code or 0))
        raise


def _report_errors(command: Callable[[], object]) -> None:
    try:
        _log_to_file_only()
        command()
    except DikeError as error:
        print(f"dike: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except BrokenPipeError:
        sys.exit(1)
    except OSError as error:
        # What the command does not expect, such as a full disk or a deleted folder.
        logger.exception("the command failed")
        print(f"dike: {_sentence(error)}", file=sys.stderr)
        sys.exit(1)


def _sentence(error: OSError) -> str:
    where = f"{error.filename}: " if error.filename is not None else ""
    reason = error.strerror or str(error)
    return f"{where}{reason}. Set DIKE_LOG=FILE to log the traceback to a file."


def _flush_output() -> bool:
    """Flushes standard output; if that fails, prints why and redirects it, so that Python does not retry at exit."""
    if sys.stdout is None:
        # It was closed before the start; output is discarded.
        return True
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        pass
    except OSError as error:
        print(f"dike: standard output cannot be written: {error.strerror}.", file=sys.stderr)
    else:
        return True
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return False


def _load_profile(
    model: str,
    batch_size: int | None = None,
    /,
    *,
    arguments: Sequence[str] = (),
    is_module: bool = False,
    again: bool = False,
    strategy: str = "auto",
) -> ModelProfile:
    # Imported late: only `dike plan` needs it.
    from framework.project.profiling import load_profile
    from solver.cli.output import console, say

    notify = functools.partial(say, console(stderr=True))
    return load_profile(
        model, arguments, batch_size, is_module=is_module, refresh=again, strategy=strategy, notify=notify
    )


def _log_to_file_only() -> None:
    """Keeps log records off the terminal; `$DIKE_LOG` names a file for them."""
    path = os.environ.get("DIKE_LOG")
    if path:
        try:
            file = logging.FileHandler(path)
        except OSError as error:
            raise BadInputError(f"DIKE_LOG names {path}, which cannot be written: {error.strerror}.") from error
        form = "%(asctime)s %(levelname)s %(name)s: %(message)s"
        logging.basicConfig(handlers=[file], level=logging.INFO, format=form)
    else:
        logging.getLogger().addHandler(logging.NullHandler())
