"""Where Dike keeps files of its user between runs, and the lock that guards them."""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import secrets
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import platformdirs

from dike.exceptions import BadInputError

OWN_TOKEN_FILE = "service-token"  # noqa: S105 (a file's name)
SIGNING_KEY_FILE = "signing-key"
OTHERS = stat.S_IRWXG | stat.S_IRWXO
_KEY_BYTES = 32

logger = logging.getLogger(__name__)


def cache_dir() -> Path:
    """Dike's cache folder: `$DIKE_CACHE`, else `dike` in the user's cache folder. It may not exist yet."""
    named = os.environ.get("DIKE_CACHE")
    return Path(named).expanduser().absolute() if named else Path(platformdirs.user_cache_dir("dike"))


def own_token_file() -> Path:
    """Where a service without a users file keeps its token, and clients of the same account find it."""
    return Path(platformdirs.user_config_dir("dike")) / OWN_TOKEN_FILE


def own_secret(path: Path, new: str, what: str) -> str:
    """What a file of this account holds, which only its owner may read.

    Args:
        path: the file.
        new: what is written where there is none yet.
        what: what it holds, for people.

    Raises:
        BadInputError: if it cannot be written or read, others may read it, or it holds something else.
    """
    try:
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            _write_once(path, new)
        text = path.read_text(encoding="ascii").strip()
        if path.stat().st_mode & OTHERS:
            raise BadInputError(f"Others may read the {what} in {path}; remove that file, and a new one is made.")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise BadInputError(f"The {what} file {path} cannot be used: {reason}.") from error
    return text


def _write_once(path: Path, text: str) -> None:
    """Writes a file whole or not at all; one that another process has written meanwhile stays."""
    # Such a file can be read by its owner only.
    with tempfile.NamedTemporaryFile("w", dir=path.parent, encoding="ascii") as file:
        file.write(f"{text}\n")
        file.flush()
        try:
            os.link(file.name, path)
        except FileExistsError:
            logger.info("%s has just been written by another process", path)


def signature(what: str, data: bytes) -> str:
    """By which this account knows again what it has written where others can write, too.

    Args:
        what: what the data are used for: they are good for nothing else.
        data: what is signed.

    Raises:
        BadInputError: if the account's key cannot be written or read.
    """
    path = Path(platformdirs.user_config_dir("dike")) / SIGNING_KEY_FILE
    key = own_secret(path, secrets.token_hex(_KEY_BYTES), "signing key")
    if len(key) < 2 * _KEY_BYTES:
        raise BadInputError(f"The signing key file {path} holds no key; remove it, and a new one is made.")
    return hmac.new(key.encode(), what.encode() + b"\0" + data, hashlib.sha256).hexdigest()


@contextmanager
def file_lock(path: Path) -> Iterator[None]:
    """Holds an exclusive lock on `path` (made if need be) and waits for other processes that hold it.

    The system drops the lock when its holder ends, however it ends; the file stays.
    """
    import fcntl  # Not on every platform that can run `dike plan`.

    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
