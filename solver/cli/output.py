"""Output helpers of all subcommands."""

from __future__ import annotations

import enum
import functools
import json
import re
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType
    from rich.segment import Segment
    from rich.table import Table

_CONTROLS = "\x00-\x08\x0b-\x1f\x7f-\x9f"
_BIDIRECTIONAL = "\u202a-\u202e\u2066-\u2069"
_UNSAFE = re.compile(f"[{_CONTROLS}{_BIDIRECTIONAL}]")
_ALLOWED_OR_UNSAFE = re.compile(rf"(?P<allowed>\x1b\[[0-9;:]*m|[\r\b])|{_UNSAFE.pattern}")


class Format(enum.StrEnum):
    TABLE = "table"
    JSON = "json"


def console(*, stderr: bool = False) -> Console:
    """A console that does not wrap lines if its output is not a terminal."""
    stream = sys.stderr if stderr else sys.stdout
    return _console_class()(stderr=stderr, width=None if stream.isatty() else 140, highlight=False)


def escape_controls(text: str) -> str:
    """Escapes characters that would move a terminal's cursor, set its title or reverse its lines."""
    return _UNSAFE.sub(_escaped, text)


def escape_output(text: str) -> str:
    """The same for the output of a program: colours, and progress bars that overwrite themselves, stay."""
    return _ALLOWED_OR_UNSAFE.sub(lambda found: found[0] if found["allowed"] else _escaped(found), text)


def _escaped(found: re.Match[str]) -> str:
    return ascii(found[0])[1:-1]


@functools.cache
def _console_class() -> type[Console]:
    # Imported late: JSON output and `--help` need no tables.
    from rich.console import Console
    from rich.segment import Segment

    class HarmlessConsole(Console):
        """Escapes names, messages and values, as they come from scripts and from other users."""

        def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
            for segment in super().render(renderable, options):
                safe = escape_controls(segment.text) if segment.control is None else segment.text
                yield segment if safe == segment.text else Segment(safe, segment.style)

    return HarmlessConsole


def new_table(title: str, *columns: str) -> Table:
    """A table with these headings; without any, two columns without headings."""
    from rich.table import Table
    from rich.text import Text

    class HarmlessTable(Table):
        """Escapes cells before the columns are measured."""

        def add_row(self, *cells: RenderableType | None, **options: Any) -> None:
            super().add_row(*map(safe, cells), **options)

    def safe(cell: RenderableType | None) -> RenderableType | None:
        if isinstance(cell, Text) and _UNSAFE.search(cell.plain):
            return Text(escape_controls(cell.plain), cell.style)
        return escape_controls(cell) if isinstance(cell, str) else cell

    table = HarmlessTable(title=title, title_justify="left", show_header=bool(columns))
    for column in columns or ("", ""):
        table.add_column(column)
    return table


def say(out: Console, text: str) -> None:
    """Prints one message line of Dike."""
    out.print(f"dike: {text}", markup=False, soft_wrap=True)


def print_json(data: Any) -> None:
    """Prints JSON to standard output, which carries nothing else."""
    print(json.dumps(data, indent=2, allow_nan=False))
