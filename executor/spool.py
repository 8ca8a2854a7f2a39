"""The newest of what a task writes, kept so that it can be sent again."""

from __future__ import annotations

import errno
import logging
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

logger = logging.getLogger(__name__)

FILE_BYTES = 8 * 2**20
"""How much of a stream can be sent again: about what a service keeps of a job's output."""
MEMORY_BYTES = 64 * 1024
"""How much of it needs no file."""


class OutputSpool:
    """The newest bytes of one stream. They are in a file without a name, which is written round and round.

    The newest of all are in memory, too: they are there even if the disk is full.

    Args:
        folder: where the file is.

    Attributes:
        end: how many bytes the stream has had.
    """

    def __init__(self, folder: Path) -> None:
        self.end = 0
        self._memory = bytearray()
        self._file: IO[bytes] | None = None
        try:
            self._file = tempfile.TemporaryFile(buffering=0, dir=folder)  # noqa: SIM115 (open as long as we are)
        except OSError as error:
            self._give_up_file(error)

    @property
    def last(self) -> bytes:
        """The end of the stream, `MEMORY_BYTES` of it at most."""
        return bytes(self._memory)

    def append(self, data: bytes) -> None:
        """Takes what the stream goes on with, `FILE_BYTES` of it at most."""
        try:
            if self._file is not None:
                begin = 0
                for place, size in _places(self.end, len(data)):
                    piece = data[begin : begin + size]
                    if os.pwrite(self._file.fileno(), piece, place) < size:
                        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                    begin += size
        except OSError as error:
            self._give_up_file(error)
        self._memory += data
        del self._memory[:-MEMORY_BYTES]
        self.end += len(data)

    def read(self, offset: int, limit: int, *, catch_up: bool = False) -> tuple[int, bytes]:
        """What came after the first `offset` bytes of the stream, or the oldest after them that is still here.

        Args:
            offset: between 0 and `end`.
            limit: how many bytes to read at most.
            catch_up: whether, where something is gone, to leave out the older half of what is still here, too: who
                reads more slowly than the stream grows would find something gone each time.

        Returns:
            The offset of what was read, and the bytes.
        """
        memory_begin = self.end - len(self._memory)
        if offset < memory_begin and self._file is not None:
            begin = self._begin(offset, FILE_BYTES, catch_up=catch_up)
            pieces = _places(begin, min(limit, self.end - begin))
            try:
                return begin, b"".join(os.pread(self._file.fileno(), size, place) for place, size in pieces)
            except OSError as error:
                self._give_up_file(error)
        begin = self._begin(offset, len(self._memory), catch_up=catch_up)
        return begin, bytes(self._memory[begin - memory_begin :][:limit])

    def _begin(self, offset: int, kept: int, *, catch_up: bool) -> int:
        oldest = self.end - kept
        if offset >= oldest:
            return offset
        return self.end - kept // 2 if catch_up else oldest

    def _give_up_file(self, error: OSError) -> None:
        logger.error("only the end of the output can be sent again: %s", error)
        if self._file is not None:
            self._file.close()
            self._file = None


def _places(offset: int, size: int) -> Iterator[tuple[int, int]]:
    """Where a part of a stream is in its file: place and size of each piece."""
    while size:
        place = offset % FILE_BYTES
        piece = min(size, FILE_BYTES - place)
        yield place, piece
        offset, size = offset + piece, size - piece
