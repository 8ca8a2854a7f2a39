"""All-reduce over TCP: each worker sends to the next one and receives from the one before.

Of a sum of B bytes, a worker of n sends and receives 2 (n - 1) / n B, which is the minimum (Patarasuk & Yuan, JPDC
2009). TensorFlow's own ring, over gRPC, takes two to five times as long (`benchmarks/ring.py`).
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import os
import select
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dike.exceptions import JobFailedError
from dike.roles.cluster import host_and_port

CONNECT_TIMEOUT_S = 600.0
"""Maximum time until all workers have connected; their machines may start at different times."""
SEGMENT_BYTES = 512 << 10
"""Size of the pieces in which data is passed on, so that sending, receiving and adding overlap."""
_HELLO_TIMEOUT_S = 5.0
_RETRY_S = 0.1
_ACCEPTED = b"\n"
_HEADER = struct.Struct("!QQ16s")


@dataclass(frozen=True)
class _Links:
    before: socket.socket
    after: socket.socket


class Ring:
    """This worker's connections to its neighbours. Connects in the background.

    Args:
        addresses: `host:port` of all workers, of which there are at least two.
        rank: index of this worker.
        name: the same for all workers that may connect, and for no others.
        lost: called, in any thread, with the index of a neighbour whose connection has ended.
    """

    def __init__(self, addresses: Sequence[str], rank: int, name: str, lost: Callable[[int], None]) -> None:
        self._addresses = addresses
        self._size = len(addresses)
        self._rank = rank
        self._before, self._after = (rank - 1) % self._size, (rank + 1) % self._size
        self._name = name
        self._lost = lost
        self._sums = 0
        self._links: concurrent.futures.Future[_Links] = concurrent.futures.Future()
        _, port = host_and_port(addresses[rank])
        is_dual = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if is_dual else socket.AF_INET
        self._server = socket.create_server(("", port), family=family, dualstack_ipv6=is_dual)
        self._after_link: concurrent.futures.Future[socket.socket] = concurrent.futures.Future()
        for name, target in (("dike-ring", self._connect), ("dike-ring-dial", self._dial)):
            threading.Thread(target=target, name=name, daemon=True).start()

    def sum(self, array: NDArray[np.generic]) -> NDArray[np.generic]:
        """Returns the sum over all workers, bit by bit the same on each, which has to be called by each in this order.

        Raises:
            JobFailedError: another worker sums an array of another type or size, or has not connected in time.
            OSError: a neighbour has ended.
        """
        links = self._connected()
        if array.dtype.hasobject:
            raise TypeError(f"arrays of type {array.dtype} cannot be summed over workers")
        total = np.array(array).reshape(-1)
        length = max(1, SEGMENT_BYTES // total.itemsize)
        chunks = [
            [chunk[start : start + length] for start in range(0, len(chunk), length)]
            for chunk in np.array_split(total, self._size)
        ]
        self._sums += 1
        header = _HEADER.pack(self._sums, total.nbytes, array.dtype.name.encode())
        outgoing = deque([memoryview(header), *map(_bytes_of, chunks[self._rank])])
        other = bytearray(_HEADER.size)
        self._transfer(links, outgoing, memoryview(other))
        if other != header:
            raise JobFailedError(_unequal(header, bytes(other)))
        received = np.empty(length, total.dtype)
        # First each chunk is summed on its way around the ring, then its sum goes around.
        steps = 2 * (self._size - 1)
        for step in range(steps):
            is_adding = step < self._size - 1
            for own in chunks[(self._rank - step - 1) % self._size]:
                target = received[: len(own)] if is_adding else own
                self._transfer(links, outgoing, _bytes_of(target))
                if is_adding:
                    np.add(own, target, out=own)
                if step < steps - 1:
                    outgoing.append(_bytes_of(own))
        self._transfer(links, outgoing)
        return total.reshape(array.shape)

    def _transfer(self, links: _Links, outgoing: deque[memoryview], incoming: memoryview | None = None) -> None:
        """Fills `incoming`, and meanwhile sends `outgoing`; without `incoming`, sends all."""
        sends_all = incoming is None
        while incoming or (sends_all and outgoing):
            sent = received = 0
            if outgoing:
                with self._noticing_the_end_of(self._after), contextlib.suppress(BlockingIOError):
                    sent = links.after.send(outgoing[0])
                outgoing[0] = outgoing[0][sent:]
                if not outgoing[0]:
                    outgoing.popleft()
            if incoming:
                with self._noticing_the_end_of(self._before), contextlib.suppress(BlockingIOError):
                    received = links.before.recv_into(incoming)
                    if not received:
                        raise ConnectionError("the connection has been closed")
                incoming = incoming[received:]
            if not sent and not received:
                ready = select.poll()
                if outgoing:
                    ready.register(links.after, select.POLLOUT)
                if incoming:
                    ready.register(links.before, select.POLLIN)
                ready.poll()

    @contextlib.contextmanager
    def _noticing_the_end_of(self, neighbour: int) -> Iterator[None]:
        try:
            yield
        except OSError:
            self._lost(neighbour)
            raise

    # Connections.

    def _connected(self) -> _Links:
        try:
            return self._links.result(CONNECT_TIMEOUT_S)
        except TimeoutError:
            raise JobFailedError(
                f"Worker:{self._before} at {self._addresses[self._before]} or worker:{self._after} at "
                f"{self._addresses[self._after]} has not connected within {CONNECT_TIMEOUT_S:.0f} s; look at its log."
            ) from None

    def _connect(self) -> None:
        try:
            links = _Links(self._accept(), self._after_link.result())
            self._server.close()
            for link in (links.before, links.after):
                link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                link.setblocking(False)
        except BaseException as error:
            self._links.set_exception(error)
            raise
        # A child that the script forks must not keep them open.
        for link in (links.before, links.after):
            os.register_at_fork(after_in_child=link.close)
        self._links.set_result(links)
        self._watch(links)

    def _dial(self) -> None:
        """Connects to the next worker, whose process may start later."""
        hello = self._hello(self._rank)
        while True:
            with contextlib.suppress(OSError):
                link = socket.create_connection(host_and_port(self._addresses[self._after]), timeout=_HELLO_TIMEOUT_S)
                link.sendall(hello)
                link.settimeout(None)  # it answers once it accepts connections
                if link.recv(len(_ACCEPTED)) == _ACCEPTED:
                    self._after_link.set_result(link)
                    return
                link.close()
            time.sleep(_RETRY_S)

    def _accept(self) -> socket.socket:
        """Accepts the worker before this one, and refuses others, such as one of an earlier attempt."""
        hello = self._hello(self._before)
        while True:
            link, _ = self._server.accept()
            with contextlib.suppress(OSError):
                link.settimeout(_HELLO_TIMEOUT_S)
                if _read(link, len(hello)) == hello:
                    link.sendall(_ACCEPTED)
                    return link
            link.close()

    def _hello(self, rank: int) -> bytes:
        return json.dumps([self._name, list(self._addresses), rank]).encode()

    def _watch(self, links: _Links) -> None:
        """Notices that a neighbour has ended while this worker computes."""
        neighbours = {links.before.fileno(): self._before, links.after.fileno(): self._after}
        ended = select.poll()
        for number in neighbours:
            ended.register(number, select.POLLRDHUP)
        self._lost(neighbours[ended.poll()[0][0]])


def _bytes_of(array: NDArray[np.generic]) -> memoryview:
    return array.view(np.uint8).data


def _read(link: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count and (more := link.recv(count - len(data))):
        data += more
    return data


def _unequal(own: bytes, other: bytes) -> str:
    shown = []
    for header in (own, other):
        number, size, name = _HEADER.unpack(header)
        shown.append(f"sum {number} of {size} bytes of {name.rstrip(bytes(1)).decode()}")
    return (
        f"The workers of this job do not make the same steps: this one is at {shown[0]}, the one before it at "
        f"{shown[1]}. Make the script do the same in every process, such as the same number of batches."
    )
