"""What all subcommands share about printing."""

from __future__ import annotations

import enum
import json
import sys
from typing import Any

from rich.console import Console


class Format(enum.StrEnum):
    """How a command prints its result."""

    TABLE = "table"
    JSON = "json"


def console(*, stderr: bool = False) -> Console:
    """A console that keeps lines whole when its output is not a terminal."""
    stream = sys.stderr if stderr else sys.stdout
    return Console(stderr=stderr, width=None if stream.isatty() else 140, highlight=False)


def print_json(data: Any) -> None:
    """Prints JSON alone on standard output, so that it can be piped."""
    print(json.dumps(data, indent=2, allow_nan=False))
