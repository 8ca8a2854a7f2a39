"""Folders as a script could leave them."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from dike import plain_files

DEEP = 2 * sys.getrecursionlimit()
"""More folders in each other than a function may call itself, and a longer path than the system takes."""


def make_deep(folder: Path, depth: int = DEEP, name: str = "f", content: bytes = b"") -> None:
    """Makes folders in each other, and a file at the bottom."""
    here = os.open(folder, os.O_RDONLY)
    for _ in range(depth):
        os.mkdir("d", dir_fd=here)
        below = os.open("d", os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = below
    with os.fdopen(os.open(name, os.O_WRONLY | os.O_CREAT, dir_fd=here), "wb") as file:
        file.write(content)
    os.close(here)


@contextlib.contextmanager
def removed_afterwards(folder: Path) -> Iterator[None]:
    """Also where a test fails nothing stays that is too deep for pytest to remove."""
    try:
        yield
    finally:
        if folder.exists():
            above = os.open(folder.parent, os.O_RDONLY)
            try:
                plain_files.remove(above, folder.name)
            finally:
                os.close(above)
