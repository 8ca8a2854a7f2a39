"""Carries the connections of Mesos' daemons between the machines of a cluster: `python -m framework.cluster.gateway`.

Each daemon has one virtual loopback address, the same on every machine. On the daemon's own machine it is the daemon;
elsewhere it is a gateway, which carries the connection to the daemon's machine over TLS 1.3. Members connect to the
head, never the reverse: for the way back each member keeps spare connections open. Each connection starts with a line
of JSON:

    {"kind": "authority"}              the authority's certificate; needs no certificate of the client
    {"kind": "join", ...}              asks for a certificate (`admission.JoinRequest`); needs none either
    {"kind": "open", "to": "master"}   from then on it is a connection to the master, or to the store
    {"kind": "spare"}                  a line from the head turns it into a connection to the member's agent
    {"kind": "alive"}                  a line each second in both directions; without any, both sides drop all
                                       connections of the member
    {"kind": "members"}                seconds since the head has last heard from each member
    {"kind": "leave"}                  the member leaves the cluster

A member can open only these: not another member's agent. On loopback, a gateway accepts connections of its own account
only, as the daemons do.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
import json
import logging
import socket
import ssl
import sys
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from typing import Any

from dike.exceptions import BadInputError
from framework.cluster.admission import admit
from framework.cluster.authority import HEAD, client_context, peer_name, server_context
from framework.cluster.records import (
    AGENT,
    HEAD_INDEX,
    HEAD_ROLE,
    STORE,
    ClusterFolder,
    Member,
    Membership,
    start_service,
)
from framework.embedded.libmesos.peers import is_trusted_peer

logger = logging.getLogger(__name__)

LINE_LIMIT_BYTES = 1 << 18
READ_BYTES = 1 << 18
REQUEST_TIMEOUT_S = 10.0
ALIVE_INTERVAL_S = 1.0
ALIVE_TIMEOUT_S = 10.0
"""Without a line for this time, the other machine counts as lost."""
SPARE_CONNECTIONS = 4
SPARE_TIMEOUT_S = 5.0
"""Maximum wait for a spare connection of a member."""
RETRY_INTERVAL_S = 0.5
MAX_STRANGERS = 64
"""Maximum number of connections without a certificate: machines that join."""
Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Connections:
    """The open connections to one machine, which are closed together when it is lost."""

    def __init__(self) -> None:
        self._writers: set[asyncio.StreamWriter] = set()

    def abort(self) -> None:
        for writer in list(self._writers):
            writer.transport.abort()

    @contextlib.contextmanager
    def holding(self, *writers: asyncio.StreamWriter) -> Iterator[None]:
        self._writers.update(writers)
        try:
            yield
        finally:
            self._writers.difference_update(writers)

    async def carry(self, one: Stream, other: Stream) -> None:
        """Copies bytes both ways until either side closes its connection."""
        writers = (one[1], other[1])
        with self.holding(*writers):
            pumps = [asyncio.create_task(_pump(one[0], other[1])), asyncio.create_task(_pump(other[0], one[1]))]
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
            for writer in writers:
                writer.close()
            await asyncio.wait(pumps, timeout=REQUEST_TIMEOUT_S)
            for writer in writers:
                writer.transport.abort()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):  # Either side has closed its connection.
        while data := await reader.read(READ_BYTES):
            writer.write(data)
            await writer.drain()


class HeadMember:
    """What the head knows of a member.

    Attributes:
        seen_s: monotonic time of its last sign of life; None for never since the start of the gateway.
        sign_connections: number of its open connections for these signs.
    """

    def __init__(self) -> None:
        self.seen_s: float | None = None
        self.sign_connections = 0
        self.connections = Connections()
        self.spares: asyncio.Queue[Stream] = asyncio.Queue()
        self.listening: asyncio.Task[None] | None = None

    @property
    def is_alive(self) -> bool:
        return self.sign_connections > 0

    @property
    def silent_s(self) -> float | None:
        """Seconds since its last sign of life."""
        return None if self.seen_s is None else time.monotonic() - self.seen_s

    def end(self) -> None:
        self.drop_connections()
        if self.listening is not None:
            self.listening.cancel()

    def drop_connections(self) -> None:
        self.connections.abort()
        while not self.spares.empty():
            self.spares.get_nowait()[1].transport.abort()

    async def spare(self) -> Stream:
        """A spare connection that is still open; raises TimeoutError."""
        async with asyncio.timeout(SPARE_TIMEOUT_S):
            while True:
                reader, writer = await self.spares.get()
                if not reader.at_eof() and not writer.is_closing():
                    return reader, writer


class HeadGateway:
    """Accepts members, and listens on the virtual addresses of their agents."""

    def __init__(self, folder: ClusterFolder, own: Membership) -> None:
        self._folder = folder
        self._own = own
        self._members: dict[str, HeadMember] = {}
        self._strangers = 0

    async def run(self) -> None:
        host, _, port = self._own.listen.rpartition(":")
        server = await asyncio.start_server(
            self._accept,
            host,
            int(port),
            ssl=server_context(self._folder.keys),
            ssl_handshake_timeout=REQUEST_TIMEOUT_S,
            limit=LINE_LIMIT_BYTES,
        )
        for name, member in self._folder.members().items():
            self._add(name, member)
        async with server:
            await asyncio.gather(server.serve_forever(), self._watch())

    async def _watch(self) -> None:
        """Drops the connections of lost members, and all that belongs to members that have left."""
        while True:
            await asyncio.sleep(ALIVE_INTERVAL_S)
            known = self._folder.members()
            for name, member in list(self._members.items()):
                if name not in known:
                    member.end()
                    del self._members[name]
                elif (member.silent_s or 0.0) > ALIVE_TIMEOUT_S:
                    member.drop_connections()

    def _add(self, name: str, member: Member) -> HeadMember:
        held = self._members.setdefault(name, HeadMember())
        if held.listening is None and not member.is_here:
            address = self._own.cluster.address(member.index)
            work = listen(address, self._own.cluster.port + AGENT, functools.partial(self._to_agent, held))
            held.listening = asyncio.create_task(work)
        return held

    async def _to_agent(self, member: HeadMember, here: Stream) -> None:
        try:
            there = await member.spare()
            there[1].write(b"\n")
            await there[1].drain()
        except (OSError, TimeoutError):
            here[1].transport.abort()
            return
        await member.connections.carry(here, there)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        is_stranger = not writer.get_extra_info("ssl_object").getpeercert()
        self._strangers += is_stranger
        try:
            if self._strangers > MAX_STRANGERS and is_stranger:
                raise ValueError("too many connections without a certificate")
            async with asyncio.timeout(REQUEST_TIMEOUT_S):
                request = await read_line(reader)
            await self._serve(request, (reader, writer))
        except (OSError, TimeoutError, ValueError, KeyError, TypeError) as error:
            logger.info("a request failed: %r", error)
        finally:
            self._strangers -= is_stranger
            writer.transport.abort() if writer.is_closing() else writer.close()

    async def _serve(self, request: dict[str, Any], stream: Stream) -> None:
        writer = stream[1]
        kind = request["kind"]
        if kind == "authority":
            await send(writer, {"authority": self._folder.keys.authority.read_text(encoding="ascii")})
            return
        if kind == "join":
            await send(writer, await self._admit(request))
            return
        encrypted = writer.get_extra_info("ssl_object")
        name = peer_name(encrypted.getpeercert())
        certificate = encrypted.getpeercert(binary_form=True) or b""
        known = self._folder.members().get(name)
        if name != HEAD and (known is None or known.key != hashlib.sha256(certificate).hexdigest()):
            await send(writer, {"error": f"This machine is not a member of the cluster '{self._own.cluster.name}'."})
        elif kind == "members":
            await send(writer, {"members": {name: held.silent_s for name, held in self._members.items()}})
        elif known is not None:
            await self._serve_member(kind, request, name, self._add(name, known), stream)

    async def _admit(self, request: dict[str, Any]) -> dict[str, Any]:
        try:
            alive = [name for name, held in self._members.items() if held.is_alive]
            answer, name, member = await asyncio.to_thread(admit, self._folder, self._own, request, alive)
        except BadInputError as error:
            return {"error": str(error)}
        if (earlier := self._members.pop(name, None)) is not None:
            earlier.end()
        self._add(name, member)
        return answer

    async def _serve_member(
        self, kind: str, request: dict[str, Any], name: str, member: HeadMember, stream: Stream
    ) -> None:
        reader, writer = stream
        member.seen_s = time.monotonic()
        if kind == "open":
            port = self._own.cluster.port + {"master": 0, "store": STORE}[request["to"]]
            there = await connect(self._own.cluster.address(HEAD_INDEX), port)
            await member.connections.carry(stream, there)
        elif kind == "spare":
            member.spares.put_nowait(stream)
            # The handler's end would close it.
            await writer.wait_closed()
        elif kind == "alive":
            member.sign_connections += 1
            try:
                with member.connections.holding(writer):
                    while await _line_in_time(reader):
                        member.seen_s = time.monotonic()
                        await send(writer, {})
            finally:
                member.sign_connections -= 1
                if not member.is_alive:  # It may have connected again already.
                    member.drop_connections()
        elif kind == "leave":
            with self._folder.changing_members() as members:
                members.pop(name, None)
            await send(writer, {})
        else:
            raise ValueError(f"unknown kind of request {kind!r}")


class MemberGateway:
    """Keeps this machine connected to the head, and listens on the virtual addresses of master and store."""

    def __init__(self, folder: ClusterFolder, own: Membership) -> None:
        self._own = own
        self._context = client_context(folder.keys)
        self._connections = Connections()
        self._alive = asyncio.Event()

    async def run(self) -> None:
        cluster = self._own.cluster
        tasks = [self._stay_alive(), *(self._offer_spares() for _ in range(SPARE_CONNECTIONS))]
        if not self._own.is_here:
            address = cluster.address(HEAD_INDEX)
            for to, port in (("master", cluster.port), ("store", cluster.port + STORE)):
                tasks.append(listen(address, port, functools.partial(self._to_head, to)))
        await asyncio.gather(*tasks)

    async def _dial(self, request: dict[str, Any]) -> Stream:
        async with asyncio.timeout(REQUEST_TIMEOUT_S):
            host, _, port = self._own.cluster.head.rpartition(":")
            stream = await connect(host, int(port), self._context)
            try:
                await send(stream[1], request)
            except BaseException:
                stream[1].transport.abort()
                raise
            return stream

    async def _to_head(self, to: str, here: Stream) -> None:
        try:
            there = await self._dial({"kind": "open", "to": to})
        except (OSError, TimeoutError):
            here[1].transport.abort()
            return
        await self._connections.carry(here, there)

    async def _offer_spares(self) -> None:
        """Offers one spare connection at a time, as long as the head answers."""
        while True:
            await self._alive.wait()
            try:
                stream = await self._dial({"kind": "spare"})
            except (OSError, TimeoutError):
                await asyncio.sleep(RETRY_INTERVAL_S)
                continue
            # Closed by `abort` when the head is lost.
            with self._connections.holding(stream[1]):
                is_used = bool(await _quiet_line(stream[0]))
            if is_used:
                _in_background(self._to_agent(stream))
            else:
                stream[1].transport.abort()
                await asyncio.sleep(RETRY_INTERVAL_S)

    async def _to_agent(self, there: Stream) -> None:
        try:
            here = await connect(self._own.cluster.address(self._own.index), self._own.cluster.port + AGENT)
        except OSError:
            there[1].transport.abort()
            return
        await self._connections.carry(there, here)

    async def _stay_alive(self) -> None:
        while True:
            try:
                reader, writer = await self._dial({"kind": "alive"})
            except (OSError, TimeoutError):
                await asyncio.sleep(RETRY_INTERVAL_S)
                continue
            with contextlib.suppress(OSError):
                await self._exchange_signs(reader, writer)
            self._alive.clear()
            self._connections.abort()
            writer.transport.abort()
            await asyncio.sleep(RETRY_INTERVAL_S)

    async def _exchange_signs(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            await send(writer, {})
            answer = await _line_in_time(reader)
            if not answer or "error" in json.loads(answer):
                return
            self._alive.set()
            await asyncio.sleep(ALIVE_INTERVAL_S)


async def _line_in_time(reader: asyncio.StreamReader) -> bytes:
    """The next line; empty if the connection is closed, or nothing comes in time."""
    try:
        async with asyncio.timeout(ALIVE_TIMEOUT_S):
            return await _quiet_line(reader)
    except TimeoutError:
        return b""


async def _quiet_line(reader: asyncio.StreamReader) -> bytes:
    try:
        return await reader.readline()
    except (OSError, ValueError):
        return b""


async def read_line(reader: asyncio.StreamReader) -> dict[str, Any]:
    """Reads a line of JSON; raises ValueError."""
    values = json.loads(await reader.readline())
    if not isinstance(values, dict):
        raise ValueError("not an object")
    return values


async def send(writer: asyncio.StreamWriter, values: dict[str, Any]) -> None:
    writer.write(json.dumps(values).encode() + b"\n")
    await writer.drain()


async def connect(host: str, port: int, context: ssl.SSLContext | None = None) -> Stream:
    stream = await asyncio.open_connection(host, port, ssl=context, limit=LINE_LIMIT_BYTES)
    _tune(stream[1])
    return stream


async def listen(address: str, port: int, serve: Callable[[Stream], Awaitable[None]]) -> None:
    """Serves connections to a loopback address, of this account only, until it is cancelled."""

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            if not is_trusted_peer(writer.get_extra_info("socket")):
                logger.warning(
                    "refused a connection at %s:%s: it is another account's, or closed already", address, port
                )
                return
            _tune(writer)
            await serve((reader, writer))
        finally:
            writer.transport.abort() if writer.is_closing() else writer.close()

    while True:
        try:
            # Several members on one machine share the port.
            server = await asyncio.start_server(accept, address, port, limit=LINE_LIMIT_BYTES, reuse_port=True)
        except OSError as error:
            logger.warning("%s:%s cannot be opened yet: %s", address, port, error)
            await asyncio.sleep(RETRY_INTERVAL_S)
            continue
        async with server:
            await server.serve_forever()


def _tune(writer: asyncio.StreamWriter) -> None:
    writer.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


_background: set[asyncio.Task[None]] = set()


def _in_background(work: Coroutine[Any, Any, None]) -> None:
    # The event loop itself has only weak references to its tasks.
    task = asyncio.create_task(work)
    _background.add(task)
    task.add_done_callback(_background.discard)


def main(path: str) -> None:
    folder, own = start_service(path)
    gateway = HeadGateway(folder, own) if own.role == HEAD_ROLE else MemberGateway(folder, own)
    asyncio.run(gateway.run())


if __name__ == "__main__":
    main(*sys.argv[1:])
