"""Standard output and error of a task's processes: copied to the sandbox, spooled, and sent to the framework."""

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
from executor.mirror import Mirror

logger = logging.getLogger(__name__)

CHUNK_BYTES = 16 * 1024
TAIL_BYTES = 6 * 1024
DRAIN_TIMEOUT_S = 2.0
"""Maximum wait for the output of a process that has ended; a process that it left behind may keep its pipes open."""
BATCH_WINDOW_S = 0.1


class OutputCopier:
    """Copies what the successive processes of one task write to their pipes.

    Each piece goes to this process' stream of the same name (which Mesos keeps in the sandbox), then to
    `on_output(stream, data)`, which is called from one thread per stream.

    Attributes:
        log_bytes: stream -> bytes copied, of all processes together.
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
        """Copies from these pipes until they end, and closes them."""
        self._tail.clear()
        self._pumps = [
            threading.Thread(target=self._pump, args=(name, pipe, descriptor), daemon=True)
            for name, pipe, descriptor in (("stdout", stdout, 1), ("stderr", stderr, 2))
        ]
        for pump in self._pumps:
            pump.start()

    def drain(self) -> None:
        """Waits until all output is copied, for at most `DRAIN_TIMEOUT_S` per stream."""
        for pump in self._pumps:
            pump.join(DRAIN_TIMEOUT_S)

    def _pump(self, name: str, source: IO[bytes], copy: int) -> None:
        with source:
            while data := _read_batch(source.fileno()):
                with self._lock:
                    self.log_bytes[name] += len(data)
                    self._tail[:] = (self._tail + data)[-TAIL_BYTES:]
                _write_all(copy, data)
                self._on_output(name, data)


def forward_reports(
    source: IO[bytes],
    channel: TaskChannel,
    on_checkpoint: Callable[[], None] = lambda: None,
    mirror: Mirror | None = None,
) -> threading.Thread:
    """Sends the framework each line of `source` (a report), in the returned thread. Closes `source` at its end.

    Calls `on_checkpoint` after a checkpoint; if that is in a mirror, before the report, which names the path in the
    store.
    """

    def forward() -> None:
        with source:
            for line in source:
                try:
                    content = json.loads(line)
                except ValueError:
                    logger.warning("not a report: %r", line[:200])
                    continue
                is_checkpoint = isinstance(content, dict) and content.get("type") == "checkpoint"
                if is_checkpoint and mirror is not None:
                    on_checkpoint()
                    content["path"] = mirror.to_remote(str(content.get("path")))
                channel.send(Report(channel.task_id, content).encode())
                if is_checkpoint and mirror is None:
                    on_checkpoint()

    thread = threading.Thread(target=forward, name="reports", daemon=True)
    thread.start()
    return thread


def _read_batch(source: int) -> bytes:
    """Reads what arrives within `BATCH_WINDOW_S` of the first byte: scripts write in fragments. Empty at the end."""
    data = os.read(source, CHUNK_BYTES)
    deadline = time.monotonic() + BATCH_WINDOW_S
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
            # A full disk must not end the training; the framework still receives the output.
            logger.error("output cannot be copied into the sandbox: %s", error)
            return


SPOOL_FILE_BYTES = 8 * 2**20
"""Bytes of a stream that can be resent; about as much as a service stores of a job's output."""
SPOOL_MEMORY_BYTES = 64 * 1024
"""The newest part, also in memory."""


