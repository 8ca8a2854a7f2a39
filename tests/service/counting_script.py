"""Writes numbered lines until a file says that it is enough, then one last: FOLDER, where it leaves how far it is."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

PAUSE_S = 0.02
LAST = "the last é\n"


def write(descriptor: int, text: str) -> None:
    """Stops in the middle of each character that has more than one byte."""
    for piece in text.encode().replace(b"\xc3", b"\xc3|").split(b"|"):
        os.write(descriptor, piece)
        time.sleep(PAUSE_S)


def main() -> None:
    folder = Path(sys.argv[1])
    number = 0
    while not (folder / "enough").exists():
        write(1, f"line {number} é\n")
        write(2, f"aside {number}\n")
        number += 1
        (folder / "written").write_text(str(number))
    write(1, LAST)
    (folder / "over").touch()


if __name__ == "__main__":
    main()
