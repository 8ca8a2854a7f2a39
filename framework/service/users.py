"""The users of a service: names, tokens, queue weights, administrators, limits."""

from __future__ import annotations

import contextlib
import datetime
import getpass
import hashlib
import hmac
import logging
import os
import secrets
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
    field_validator,
    model_validator,
)

from dike.exceptions import BadInputError
from framework.scheduler.queue_options import Priority
from framework.user_folders import OTHERS_MODE, own_token_file, read_or_create_secret
from solver.strict_yaml import NOT_YAML, parse_yaml
from solver.units import parse_bytes

MIN_TOKEN_LENGTH = 16
TOKEN_BYTES = 32
CHECK_INTERVAL_S = 1.0

logger = logging.getLogger(__name__)


class TokenExpiredError(BadInputError):
    """A known token has expired; the message says when."""


class OverLimitError(BadInputError):
    """A user exceeds a limit that the operator has set; the message states the limit."""


@dataclass(frozen=True)
class UserLimits:
    """Limits of one user; None for no limit.

    Attributes:
        trials: of one search.
        priority: the highest that the user's jobs may have.
        output_bytes: of all the user's jobs; beyond it the oldest output is deleted.
        bundle_bytes: of all the user's jobs.
    """

    open_jobs: int | None = None
    trials: int | None = None
    output_bytes: int | None = None
    bundle_bytes: int | None = None
    priority: Priority = Priority.HIGH


NO_LIMITS = UserLimits()


def no_limits(user: str) -> UserLimits:
    return NO_LIMITS


@dataclass(frozen=True)
class User:
    """A user of the service.

    Attributes:
        weight: share in the queue, relative to the other users'.
        admin: whether the user may kill other users' jobs and read their output.
        has_token: without one, the user signs in only through a proxy.
        expires: the token's last day, in UTC; None if it never expires.
    """

    name: str
    weight: float = 1.0
    admin: bool = False
    has_token: bool = True
    expires: datetime.date | None = None
    limits: UserLimits = field(default=NO_LIMITS)

    @property
    def has_expired(self) -> bool:
        return self.expires is not None and today() > self.expires


class Users:
    """The users of a service. Thread-safe.

    Args:
        read: returns the users by `digest` of their token; called again by `reload`.
        fingerprint: returns a value that differs when `read` would return other users.
    """

    def __init__(
        self, read: Callable[[], Mapping[str, User]], fingerprint: Callable[[], object] = lambda: None
    ) -> None:
        self._read = read
        self._fingerprint = fingerprint
        # Taken first: a change in between causes one more read.
        self._last_fingerprint = fingerprint()
        self._by_digest = dict(read())

    @classmethod
    def of_file(cls, path: Path) -> Users:
        return cls(lambda: read_users(path), lambda: _fingerprint(path))

    @classmethod
    def of_this_account(cls) -> Users:
        """This account as the only user and administrator; creates the token in `own_token_file` if missing."""
        return cls(lambda: {digest(own_token()): User(account_name(), admin=True)})

    def authenticate(self, token: str) -> User | None:
        """The user of a token; None if it is unknown. Raises `TokenExpiredError`."""
        given = digest(token)
        found = None
        # Compares all digests, each in constant time: the duration leaks nothing about any of them.
        for known, user in self._by_digest.items():
            if hmac.compare_digest(known, given):
                found = user
        if found is not None and found.has_expired:
            raise TokenExpiredError(
                f"This token was valid until {found.expires}; the service's operator gives {found.name} a new one."
            )
        return found

    def named(self, name: str) -> User | None:
        return next((user for user in self._by_digest.values() if user.name == name), None)

    def weight(self, name: str) -> float:
        user = self.named(name)
        return 1.0 if user is None else user.weight

    def limits(self, name: str) -> UserLimits:
        user = self.named(name)
        return NO_LIMITS if user is None else user.limits

    @contextlib.contextmanager
    def auto_reload(self) -> Iterator[None]:
        """Reloads the users when their file changes and on SIGHUP, inside the context; for the main thread."""

        def reload(number: int, frame: FrameType | None) -> None:
            self.reload()

        ended = threading.Event()
        thread = threading.Thread(target=self._watch, args=(ended,), name="dike-users", daemon=True)
        previous = signal.signal(signal.SIGHUP, reload)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            signal.signal(signal.SIGHUP, previous)
            thread.join()

    def _watch(self, ended: threading.Event) -> None:
        while not ended.wait(CHECK_INTERVAL_S):
            fingerprint = self._fingerprint()
            if fingerprint != self._last_fingerprint:
                self._last_fingerprint = fingerprint
                self.reload()

    def reload(self) -> None:
        """Reads the users again; keeps the current ones if that fails."""
        try:
            self._by_digest = dict(self._read())
        except BadInputError as error:
            logger.error("users not reloaded: %s", error)
        else:
            logger.info("users reloaded: %d", len(self._by_digest))


def digest(token: str) -> str:
    """The SHA-256 of a token in hexadecimal digits. Tokens are random, so no slower hash is needed."""
    return hashlib.sha256(token.encode("utf-8", "surrogatepass")).hexdigest()


def new_token() -> str:
    """A random token of characters that are safe in URLs and shells."""
    return secrets.token_urlsafe(TOKEN_BYTES)


def today() -> datetime.date:
    """The current date in UTC."""
    return datetime.datetime.now(datetime.UTC).date()


def own_token() -> str:
    """The token in `own_token_file`, created once; raises `BadInputError` if other accounts may read it."""
    path = own_token_file()
    token = read_or_create_secret(path, new_token(), "token")
    if len(token) < MIN_TOKEN_LENGTH:
        raise BadInputError(f"The token file {path} holds no token; remove it to have a new one created.")
    return token


