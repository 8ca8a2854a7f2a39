"""Reserves blocks of ports, each for one cluster on a machine."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass

from dike.exceptions import DikeError

BLOCK_SIZE = 100
FIRST_PORT, END_PORT = 20000, 32000
"""Range of the blocks: below the ports that Linux uses for outgoing connections (32768 and up by default)."""


@dataclass(frozen=True)
class PortBlock:
    """Ports `first` to `last`, reserved as long as any process has `claim` open.

    The claim is an abstract Unix socket named after the block: it is in the same network namespace as the ports and
    disappears with the last process that has it open, so a crash leaves no file behind.
    """

    first: int
    claim: socket.socket

    @property
    def last(self) -> int:
        return self.first + BLOCK_SIZE - 1

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.first, self.last + 1))

    def __str__(self) -> str:
        return f"[{self.first}-{self.last}]"


def reserve_blocks(count: int) -> list[PortBlock]:
    """Reserves `count` blocks in which no port is in use.

    Raises:
        DikeError: there are too few.
    """
    with ExitStack() as claims:
        blocks: list[PortBlock] = []
        for first in range(FIRST_PORT, END_PORT, BLOCK_SIZE):
            if len(blocks) == count:
                break
            claim = _claim(first)
            if claim is None:
                continue
            block = PortBlock(first, claim)
            if all(is_free(port) for port in block):
                claims.enter_context(claim)
                blocks.append(block)
            else:
                claim.close()
        if len(blocks) < count:
            raise DikeError(
                f"The private Mesos needs {count} blocks of {BLOCK_SIZE} free ports between {FIRST_PORT} and "
                f"{END_PORT}, and only {len(blocks)} are available: end other clusters on this machine."
            )
        claims.pop_all()
    return blocks


def is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True


def _claim(first: int) -> socket.socket | None:
    """Reserves a block; None if another process has it."""
    claim = socket.socket(socket.AF_UNIX)
    try:
        claim.bind(f"\0dike-ports-{first}")
    except OSError:
        claim.close()
        return None
    return claim
