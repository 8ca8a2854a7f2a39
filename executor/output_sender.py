"""Sends the framework what a task writes, and again what has got lost on its way."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass

from executor.channel import TaskChannel
from executor.messages import STREAMS, LogChunk, WantedOutput
from executor.output import CHUNK_BYTES, DRAIN_S
from executor.spool import OutputSpool

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
        """The end of each stream (`executor.spool.MEMORY_BYTES`) that has had anything."""
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
