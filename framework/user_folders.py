"""Where Dike keeps files of its user between runs, and the lock that guards them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import platformdirs

OWN_TOKEN_FILE = "service-token"  # noqa: S105 (a file's name)


def cache_dir() -> Path:
    """Dike's cache folder: `$DIKE_CACHE`, else `dike` in the user's cache folder. It may not exist yet."""
    named = os.environ.get("DIKE_CACHE")
    return Path(named).expanduser().absolute() if named else Path(platformdirs.user_cache_dir("dike"))


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
