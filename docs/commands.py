"""Writes docs/commands.md from the commands' `--help`: `python docs/commands.py`."""

from __future__ import annotations

from pathlib import Path

from typer.testing import CliRunner

from framework.cli import SUBCOMMANDS, app

PAGE = Path(__file__).with_suffix(".md")
NESTED_COMMANDS = {
    "agents": ("measure",),
    "users": ("add", "rotate", "remove", "list"),
    "cluster": ("start", "join", "status", "token", "leave", "remove", "stop", "slurm"),
    "mesos": ("up", "status", "down"),
}
ABOUT = """\
# Commands

The `--help` of each command. `python docs/commands.py` writes this page.

* MODEL is a script, `keras:NAME` (a model of `keras.applications`) or a profile saved by `dike profile -o`.
* Every command that prints a table accepts `--format json`, except `dike logs`.
* Exit codes: 0 done, 1 the job failed, 2 bad input (a message says what is wrong and what to do), 130 interrupted.
* `dike --install-completion` lets bash, zsh or fish complete commands, options and their values.
* Start times of the commands: [benchmarks/results/command_line.md](../benchmarks/results/command_line.md).
"""


def text() -> str:
    """Returns the page."""
    parts = [ABOUT]
    shown: dict[str, str] = {}
    for title, commands in SUBCOMMANDS.items():
        parts.append(f"## {title}\n")
        for command in commands:
            own = NESTED_COMMANDS.get(command.name, ())
            names = [command.name, *(f"{command.name} {name}" for name in own)]
            parts += [f"### dike {name}\n\n```\n{_without_repetition(name, shown)}```\n" for name in names]
    return "\n".join(parts)


def _without_repetition(name: str, shown: dict[str, str]) -> str:
    """The help of a command; a panel of options that an earlier command has too refers to that command.

    Args:
        name: the command.
        shown: panel -> the command that shows it; panels of this command are added.
    """
    blocks = _help(name).rstrip("\n").split("\n\n")
    for index, block in enumerate(blocks):
        title, _, options = block.partition("\n")
        if not title.endswith(":") or options.count("\n") < 3:
            continue
        if (first := shown.setdefault(block, name)) != name:
            blocks[index] = f"{title}\n  The same options as of dike {first}."
    return "\n\n".join(blocks) + "\n"


def _help(name: str) -> str:
    return CliRunner().invoke(app, [*name.split(), "--help"], prog_name="dike").stdout


if __name__ == "__main__":
    PAGE.write_text(text(), encoding="utf-8")
