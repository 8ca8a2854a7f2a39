"""Who may use a service: names, tokens, weights in the queue, administrators."""

from __future__ import annotations

import contextlib
import getpass
import hashlib
import hmac
import logging
import os
import secrets
import signal
import stat
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, model_validator

from dike.exceptions import BadInputError
from framework.user_folders import own_token_file
from solver.strict_yaml import NOT_YAML, parse_yaml

MIN_TOKEN_LENGTH = 16
TOKEN_BYTES = 32
OTHERS = stat.S_IRWXG | stat.S_IRWXO

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class User:
    """Somebody who may use the service.

    Attributes:
        name: as jobs name their user.
        weight: share in the queue, relative to the others'.
        admin: whether jobs of others may be ended and their output read.
    """

    name: str
    weight: float = 1.0
    admin: bool = False


class Users:
    """The users of a service; any thread may ask.

    Args:
        read: digest of a token -> its user, as `digest` makes it; called again by `reload`.

    Raises:
        BadInputError: if they cannot be read.
    """

    def __init__(self, read: Callable[[], Mapping[str, User]]) -> None:
        self._read = read
        self._by_digest = dict(read())

    @classmethod
    def of_file(cls, path: Path) -> Users:
        """Those of a users file.

        Raises:
            BadInputError: if it cannot be read, is malformed, or holds plain tokens and others may read it.
        """
        return cls(lambda: _read_users(path))

    @classmethod
    def of_this_account(cls) -> Users:
        """Only whoever runs this process, as administrator, with the token in `own_token_file`, made where missing.

        Raises:
            BadInputError: if the token cannot be written or read.
        """
        return cls(lambda: {digest(own_token()): User(_account_name(), admin=True)})

    def signed_in(self, token: str) -> User | None:
        """Whose token this is; None for nobody's."""
        given = digest(token)
        found = None
        # All are compared, each in constant time: how long it takes tells nothing of any of them.
        for known, user in self._by_digest.items():
            if hmac.compare_digest(known, given):
                found = user
        return found

    def weight(self, name: str) -> float:
        """A user's weight in the queue; 1 for one that is not known any more."""
        return next((user.weight for user in self._by_digest.values() if user.name == name), 1.0)

    @contextlib.contextmanager
    def reloading_on_hangup(self) -> Iterator[None]:
        """Reads the users again on SIGHUP, while the context lasts; of the main thread."""

        def reload(number: int, frame: FrameType | None) -> None:
            self.reload()

        previous = signal.signal(signal.SIGHUP, reload)
        try:
            yield
        finally:
            signal.signal(signal.SIGHUP, previous)

    def reload(self) -> None:
        """Reads the users again; if that fails, those known stay."""
        try:
            self._by_digest = dict(self._read())
        except BadInputError as error:
            logger.error("users not read again: %s", error)
        else:
            logger.info("users read again: %d", len(self._by_digest))


def digest(token: str) -> str:
    """What is kept of a token: its SHA-256 in hexadecimal digits. Tokens are random, so nothing slower is needed."""
    return hashlib.sha256(token.encode("utf-8", "surrogatepass")).hexdigest()


def own_token() -> str:
    """The token in `own_token_file`, made once.

    Raises:
        BadInputError: if it cannot be written or read, or others may read it.
    """
    path = own_token_file()
    try:
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            _write_once(path, secrets.token_urlsafe(TOKEN_BYTES))
        token = path.read_text(encoding="ascii").strip()
        if path.stat().st_mode & OTHERS:
            raise BadInputError(f"Others may read the token in {path}; remove that file, and a new one is made.")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise BadInputError(f"The token file {path} cannot be used: {reason}.") from error
    if len(token) < MIN_TOKEN_LENGTH:
        raise BadInputError(f"The token file {path} holds no token; remove it, and a new one is made.")
    return token


def _write_once(path: Path, token: str) -> None:
    """Writes a file whole or not at all; one that another process has written meanwhile stays."""
    # Such a file can be read by its owner only.
    with tempfile.NamedTemporaryFile("w", dir=path.parent, encoding="ascii") as file:
        file.write(f"{token}\n")
        file.flush()
        try:
            os.link(file.name, path)
        except FileExistsError:
            logger.info("%s has just been written by another process", path)


def _account_name() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        # A container may run under a number that has no name.
        return "nobody"


class _Entry(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    token: Annotated[str, Field(min_length=MIN_TOKEN_LENGTH, max_length=4096, pattern=r"^[!-~]+$")] | None = None
    token_sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")] | None = None
    weight: Annotated[float, Field(gt=0, le=1e6, allow_inf_nan=False)] = 1.0
    admin: bool = False

    @model_validator(mode="after")
    def _has_one_token(self) -> _Entry:
        if (self.token is None) == (self.token_sha256 is None):
            raise ValueError("give either token_sha256 or token")
        return self


_Name = Annotated[str, Field(min_length=1, max_length=64, pattern=r"^[\w.@-]+$")]
_ENTRIES: TypeAdapter[dict[str, _Entry]] = TypeAdapter(
    Annotated[dict[_Name, _Entry], Field(min_length=1)], config=ConfigDict(hide_input_in_errors=True)
)


def _read_users(path: Path) -> dict[str, User]:
    try:
        with path.open(encoding="utf-8") as file:
            mode = os.fstat(file.fileno()).st_mode
            text = file.read()
        _, values = parse_yaml(path, text)
    except OSError as error:
        raise BadInputError(f"The users file {path} cannot be read: {error.strerror}.") from error
    except (*NOT_YAML, RecursionError) as error:
        # Not what the parser says: it quotes lines, and those may hold tokens.
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}" if mark is not None else ""
        raise BadInputError(f"The users file {path}{where} is not YAML.") from None
    try:
        entries = _ENTRIES.validate_python(values)
    except ValidationError as error:
        first = error.errors(include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"]) or "the whole"
        said = first["msg"].removeprefix("Value error, ")
        raise BadInputError(
            f"The users file {path} is wrong at {where}: {said}; it maps names to token_sha256, weight, admin."
        ) from None
    if mode & OTHERS and any(entry.token for entry in entries.values()):
        raise BadInputError(
            f"The users file {path} holds plain tokens and can be read by others; chmod 600 it, or give token_sha256."
        )
    users: dict[str, User] = {}
    for name, entry in entries.items():
        key = entry.token_sha256 or digest(entry.token or "")
        if key in users:
            raise BadInputError(f"The users file {path} gives {users[key].name} and {name} the same token.")
        users[key] = User(name, entry.weight, entry.admin)
    return users
