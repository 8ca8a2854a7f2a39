"""The `dike` command: one module for each subcommand, one place where errors become exit codes.

A subcommand's module is imported when that subcommand is used, so none waits for the libraries of another. Nor does a
module import at its top what only the work needs: `--help` and a shell's completion ask for the options alone.
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
"""So many objects are allocated between two looks for garbage."""
REPORTED = {"tensorflow": "TensorFlow", "keras": "Keras"}
"""Distribution -> its name: those whose versions a report of an error should name."""
SCRIPTS_OWN = {"ignore_unknown_options": True, "allow_interspersed_args": False}
"""What follows SCRIPT belongs to the script, options included."""
OPTIONS_ENDED = "dike.options_ended"
"""In a context's `meta`: whether '--' stands in front of SCRIPT."""


class _Subcommand(TyperCommand):
    """Stands for a subcommand until it is used; its line in the list of commands is read off its source.

    Args:
        name: how it is typed.
        place: `MODULE:FUNCTION`. Where the module has an `app`, that is the subcommand, and the function its callback.
        context_settings: of the function.
    """

    def __init__(self, name: str, place: str, context_settings: dict[str, Any] | None = None) -> None:
        super().__init__(name)
        self._settings = context_settings
        self._module, _, self._function = place.partition(":")

    def summary(self) -> str:
        """What it does: the first sentence of its help."""
        text = " ".join((_docstring(self._module, self._function) or "").split("\n\n")[0].split())
        return text.partition(". ")[0].rstrip(".")

    def get_short_help_str(self, limit: int = 45) -> str:
        """The same, for a shell's completion."""
        return self.summary()

    def make_context(self, *arguments: Any, **settings: Any) -> Any:
        """The context of the subcommand itself."""
        module = importlib.import_module(self._module)
        group = getattr(module, "app", None)
        if group is None:
            group = typer.Typer(add_completion=False, rich_markup_mode=None)
            command = with_panels(getattr(module, "PANELS", {}))
            group.command(self.name, cls=command, context_settings=self._settings)(getattr(module, self._function))
        words = list(settings["args"] if "args" in settings else arguments[1])  # typer empties it
        with _one_sentence(f"dike {self.name}"):
            context: Any = get_command(group).make_context(*arguments, **settings)
        context.meta[OPTIONS_ENDED] = ("--", str(context.params.get("script"))) in pairwise(words)
        for param in context.command.params:
            value = context.params.get(param.name)
            if isinstance(value, float) and not math.isfinite(value):
                raise BadInputError(f"{param.opts[0]} {value} cannot be; give a finite number.")
        return context


@contextlib.contextmanager
def _one_sentence(command: str) -> Iterator[None]:
    """Says what is wrong with a command line as a service says it of a request.

    Raises:
        BadInputError: in the place of typer's errors.
    """
    try:
        yield
    except typer.BadParameter as error:
        raise BadInputError(f"{_refusal(error)}.") from error
    except TyperException as error:
        raise BadInputError(f"{error.format_message().rstrip('.')}; see {command} --help.") from error


def _refusal(error: Any) -> str:
    from pydantic import ValidationError

    from solver.described import refusal

    cause = error.__cause__
    if isinstance(cause, ValidationError) and error.param is not None:
        return refusal(error.param.opts[0], cause.errors()[0])
    return str(error.format_message()).rstrip(".")


SUBCOMMANDS = {
    "Train": (
        _Subcommand("run", "framework.cli.run:run", SCRIPTS_OWN),
        _Subcommand("submit", "framework.cli.submit:submit", SCRIPTS_OWN),
    ),
    "Search hyper-parameters": (
        _Subcommand("tune", "framework.cli.tune:tune"),
        _Subcommand("trials", "framework.cli.trials:trials"),
        _Subcommand("timeline", "framework.cli.timeline:timeline"),
        _Subcommand("export", "framework.cli.export:export_model"),
        _Subcommand("plot", "framework.cli.plot:plot"),
    ),
    "Plan, without a cluster": (
        _Subcommand("plan", "solver.cli.plan:plan"),
        _Subcommand("profile", "framework.cli.profile:profile"),
    ),
    "Serve a team": (
        _Subcommand("serve", "framework.cli.serve:serve_command"),
        _Subcommand("users", "framework.cli.users:users"),
        _Subcommand("mesos", "framework.cli.mesos:mesos"),
    ),
    "Look at jobs, and end them": (
        _Subcommand("jobs", "framework.cli.jobs:jobs"),
        _Subcommand("logs", "framework.cli.logs:logs"),
        _Subcommand("outputs", "framework.cli.outputs:outputs"),
        _Subcommand("explain", "framework.cli.explain:explain"),
        _Subcommand("agents", "framework.cli.agents:agents"),
        _Subcommand("kill", "framework.cli.kill:kill"),
        _Subcommand("clean", "framework.cli.clean:clean"),
    ),
}
"""All subcommands, by the title under which `--help` lists them."""


