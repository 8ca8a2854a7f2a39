"""Layout of a command's `--help`: options in titled panels."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from typer.core import TyperCommand

MAX_WIDTH = 100
"""Maximum columns; a narrower terminal's width is used."""
OTHERS_TITLE = "Other options"

_PLAIN = {"int": "N", "int range": "N", "float": "X", "float range": "X", "path": "PATH", "str": "TEXT"}
_TYPE = re.compile(rf"<(?:list\[)?({'|'.join(_PLAIN)})\]?>")
"""Typer's notation of value types."""
_DEFAULT_IN_WORDS = re.compile(r"(default: )\((.*)\)([];])")
"""Typer's notation of a default given in words."""

Panels = Mapping[str, Sequence[str]]
"""Title -> names of parameters, in the order shown."""


class PanelCommand(TyperCommand):
    """A command with many options.

    Attributes:
        panels: options under each title; the others follow last under `OTHERS_TITLE`.
    """

    panels: ClassVar[Panels] = {}

    def format_options(self, ctx: Any, formatter: Any) -> None:
        params = {param.name: param for param in self.get_params(ctx)}
        arguments = [name for name, param in params.items() if param.param_type_name == "argument"]
        named = {name for names in self.panels.values() for name in names}
        rest = [name for name in params if name not in named and name not in arguments]
        for title, names in {
            "Arguments": arguments,
            **self.panels,
            OTHERS_TITLE if self.panels else "Options": rest,
        }.items():
            records = [
                (_TYPE.sub(lambda found: _PLAIN[found[1]], record[0]), _DEFAULT_IN_WORDS.sub(r"\1\2\3", record[1]))
                for name in names
                if name in params and (record := params[name].get_help_record(ctx))
            ]
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)


def with_panels(panels: Panels) -> type[PanelCommand]:
    """Returns a command class that shows its options in these panels."""
    return type("CommandWithPanels", (PanelCommand,), {"panels": panels})
