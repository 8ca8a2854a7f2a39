"""What a trial's run prints: a file in the sandbox, sent to the framework piece by piece."""

from __future__ import annotations

import codecs
import contextlib
from dataclasses import dataclass
from pathlib import Path

from executor.output import CHUNK_BYTES

FIRST_BYTES = 128 * 1024
"""So much of a run's output is sent in any case: what it prints as it begins."""
BEHIND_BYTES = 256 * 1024
"""What is written faster than it can be sent is left out in the middle, once so much has not been sent."""
LAST_BYTES = 64 * 1024
"""How much of a run's output is in the last words of its slot."""


@dataclass(frozen=True)
class Piece:
    """A piece of a run's output.

    Attributes:
        offset: how many bytes came before it.
        data: the bytes; whole characters, where they are UTF-8.
        skipped: how many bytes right before it are left out for good.
    """

    offset: int
    data: bytes
    skipped: int = 0


class RunLog:
    """What a run has printed, both streams in one file.

    Args:
        path: the file; it is there already.
        begin: how many bytes in it are of an earlier run, which the same process was.
    """

    def __init__(self, path: Path, begin: int = 0) -> None:
        self._path = path
        self._begin = begin
        self._sent = 0

    @property
    def end(self) -> int:
        """How many bytes are in the file with what it has printed."""
        return self._begin + self.size

    @property
    def size(self) -> int:
        """How many bytes the run has printed; 0 if somebody has removed the file."""
        try:
            return max(0, self._path.stat().st_size - self._begin)
        except FileNotFoundError:
            return 0

    def known(self, size: int) -> None:
        """The framework has so many bytes: what comes behind them is to be sent, again if it was before."""
        self._sent = min(self._sent, size)

    def take(self, count: int, *, has_ended: bool) -> list[Piece]:
        """The pieces that are to be sent next.

        Args:
            count: so many at most.
            has_ended: whether the run prints no more; before, the bytes of a last character that is not whole wait.
        """
        pieces: list[Piece] = []
        if self.size <= self._sent:
            return pieces
        with contextlib.suppress(FileNotFoundError), self._path.open("rb") as file:
            while len(pieces) < count:
                begin, size = self._sent, self.size
                if begin >= FIRST_BYTES and size - begin > BEHIND_BYTES:
                    begin = size - BEHIND_BYTES // 2
                file.seek(self._begin + begin)
                data = file.read(CHUNK_BYTES)
                if not has_ended or begin + len(data) < size:
                    data = _whole_characters(data)
                if not data:
                    break
                pieces.append(Piece(begin, data, begin - self._sent))
                self._sent = begin + len(data)
        return pieces

    def last(self) -> list[Piece]:
        """The end of the output, whatever has been sent."""
        self._sent = max(0, self.size - LAST_BYTES)
        return self.take(LAST_BYTES // CHUNK_BYTES + 1, has_ended=True)


def _whole_characters(data: bytes) -> bytes:
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    decoder.decode(data)
    begun, _ = decoder.getstate()
    return data[: len(data) - len(begun)]