class _Subcommands(TyperGroup):
    """The `dike` command."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        for commands in SUBCOMMANDS.values():
            for command in commands:
                self.add_command(command)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Writes the list of commands, one section for each title."""
        width = max(map(len, self.commands))
        for title, commands in SUBCOMMANDS.items():
            with formatter.section(title):
                formatter.write_dl([(f"{command.name:{width}}", command.summary()) for command in commands])

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        for param in self.get_params(ctx):
            if isinstance(param, TyperOption) and param.is_flag and param.default is None:
                # Typer's own options for completion: it would load pydantic to look at the None.
                param.default = False
        return super().parse_args(ctx, args)


def _docstring(module: str, function: str) -> str | None:
    """What a function says of itself, without importing its module."""
    spec = importlib.util.find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    for node in ast.parse(Path(spec.origin).read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef) and node.name == function:
            return ast.get_docstring(node)
    return None


app = typer.Typer(
    name="dike",
    cls=_Subcommands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"max_content_width": MAX_WIDTH},
)


def _print_version(asked: bool) -> None:
    if asked:
        # Late: no other command needs it.
        from importlib.metadata import PackageNotFoundError, version

        parts = [f"Python {platform.python_version()}"]
        for distribution, name in REPORTED.items():
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
    app(obj=_profile_to_plan_for, prog_name="dike")


def run_command(command: Callable[[], object]) -> None:
    """Runs a command and ends the process. Exit codes: 0 done, 1 failed, 2 bad input, 130 interrupted."""
    # Most of what a command allocates are modules, and no garbage: to look for some is up to a fifth of its start.
    gc.set_threshold(GC_THRESHOLD)
    try:
        _exit_with_sentence(command)
    except SystemExit as end:
        if not _is_flushed() and not end.code:
            end.code = 1
        if is_busy():
            # All that the command had begun is closed: a plan that nobody wants any more is left behind.
            atexit._run_exitfuncs()
            end_process(int(end.code or 0))
        raise


def _exit_with_sentence(command: Callable[[], object]) -> None:
    try:
        _log_to_file_only()
        command()
    except DikeError as error:
        print(f"dike: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except BrokenPipeError:
        sys.exit(1)
    except OSError as error:
        # A disk that is full, a folder that is gone: whatever no command expects.
        logger.exception("the command has ended")
        print(f"dike: {_sentence(error)}", file=sys.stderr)
        sys.exit(1)


def _sentence(error: OSError) -> str:
    where = f"{error.filename}: " if error.filename is not None else ""
    said = error.strerror or str(error)
    return f"{where}{said}. DIKE_LOG=FILE shows where that happened."


def _is_flushed() -> bool:
    """Whether all that was printed is written; if not, says so once, and Python does not try again at its end."""
    if sys.stdout is None:
        # It was closed before we began; what is printed goes nowhere.
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


def _profile_to_plan_for(
    model: str,
    batch_size: int | None = None,
    /,
    *,
    arguments: Sequence[str] = (),
    is_module: bool = False,
    again: bool = False,
) -> ModelProfile:
    # Late: only `dike plan` asks.
    from framework.project.profiling import load_profile
    from solver.cli.output import console, say

    tell = functools.partial(say, console(stderr=True))
    return load_profile(model, arguments, batch_size, is_module=is_module, refresh=again, notify=tell)


def _log_to_file_only() -> None:
    """Keeps log records off the terminal; `$DIKE_LOG` names a file that gets them."""
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
