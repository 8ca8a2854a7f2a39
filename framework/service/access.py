"""Which service to ask, and with whose token: the same for the commands and for Python."""

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

        return ServiceClient(self.url, self.token())

    def token(self) -> str | None:
        """The token: of the file, else `$DIKE_TOKEN`, else that of this account's own service here; None without any.

        Raises:
            BadInputError: if the file cannot be read.
        """
        if self.token_file is not None:
            return _read_token(self.token_file)
        if token := os.environ.get(TOKEN_VARIABLE):
            return token
        from framework.service.api.client_http import leads_to_this_machine

        own = own_token_file()
        # What a service of this account has written is for that service, and for no other machine to see.
        return _read_token(own) if leads_to_this_machine(self.url) and own.is_file() else None


def _read_token(path: Path) -> str:
    # Without `solver`: in the process of a user, who may have a file of that name.
    try:
        return path.read_text(encoding="ascii").strip()
    except OSError as error:
        raise BadInputError(f"The token file {path} cannot be read: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise BadInputError(f"The token file {path} is not ASCII text.") from error
