"""What a task's processes write, passed on: output to the sandbox and the framework, reports to the framework."""

from __future__ import annotations

import json
import logging
import os
import select
import threading
import time
from collections.abc import Callable
from typing import IO

from executor.channel import TaskChannel
from executor.messages import Report

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


def forward_reports(source: IO[bytes], channel: TaskChannel) -> threading.Thread:
    """Sends the framework each line that a process reports.

    Args:
        source: where the lines come from; it is closed at its end.
        channel: the task.

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
