"""The output of a trial's run: a file in the sandbox, sent to the framework piece by piece."""

from __future__ import annotations

import codecs
import contextlib
from dataclasses import dataclass
from pathlib import Path

from executor.streams import CHUNK_BYTES

HEAD_BYTES = 128 * 1024
"""The first part of a run's output, which is never skipped."""
MAX_UNSENT_BYTES = 256 * 1024
"""Maximum backlog; beyond it, output is skipped in the middle: it is written faster than it can be sent."""
FINAL_TAIL_BYTES = 64 * 1024
"""Maximum output of a run in the last message of its slot."""


@dataclass(frozen=True)
class Piece:
    """A piece of a run's output; whole characters, if it is UTF-8. `skipped` bytes directly before are never sent."""

    offset: int
    data: bytes
    skipped: int = 0


class RunLog:
    """The output of a run, both streams in one file.

    Args:
        path: the file, which exists.
        begin: number of bytes in it of earlier runs in the same process.
    """

    def __init__(self, path: Path, begin: int = 0) -> None:
        self._path = path
        self._start = begin
        self._sent = 0

    @property
    def end(self) -> int:
        return self._start + self.size

    @property
    def size(self) -> int:
        """Number of bytes that the run has printed; 0 if the file was deleted."""
        try:
            return max(0, self._path.stat().st_size - self._start)
        except FileNotFoundError:
            return 0

    def acknowledge(self, size: int) -> None:
        """Records that the framework has `size` bytes: what follows is sent, again if necessary."""
        self._sent = min(self._sent, size)

    def take(self, count: int, *, has_ended: bool) -> list[Piece]:
        """Returns up to `count` pieces to send. Before the run `has_ended`, withholds an incomplete last character."""
        pieces: list[Piece] = []
        if self.size <= self._sent:
            return pieces
        with contextlib.suppress(FileNotFoundError), self._path.open("rb") as file:
            while len(pieces) < count:
                begin, size = self._sent, self.size
                if begin >= HEAD_BYTES and size - begin > MAX_UNSENT_BYTES:
                    begin = size - MAX_UNSENT_BYTES // 2
                file.seek(self._start + begin)
                data = file.read(CHUNK_BYTES)
                if not has_ended or begin + len(data) < size:
                    data = _whole_characters(data)
                if not data:
                    break
                pieces.append(Piece(begin, data, begin - self._sent))
                self._sent = begin + len(data)
        return pieces

    def take_tail(self) -> list[Piece]:
        """Returns the end of the output, whether or not it was sent."""
        self._sent = max(0, self.size - FINAL_TAIL_BYTES)
        return self.take(FINAL_TAIL_BYTES // CHUNK_BYTES + 1, has_ended=True)


def _whole_characters(data: bytes) -> bytes:
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    decoder.decode(data)
    begun, _ = decoder.getstate()
    return data[: len(data) - len(begun)]
