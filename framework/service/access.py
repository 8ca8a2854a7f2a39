"""The address and token of a service, for the commands and for Python."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from dike.exceptions import BadInputError
from framework.user_folders import own_token_file

if TYPE_CHECKING:
    from framework.service.api.client import ServiceClient

SERVICE_VARIABLE = "DIKE_SERVICE"
TOKEN_VARIABLE = "DIKE_TOKEN"  # noqa: S105 (a variable's name)
DEFAULT_LISTEN = "127.0.0.1:8680"
DEFAULT_SERVICE = f"http://{DEFAULT_LISTEN}"


@dataclass(frozen=True)
class ServiceAccess:
    """The address of a service, and a file with the token; None for the defaults of `token`."""

    url: str = DEFAULT_SERVICE
    token_file: Path | None = None

    def client(self) -> ServiceClient:
        """Creates a client; sends nothing yet."""
        from framework.service.api.client import ServiceClient

        return ServiceClient(self.url, self.token())

    def token(self) -> str | None:
        """The token in the file, else `$DIKE_TOKEN`, else that of this account's own local service; None without
        any.
        """
        if self.token_file is not None:
            return _read_token(self.token_file)
        if token := os.environ.get(TOKEN_VARIABLE):
            return token
        from framework.service.api.client_http import is_loopback_url

        own = own_token_file()
        # The token of this account's own service must not be sent to another machine.
        return _read_token(own) if is_loopback_url(self.url) and own.is_file() else None


def _read_token(path: Path) -> str:
    # Without `solver`: this runs in the user's process, which may have a file of that name.
    try:
        return path.read_text(encoding="ascii").strip()
    except OSError as error:
        raise BadInputError(f"The token file {path} cannot be read: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise BadInputError(f"The token file {path} is not ASCII text.") from error
