"""Where Dike keeps files of its user between runs, and the lock that guards them."""

from __future__ import annotations

import os
import pwd
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import platformdirs

from dike.exceptions import DikeError

_PRIVATE_FOLDER, _SHARED_FOLDER = 0o700, 0o755
_OTHERS = 0o077
_UNMAPPED = 65534
"""Who owns, to a container, what accounts outside of it own."""
OWN_TOKEN_FILE = "service-token"  # noqa: S105 (a file's name)


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
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & _OTHERS:
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
