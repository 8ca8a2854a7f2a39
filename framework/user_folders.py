"""Where Dike keeps files of its user between runs, and the lock that guards them."""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import pwd
import secrets
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import platformdirs

from dike.exceptions import BadInputError, DikeError

_PRIVATE_FOLDER, _SHARED_FOLDER = 0o700, 0o755
_UNMAPPED = 65534
"""Who owns, to a container, what accounts outside of it own."""
OWN_TOKEN_FILE = "service-token"  # noqa: S105 (a file's name)
SIGNING_KEY_FILE = "signing-key"
OTHERS = stat.S_IRWXG | stat.S_IRWXO
_KEY_BYTES = 32

logger = logging.getLogger(__name__)


def cache_dir() -> Path:
    """Dike's cache folder: `$DIKE_CACHE`, else `dike` in the user's cache folder. It may not exist yet."""
    named = os.environ.get("DIKE_CACHE")
    return Path(named).expanduser().absolute() if named else Path(platformdirs.user_cache_dir("dike"))


def private_cache_dir() -> Path:
    """The part of the cache folder that is this account's alone; made if need be, and checked at each call.

    Accounts may share a cache. Whoever could write here could take another account's place: be its Mesos, fork its
    processes, get its variables.

    Raises:
        DikeError: another account could read it, change it, or put another folder in its place.
        OSError: it cannot be made.
    """
    shared = cache_dir()
    shared.mkdir(_SHARED_FOLDER, parents=True, exist_ok=True)
    folder = shared.resolve(strict=True) / f"private-{os.getuid()}"
    with suppress(FileExistsError):
        folder.mkdir(_PRIVATE_FOLDER)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & OTHERS:
        raise DikeError(
            f"The folder {folder} belongs to {_name_of(found.st_uid)} and has mode {stat.S_IMODE(found.st_mode):o}, so "
            "another account could take this one's place there: remove it, or name another cache with DIKE_CACHE."
        )
    for each in folder.parents:
        status = each.stat()
        is_open = status.st_mode & (stat.S_IWOTH | stat.S_ISVTX) == stat.S_IWOTH
        if is_open or status.st_uid not in (os.getuid(), 0, _UNMAPPED):
            raise DikeError(
                f"The folder {each} belongs to {_name_of(status.st_uid)} and has mode "
                f"{stat.S_IMODE(status.st_mode):o}, so another account could put its own folder in the place of "
                f"{folder}: name another cache with DIKE_CACHE, or set the sticky bit (chmod +t)."
            )
    return folder


def _name_of(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"account {uid}"


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
