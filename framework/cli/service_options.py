"""The options that select a service and its user's token."""

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
        typer.Option(
            help="File with your token.",
            show_default=f"${TOKEN_VARIABLE}, else the token of your own service on this machine",
        ),
    ] = None,
) -> ServiceAccess:
    return ServiceAccess(service, token_file)


SERVICE_OPTIONS = frozenset(inspect.signature(service_access).parameters)
SERVICE_PANELS = {"Which service": ("service", "token_file")}
