"""Folders as a script could leave them."""

from __future__ import annotations

import os
import sys
from pathlib import Path

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
