"""The options that say which service to ask, and who asks."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Annotated

import typer

from framework.service.access import DEFAULT_SERVICE, SERVICE_VARIABLE, TOKEN_VARIABLE
from framework.service.access import ServiceAccess as ServiceAccess


def service_access(
    *,
    service: Annotated[
        str, typer.Option(envvar=SERVICE_VARIABLE, metavar="URL", help="Address of the service.")
    ] = DEFAULT_SERVICE,
    token_file: Annotated[
        Path | None,
        typer.Option(help=f"File that holds your token; else ${TOKEN_VARIABLE}, else that of your own service here."),
    ] = None,
) -> ServiceAccess:
    """Puts the options together."""
    return ServiceAccess(service, token_file)


SERVICE_OPTIONS = frozenset(inspect.signature(service_access).parameters)
"""Their names."""
SERVICE_PANELS = {"Which service": ("service", "token_file")}
"""How `--help` shows them."""
