"""Which locks a process has on a file."""

from __future__ import annotations

from pathlib import Path


def locked_by(process: int, file: Path) -> list[str]:
    """The POSIX locks that a process has on a file, as the system lists them but for their places in that list."""
    lines = [line.partition(": ")[2] for line in Path("/proc/locks").read_text().splitlines()]
    return [line for line in lines if f" {process} " in line and f":{file.stat().st_ino} " in line]