def account_name() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        # A container may run under a user id without a name.
        return "nobody"


def _size(value: object) -> int:
    try:
        return parse_bytes(value)
    except OverflowError:
        raise ValueError("a size is a number of bytes or text such as 32GiB or 500MB") from None


def _date(value: object) -> datetime.date:
    # YAML parses an unquoted date itself.
    if isinstance(value, datetime.date) and not isinstance(value, datetime.datetime):
        return value
    try:
        return datetime.date.fromisoformat(value if isinstance(value, str) else "")
    except ValueError:
        raise ValueError("a date is written like 2027-01-31") from None


_Count = Annotated[int, Field(strict=True, ge=0, le=10**9)]
_Size = Annotated[int, BeforeValidator(_size), Field(ge=0, le=2**60)]


class _Limits(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    open_jobs: _Count | None = None
    trials: _Count | None = None
    output: _Size | None = None
    bundles: _Size | None = None
    priority: Priority = Priority.HIGH

    @field_validator("*", mode="before")
    @classmethod
    def _require_value(cls, value: Any) -> Any:
        if value is None:
            raise ValueError("there is no value")
        return value


class _Entry(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    token: Annotated[str, Field(min_length=MIN_TOKEN_LENGTH, max_length=4096, pattern=r"^[!-~]+$")] | None = None
    token_sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")] | None = None
    no_token: bool = False
    expires: Annotated[datetime.date, BeforeValidator(_date)] | None = None
    weight: Annotated[float, Field(gt=0, le=1e6, allow_inf_nan=False)] = 1.0
    admin: bool = False
    limits: _Limits = _Limits()

    @model_validator(mode="after")
    def _require_one_token(self) -> _Entry:
        if (self.token is not None) + (self.token_sha256 is not None) + self.no_token != 1:
            raise ValueError("give either token_sha256 or token, or no_token: true where a proxy signs in")
        if self.no_token and self.expires is not None:
            raise ValueError("there is no token that expires")
        return self

    def user(self, name: str) -> User:
        given = self.limits
        limits = UserLimits(given.open_jobs, given.trials, given.output, given.bundles, given.priority)
        return User(name, self.weight, self.admin, not self.no_token, self.expires, limits)


_NAME = r"^[\w.@-]+$"
_Name = Annotated[str, Field(min_length=1, max_length=64, pattern=_NAME)]
_NAMES: TypeAdapter[str] = TypeAdapter(_Name)
_ENTRIES: TypeAdapter[dict[str, _Entry]] = TypeAdapter(
    Annotated[dict[_Name, _Entry], Field(min_length=1)], config=ConfigDict(hide_input_in_errors=True)
)


def check_user_name(name: str) -> None:
    try:
        _NAMES.validate_python(name)
    except ValidationError:
        raise BadInputError(
            f"'{name}' cannot be a user's name; write up to 64 letters, digits, '.', '_', '@' and '-'."
        ) from None


def read_users(path: Path) -> dict[str, User]:
    """The users of a file, by `digest` of their token.

    Raises:
        BadInputError: if it cannot be read, is malformed, or holds plain tokens and other accounts may read it.
    """
    try:
        with path.open(encoding="utf-8") as file:
            mode = os.fstat(file.fileno()).st_mode
            text = file.read()
    except OSError as error:
        raise BadInputError(f"The users file {path} cannot be read: {error.strerror}.") from error
    except UnicodeDecodeError:
        raise BadInputError(f"The users file {path} is not UTF-8 text.") from None
    return validate_users(path, parse_users(path, text), is_open=bool(mode & OTHERS_MODE))


def parse_users(path: Path, text: str) -> Any:
    """The unchecked content of a users file; raises `BadInputError` if it is not YAML or has a duplicate key."""
    try:
        _, values = parse_yaml(path, text)
    except (*NOT_YAML, RecursionError) as error:
        # Without the parser's message: it quotes lines, which may hold tokens.
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}" if mark is not None else ""
        raise BadInputError(f"The users file {path}{where} is not YAML.") from None
    return values


def validate_users(path: Path, values: Any, *, is_open: bool = False) -> dict[str, User]:
    """Validates the content of a users file that others may read if `is_open`; see `read_users`."""
    try:
        entries = _ENTRIES.validate_python(values)
    except ValidationError as error:
        first = error.errors(include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"]) or "the whole"
        reason = first["msg"].removeprefix("Value error, ")
        raise BadInputError(
            f"The users file {path} is wrong at {where}: {reason}; it maps names to token_sha256, expires, weight, "
            "admin and limits (open_jobs, trials, output, bundles)."
        ) from None
    if is_open and any(entry.token for entry in entries.values()):
        raise BadInputError(
            f"The users file {path} holds plain tokens and can be read by others; chmod 600 it, or give token_sha256."
        )
    users: dict[str, User] = {}
    for name, entry in entries.items():
        # A random key, which is the digest of no known token, for a user without one.
        key = secrets.token_hex(32) if entry.no_token else entry.token_sha256 or digest(entry.token or "")
        if key in users:
            raise BadInputError(f"The users file {path} gives {users[key].name} and {name} the same token.")
        users[key] = entry.user(name)
    return users


def _fingerprint(path: Path) -> object:
    """Mode and content of the file: its times and size may stay the same when it is written twice within a moment."""
    try:
        with path.open("rb") as file:
            return os.fstat(file.fileno()).st_mode, file.read()
    except OSError as error:
        return error.errno
