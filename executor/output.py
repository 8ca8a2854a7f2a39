"""What a task's processes write: copied to the sandbox, kept for a while, and sent to the framework until it has it."""

from __future__ import annotations

import errno
import json
import logging
import os
import select
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from executor.channel import TaskChannel
from executor.messages import STREAMS, LogChunk, Report, WantedOutput

logger = logging.getLogger(__name__)

CHUNK_BYTES = 16 * 1024
TAIL_BYTES = 6 * 1024
DRAIN_S = 2.0
"""How long is waited for what a process that has ended has written; something it left behind may hold its pipes."""
GATHER_S = 0.1


class OutputCopier:
    """Copies what processes of one task, one after the other, write to their pipes.

    Each piece goes to our own stream of the same name (which Mesos keeps in the sandbox), then to
    `on_output(stream, data)`, called from one thread per stream.

    Attributes:
        log_bytes: stream -> bytes copied so far, of all processes together.
    """

    def __init__(self, on_output: Callable[[str, bytes], None]) -> None:
        self._on_output = on_output
        self._lock = threading.Lock()
        self._tail = bytearray()
        self._pumps: list[threading.Thread] = []
        self.log_bytes = {"stdout": 0, "stderr": 0}

    @property
    def tail(self) -> str:
        """The end of the newest process' output, both streams in the order in which they were read."""
        return self._tail.decode(errors="replace")

    def follow(self, stdout: IO[bytes], stderr: IO[bytes]) -> None:
        """Copies from these pipes, to their ends, which are closed then."""
        self._tail.clear()
        self._pumps = [
            threading.Thread(target=self._pump, args=(name, pipe, descriptor), daemon=True)
            for name, pipe, descriptor in (("stdout", stdout, 1), ("stderr", stderr, 2))
        ]
        for pump in self._pumps:
            pump.start()

    def drain(self) -> None:
        """Waits until all that has been written is copied, `DRAIN_S` for each stream at most."""
        for pump in self._pumps:
            pump.join(DRAIN_S)

    def _pump(self, name: str, source: IO[bytes], copy: int) -> None:
        with source:
            while data := _read_for_a_moment(source.fileno()):
                with self._lock:
                    self.log_bytes[name] += len(data)
                    self._tail[:] = (self._tail + data)[-TAIL_BYTES:]
                _write_all(copy, data)
                self._on_output(name, data)


def forward_reports(
    source: IO[bytes], channel: TaskChannel, saved: Callable[[], None] = lambda: None
) -> threading.Thread:
    """Sends the framework each line that a process reports.

    Args:
        source: where the lines come from; it is closed at its end.
        channel: the task.
        saved: called when the process has reported a checkpoint.

    Returns:
        The thread that does so, to the end of `source`.
    """

    def forward() -> None:
        with source:
            for line in source:
                try:
                    content = json.loads(line)
                except ValueError:
                    logger.warning("not a report: %r", line[:200])
                    continue
                channel.send(Report(channel.task_id, content).encode())
                if isinstance(content, dict) and content.get("type") == "checkpoint":
                    saved()

    thread = threading.Thread(target=forward, name="reports", daemon=True)
    thread.start()
    return thread


def _read_for_a_moment(source: int) -> bytes:
    """Whatever comes within a moment of the first byte, since scripts write lines in crumbs; empty at the end."""
    data = os.read(source, CHUNK_BYTES)
    deadline = time.monotonic() + GATHER_S
    while data and len(data) < CHUNK_BYTES:
        left = deadline - time.monotonic()
        if left <= 0 or not select.select([source], [], [], left)[0]:
            break
        more = os.read(source, CHUNK_BYTES - len(data))
        if not more:
            break
        data += more
    return data


def _write_all(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(descriptor, view) :]
        except BlockingIOError:
            time.sleep(0.01)
        except OSError as error:
            # A full disk must not end the training; the framework still gets the output.
            logger.error("copying output into the sandbox failed: %s", error)
            return


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


RETRY_S = 1.0
"""How long to wait for an agent that takes no messages."""


@dataclass
class _Stream:
    """One stream; `sent` bytes of it are on their way, and `is_asked` is whether an answer is owed though all are."""

    spool: OutputSpool
    sent: int = 0
    is_asked: bool = False

    @property
    def is_due(self) -> bool:
        return self.is_asked or self.sent < self.spool.end


class OutputSender:
    """Sends each stream in its order, from wherever the framework wants it.

    Messages may get lost, above all while nobody listens. The framework knows by the offsets whether anything is
    missing, and says from where to go on.

    Args:
        channel: the task.
        enabled: whether anything is sent at all.
    """

    def __init__(self, channel: TaskChannel, *, enabled: bool) -> None:
        self._channel = channel
        self._streams = {name: _Stream(OutputSpool(channel.sandbox)) for name in STREAMS} if enabled else {}
        self._changed = threading.Condition()
        self._is_sending = False
        if enabled:
            threading.Thread(target=self._run, name="output", daemon=True).start()

    @property
    def last_output(self) -> list[LogChunk]:
        """The end of each stream (`executor.output.MEMORY_BYTES`) that has had anything."""
        with self._changed:
            spools = {name: stream.spool for name, stream in self._streams.items() if stream.spool.end}
            return [
                LogChunk(self._channel.task_id, name, spool.end - len(spool.last), spool.last)
                for name, spool in spools.items()
            ]

    def add(self, stream: str, data: bytes) -> None:
        """A stream goes on with this; it is sent soon."""
        if stream in self._streams:
            with self._changed:
                self._streams[stream].spool.append(data)
                self._changed.notify_all()

    def resend(self, wanted: WantedOutput) -> None:
        """Goes on from there, and says so even if nothing came after it."""
        with self._changed:
            for name in wanted.offsets.keys() & self._streams.keys():
                stream = self._streams[name]
                stream.sent = max(0, min(wanted.offsets[name], stream.spool.end))
                stream.is_asked = True
            self._changed.notify_all()

    def drain(self) -> None:
        """Waits until all is on its way, `DRAIN_S` at most."""
        with self._changed:
            self._changed.wait_for(lambda: not self._is_sending and not self._due(), DRAIN_S)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._is_sending = False
                self._changed.notify_all()
                self._changed.wait_for(self._due)
                self._is_sending = True
                chunks = [self._next(name) for name in self._due()]
            undelivered = [chunk for chunk in chunks if not self._channel.send(chunk.encode())]
            if undelivered:
                with self._changed:
                    for chunk in undelivered:
                        stream = self._streams[chunk.stream]
                        stream.sent = min(stream.sent, chunk.offset - chunk.skipped)
                        stream.is_asked = True
                time.sleep(RETRY_S)

    def _due(self) -> list[str]:
        return [name for name, stream in self._streams.items() if stream.is_due]

    def _next(self, name: str) -> LogChunk:
        stream = self._streams[name]
        # Whoever asks gets all there is; later on, what is gone was written faster than it can be sent.
        begin, data = stream.spool.read(stream.sent, CHUNK_BYTES, catch_up=not stream.is_asked)
        chunk = LogChunk(self._channel.task_id, name, begin, data, begin - stream.sent)
        stream.sent = begin + len(data)
        stream.is_asked = False
        return chunk