class OutputSpool:
    """The newest bytes of one stream, in an unnamed file in `folder` used as a ring buffer.

    The very newest are in memory too, so that they are available even if the disk is full.

    Attributes:
        end: number of bytes that the stream has had.
    """

    def __init__(self, folder: Path) -> None:
        self.end = 0
        self._memory = bytearray()
        self._file: IO[bytes] | None = None
        try:
            self._file = tempfile.TemporaryFile(buffering=0, dir=folder)  # noqa: SIM115 (open as long as this object)
        except OSError as error:
            self._drop_file(error)

    @property
    def last(self) -> bytes:
        return bytes(self._memory)

    def append(self, data: bytes) -> None:
        try:
            if self._file is not None:
                begin = 0
                for place, size in _file_ranges(self.end, len(data)):
                    piece = data[begin : begin + size]
                    if os.pwrite(self._file.fileno(), piece, place) < size:
                        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                    begin += size
        except OSError as error:
            self._drop_file(error)
        self._memory += data
        del self._memory[:-SPOOL_MEMORY_BYTES]
        self.end += len(data)

    def read(self, offset: int, limit: int, *, catch_up: bool = False) -> tuple[int, bytes]:
        """Reads from an offset, or from the oldest byte after it that is still stored.

        Args:
            offset: between 0 and `end`.
            limit: maximum number of bytes.
            catch_up: whether to skip the older half of what is stored too, if bytes are missing: a reader slower than
                the stream would otherwise miss some on every read.

        Returns:
            The offset of what was read, and the bytes.
        """
        memory_begin = self.end - len(self._memory)
        if offset < memory_begin and self._file is not None:
            begin = self._start_at(offset, SPOOL_FILE_BYTES, catch_up=catch_up)
            pieces = _file_ranges(begin, min(limit, self.end - begin))
            try:
                return begin, b"".join(os.pread(self._file.fileno(), size, place) for place, size in pieces)
            except OSError as error:
                self._drop_file(error)
        begin = self._start_at(offset, len(self._memory), catch_up=catch_up)
        return begin, bytes(self._memory[begin - memory_begin :][:limit])

    def _start_at(self, offset: int, kept: int, *, catch_up: bool) -> int:
        oldest = self.end - kept
        if offset >= oldest:
            return offset
        return self.end - kept // 2 if catch_up else oldest

    def _drop_file(self, error: OSError) -> None:
        logger.error("only the end of the output can be resent: %s", error)
        if self._file is not None:
            self._file.close()
            self._file = None


def _file_ranges(offset: int, size: int) -> Iterator[tuple[int, int]]:
    """Position and size of each piece of a part of the stream, in the ring buffer."""
    while size:
        place = offset % SPOOL_FILE_BYTES
        piece = min(size, SPOOL_FILE_BYTES - place)
        yield place, piece
        offset, size = offset + piece, size - piece


RETRY_DELAY_S = 1.0
"""Delay after the agent has not accepted a message."""


@dataclass
class _Stream:
    """One stream: `sent` bytes are sent; `is_requested`, the framework is owed a chunk, even an empty one."""

    spool: OutputSpool
    sent: int = 0
    is_requested: bool = False

    @property
    def is_due(self) -> bool:
        return self.is_requested or self.sent < self.spool.end


class OutputSender:
    """Sends each stream in order, from any offset that the framework requests.

    Messages may get lost, above all while no framework is connected. It detects gaps by the offsets, and requests them.
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
        """The end of each stream that is not empty, at most `SPOOL_MEMORY_BYTES`."""
        with self._changed:
            spools = {name: stream.spool for name, stream in self._streams.items() if stream.spool.end}
            return [
                LogChunk(self._channel.task_id, name, spool.end - len(spool.last), spool.last)
                for name, spool in spools.items()
            ]

    def add(self, stream: str, data: bytes) -> None:
        if stream in self._streams:
            with self._changed:
                self._streams[stream].spool.append(data)
                self._changed.notify_all()

    def resend(self, wanted: WantedOutput) -> None:
        """Sends again from the offsets requested; answers even if there is nothing after them."""
        with self._changed:
            for name in wanted.offsets.keys() & self._streams.keys():
                stream = self._streams[name]
                stream.sent = max(0, min(wanted.offsets[name], stream.spool.end))
                stream.is_requested = True
            self._changed.notify_all()

    def drain(self) -> None:
        """Waits until all is sent, for at most `DRAIN_TIMEOUT_S`."""
        with self._changed:
            self._changed.wait_for(lambda: not self._is_sending and not self._due(), DRAIN_TIMEOUT_S)

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
                        stream.is_requested = True
                time.sleep(RETRY_DELAY_S)

    def _due(self) -> list[str]:
        return [name for name, stream in self._streams.items() if stream.is_due]

    def _next(self, name: str) -> LogChunk:
        stream = self._streams[name]
        # A request gets all that is stored; otherwise output was written faster than it can be sent.
        begin, data = stream.spool.read(stream.sent, CHUNK_BYTES, catch_up=not stream.is_requested)
        chunk = LogChunk(self._channel.task_id, name, begin, data, begin - stream.sent)
        stream.sent = begin + len(data)
        stream.is_requested = False
        return chunk
