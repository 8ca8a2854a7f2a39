"""The options that say which service to ask, and who asks."""

from __future__ import annotations

import inspect
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from framework.cli.option_groups import with_options
from framework.service.client import ServiceClient
from framework.service.client_http import leads_to_this_machine
from framework.service.users import own_token_file
from solver.text_files import read_text

SERVICE_VARIABLE = "DIKE_SERVICE"
TOKEN_VARIABLE = "DIKE_TOKEN"  # noqa: S105 (a variable's name)
DEFAULT_LISTEN = "127.0.0.1:8680"
DEFAULT_SERVICE = f"http://{DEFAULT_LISTEN}"


@dataclass(frozen=True)
class ServiceAccess:
    """Which service to ask, and with which token.

    Attributes:
        url: where it listens.
        token_file: holds the token; None to look elsewhere.
    """

    url: str = DEFAULT_SERVICE
    token_file: Path | None = None

    def client(self) -> ServiceClient:
        """A client of it; nothing has been asked yet.

        Raises:
            BadInputError: if the address makes no sense, or the token cannot be read.
        """
        return ServiceClient(self.url, self._token())

    def _token(self) -> str | None:
        if self.token_file is not None:
            return _read_token(self.token_file)
        if token := os.environ.get(TOKEN_VARIABLE):
            return token
        own = own_token_file()
        # What a service of this account has written is for that service, and for no other machine to see.
        return _read_token(own) if leads_to_this_machine(self.url) and own.is_file() else None


def service_access(
    *,
    service: Annotated[
        str, typer.Option(envvar=SERVICE_VARIABLE, metavar="URL", help="Where the service listens.")
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

with_service_options = with_options("access", service_access)
"""Gives a command these options in the place of its parameter `access`."""


def _read_token(path: Path) -> str:
    return read_text(path, "token file", "ASCII").strip()
