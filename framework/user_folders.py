"""Dike's per-user folders and secrets, and file locks."""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import pwd
import secrets
import socket
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import platformdirs

from dike.exceptions import BadInputError, DikeError

_PRIVATE_FOLDER, _SHARED_FOLDER = 0o700, 0o755
_UNMAPPED_UID = 65534
"""In a container, the owner of files of accounts outside of it."""
OWN_TOKEN_FILE = "service-token"  # noqa: S105 (a file's name)
SIGNING_KEY_FILE = "signing-key"
OTHERS_MODE = stat.S_IRWXG | stat.S_IRWXO
_KEY_BYTES = 32

logger = logging.getLogger(__name__)


def cache_dir() -> Path:
    """The cache folder, which may not exist: `$DIKE_CACHE`, else `dike` in the user's cache folder."""
    named = os.environ.get("DIKE_CACHE")
    return Path(named).expanduser().absolute() if named else Path(platformdirs.user_cache_dir("dike"))


def private_cache_dir() -> Path:
    """Makes and checks the part of the cache that only this account can access.

    Accounts may share a cache. One that could write here could impersonate this account's Mesos, fork its processes or
    read its variables.

    Raises:
        DikeError: another account could read, change or replace the folder.
        OSError: it cannot be made.
    """
    shared = cache_dir()
    shared.mkdir(_SHARED_FOLDER, parents=True, exist_ok=True)
    folder = shared.resolve(strict=True) / f"private-{os.getuid()}"
    with suppress(FileExistsError):
        folder.mkdir(_PRIVATE_FOLDER)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & OTHERS_MODE:
        raise DikeError(
            f"The folder {folder} belongs to {_name_of(found.st_uid)} and has mode {stat.S_IMODE(found.st_mode):o}, so "
            "another account could impersonate this one: remove it, or name another cache with DIKE_CACHE."
        )
    for each in folder.parents:
        status = each.stat()
        is_open = status.st_mode & (stat.S_IWOTH | stat.S_ISVTX) == stat.S_IWOTH
        if is_open or status.st_uid not in (os.getuid(), 0, _UNMAPPED_UID):
            raise DikeError(
                f"The folder {each} belongs to {_name_of(status.st_uid)} and has mode "
                f"{stat.S_IMODE(status.st_mode):o},  so another account could replace "
                f"{folder}: name another cache with DIKE_CACHE, or set the sticky bit (chmod +t)."
            )
    return folder


def machine_dir() -> Path:
    """Makes the part of `private_cache_dir` for processes of this machine: machines may share a home folder.

    Raises:
        DikeError, OSError: as `private_cache_dir`.
    """
    folder = private_cache_dir() / "machines" / socket.gethostname()
    folder.mkdir(_PRIVATE_FOLDER, parents=True, exist_ok=True)
    return folder


def _name_of(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"account {uid}"


def own_token_file() -> Path:
    """File with the token of a service without a users file, where clients of the same account find it."""
    return Path(platformdirs.user_config_dir("dike")) / OWN_TOKEN_FILE


def read_or_create_secret(path: Path, new: str, what: str) -> str:
    """Reads a secret from a file that only its owner may read; creates the file with `new` if it is missing.

    Raises:
        BadInputError: the file cannot be written or read, or others may read it.
    """
    try:
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            _write_once(path, new)
        text = path.read_text(encoding="ascii").strip()
        if path.stat().st_mode & OTHERS_MODE:
            raise BadInputError(f"Others may read the {what} in {path}; remove that file, and a new one is made.")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise BadInputError(f"The {what} file {path} cannot be used: {reason}.") from error
    return text


def _write_once(path: Path, text: str) -> None:
    """Writes a file atomically unless another process has written it."""
    # Only the owner can read a temporary file.
    with tempfile.NamedTemporaryFile("w", dir=path.parent, encoding="ascii") as file:
        file.write(f"{text}\n")
        file.flush()
        try:
            os.link(file.name, path)
        except FileExistsError:
            logger.info("another process has just written %s", path)


def signature(what: str, data: bytes) -> str:
    """Signs data that this account stores where other accounts can write; valid only for the purpose `what`.

    Raises:
        BadInputError: the account's key cannot be written or read.
    """
    path = Path(platformdirs.user_config_dir("dike")) / SIGNING_KEY_FILE
    key = read_or_create_secret(path, secrets.token_hex(_KEY_BYTES), "signing key")
    if len(key) < 2 * _KEY_BYTES:
        raise BadInputError(f"The signing key file {path} holds no key; remove it, and a new one is made.")
    return hmac.new(key.encode(), what.encode() + b"\0" + data, hashlib.sha256).hexdigest()


@contextmanager
def file_lock(path: Path) -> Iterator[None]:
    """Locks the file `path` exclusively, within the context; creates it if necessary.

    The system releases the lock when the process ends; the file remains.
    """
    import fcntl  # Not on every platform that can run `dike plan`.

    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
