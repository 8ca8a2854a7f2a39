"""Prints the output of tasks to standard output and standard error."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Protocol

from framework.project.tensorflow_noise import is_noise
from solver.cli.output import escape_output

_LINE_ENDS = "\n\r\b"
"""Progress bars overwrite their line: text before a carriage return or a backspace is shown, too."""
LINE_END_TIMEOUT_S = 1.0
"""Maximum time for which the start of a line is kept back."""


class OutputStream(Protocol):
    """What is needed of a stream such as `sys.stdout`."""

    def write(self, text: str, /) -> object: ...
    def flush(self) -> object: ...
    def isatty(self) -> bool: ...


class TaskOutput:
    """Writes the output of several tasks to two streams, without mixing their lines.

    Args:
        streams: `stdout` and `stderr` -> stream to write to.
        rewrite: changes each line of standard error, such as paths in tracebacks.
    """

    def __init__(self, streams: Mapping[str, OutputStream], rewrite: Callable[[str], str] = str) -> None:
        self._streams = streams
        self._rewrite = rewrite
        self._open_line: dict[tuple[str, str], str] = {}
        self._is_inside_line = False
        self._lock = threading.RLock()
        self._timer: threading.Timer | None = None

    def write(self, source: str, stream: str, text: str, label: str = "") -> None:
        """Writes a piece of output.

        Args:
            source: the task that wrote it.
            stream: `stdout` or `stderr`.
            text: the piece.
            label: prefix of each line; empty to pass standard output on unchanged.
        """
        is_bare = stream == "stdout" and not label
        with self._lock:
            self._write((source, stream), text, label, is_bare=is_bare)

    def _write(self, key: tuple[str, str], text: str, label: str, *, is_bare: bool) -> None:
        stream = key[1]
        text = self._without_open_line(key, text, _LINE_ENDS if is_bare else "\n")
        if not is_bare:
            lines = [line for line in text.splitlines(keepends=True) if not is_noise(line.encode())]
            text = "".join(label + (self._rewrite(line) if stream == "stderr" else line) for line in lines)
        if is_bare and key in self._open_line:
            self._show_soon(key)
        if not text:
            return
        self._streams[stream].write(self._safe(stream, text))
        self._streams[stream].flush()
        if stream == "stdout":
            self._is_inside_line = not text.endswith("\n")

    def end_line(self) -> None:
        """Ends an unfinished line, such as a progress bar, before another line is printed."""
        with self._lock:
            if self._is_inside_line:
                self._is_inside_line = False
                self._streams["stdout"].write("\n")
                self._streams["stdout"].flush()

    def finish(self) -> None:
        """Writes unfinished lines."""
        with self._lock:
            for (_, stream), line in self._open_line.items():
                self._streams[stream].write(f"{self._safe(stream, line)}\n")
            self._open_line.clear()

    def _show_soon(self, key: tuple[str, str]) -> None:
        """Shows the start of a line after a timeout, such as dots of progress or a question."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = threading.Timer(LINE_END_TIMEOUT_S, self._show, args=(key,))
        self._timer.daemon = True
        self._timer.start()

    def _show(self, key: tuple[str, str]) -> None:
        with self._lock:
            if text := self._open_line.pop(key, ""):
                self._is_inside_line = True
                self._streams["stdout"].write(self._safe("stdout", text))
                self._streams["stdout"].flush()

    def _safe(self, stream: str, text: str) -> str:
        return escape_output(text) if self._streams[stream].isatty() else text

    def _without_open_line(self, key: tuple[str, str], text: str, ends: str) -> str:
        """Returns the text up to its last line end, and keeps back the rest until its line ends."""
        text = self._open_line.pop(key, "") + text
        end = max(map(text.rfind, ends)) + 1
        if text[end:]:
            self._open_line[key] = text[end:]
        return text[:end]
