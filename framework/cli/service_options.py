"""The options that say which service to ask, and who asks."""

from __future__ import annotations

import inspect
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from framework.user_folders import own_token_file
from solver.text_files import read_text

if TYPE_CHECKING:
    from framework.service.api.client import ServiceClient

SERVICE_VARIABLE = "DIKE_SERVICE"
USERS_VARIABLE = "DIKE_USERS"
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
        from framework.service.api.client import ServiceClient

        return ServiceClient(self.url, self._token())

    def _token(self) -> str | None:
        if self.token_file is not None:
            return _read_token(self.token_file)
        if token := os.environ.get(TOKEN_VARIABLE):
            return token
        from framework.service.api.client_http import leads_to_this_machine

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
SERVICE_PANELS = {"Which service": ("service", "token_file")}
"""How `--help` shows them."""


def _read_token(path: Path) -> str:
    return read_text(path, "token file", "ASCII").strip()
