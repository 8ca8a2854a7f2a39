"""What tasks print, on its way to our own standard output and standard error."""

from __future__ import annotations

from collections.abc import Mapping
from typing import IO

from framework.tensorflow_noise import is_noise


class TaskOutput:
    """Writes the output of several tasks to two streams, lines whole where they would be mixed up.

    Args:
        streams: `stdout` and `stderr` -> where it goes.
    """

    def __init__(self, streams: Mapping[str, IO[str]]) -> None:
        self._streams = streams
        self._open_line: dict[tuple[str, str], str] = {}

    def write(self, source: str, stream: str, text: str, label: str = "") -> None:
        """Takes a piece of output in.

        Args:
            source: what wrote it.
            stream: `stdout` or `stderr`.
            text: the piece.
            label: stands before each line; empty to pass standard output on as it comes.
        """
        if label or stream == "stderr":
            text = self._whole_lines((source, stream), text, label)
        self._streams[stream].write(text)
        self._streams[stream].flush()

    def finish(self) -> None:
        """Writes the lines that have not ended."""
        for (_, stream), line in self._open_line.items():
            self._streams[stream].write(f"{line}\n")
        self._open_line.clear()

    def _whole_lines(self, key: tuple[str, str], text: str, label: str) -> str:
        """Holds back a line until its end has come; leaves out what TensorFlow always says."""
        lines = (self._open_line.pop(key, "") + text).splitlines(keepends=True)
        if lines and not lines[-1].endswith("\n"):
            self._open_line[key] = lines.pop()
        return "".join(label + line for line in lines if not is_noise(line.encode()))
