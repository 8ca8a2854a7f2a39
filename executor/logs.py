"""Logging to files."""

from __future__ import annotations

import logging
from pathlib import Path


def log_to(path: Path) -> None:
    """Appends all logging to a file: a sandbox's `stdout` and `stderr` belong to the user's processes."""
    logging.getLogger("pymesos").handlers.clear()
    logging.basicConfig(
        filename=path,
        level=logging.INFO,
        format="%(asctime)s %(levelname)s %(process)d [%(threadName)s] %(name)s: %(message)s",
        force=True,
    )
