"""How a command's `--help` looks: options in panels, each under its title."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from typer.core import TyperCommand

MAX_WIDTH = 100
"""Columns; on a narrower terminal it is the terminal's."""
OTHERS = "Other options"

_PLAIN = {"int": "N", "int range": "N", "float": "X", "float range": "X", "path": "PATH", "str": "TEXT"}
_TYPE = re.compile(rf"<(?:list\[)?({'|'.join(_PLAIN)})\]?>")
"""How typer writes the types of values."""
_IN_WORDS = re.compile(r"(default: )\((.*)\)([];])")
"""How it writes a default that is said in words."""

Panels = Mapping[str, Sequence[str]]
"""Title -> names of parameters, in the order in which they are shown."""


class PanelCommand(TyperCommand):
    """A command with many options.

    Attributes:
        panels: which options stand under which title; those in none stand under `OTHERS`, last.
    """

    panels: ClassVar[Panels] = {}

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Writes the arguments, then one panel of options after the other."""
        params = {param.name: param for param in self.get_params(ctx)}
        arguments = [name for name, param in params.items() if param.param_type_name == "argument"]
        named = {name for names in self.panels.values() for name in names}
        rest = [name for name in params if name not in named and name not in arguments]
        for title, names in {"Arguments": arguments, **self.panels, OTHERS if self.panels else "Options": rest}.items():
            records = [
                (_TYPE.sub(lambda found: _PLAIN[found[1]], record[0]), _IN_WORDS.sub(r"\1\2\3", record[1]))
                for name in names
                if name in params and (record := params[name].get_help_record(ctx))
            ]
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)


def with_panels(panels: Panels) -> type[PanelCommand]:
    """The class of a command that shows its options so."""
    return type("CommandWithPanels", (PanelCommand,), {"panels": panels})
