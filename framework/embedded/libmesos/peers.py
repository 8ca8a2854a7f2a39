"""Restricts a Mesos daemon to connections of its own account and root.

Daemons send each other no credentials: any process that reaches an agent's port could pretend to be the master and run
a task. On loopback the system knows the account of each connection (`/proc/net/tcp`), so the library's `accept` is
replaced by one that closes connections of other accounts. Needs only the standard library.
"""

from __future__ import annotations

import ctypes
import errno
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from framework.embedded.elf import (
    DT_JMPREL,
    DT_NULL,
    DT_PLTRELSZ,
    DT_STRTAB,
    DT_SYMTAB,
    DYNAMIC,
    RELOCATION,
    SYMBOL,
)

TABLES = ("/proc/net/tcp", "/proc/net/tcp6")
MAPPED_PREFIX = "0000000000000000FFFF0000"
"""Prefix of an IPv4 address on an IPv6 socket."""
LOCAL, REMOTE, UID, INODE = 1, 2, 7, 9
"""Columns of these tables."""
ROOT = 0
MAX_LOOKUPS = 3
"""Number of lookups before a connection counts as unknown."""

Accept = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, use_errno=True)


class LinkMap(ctypes.Structure):
    """The public part of what `dlopen` returns (link.h)."""

    _fields_ = [("base", ctypes.c_size_t), ("name", ctypes.c_char_p), ("dynamic", ctypes.c_size_t)]


def uid_of_peer(connection: socket.socket) -> int | None:
    """Account of the other end of a TCP connection on this machine; None if that end is closed."""
    (own, own_port), (peer, peer_port) = connection.getsockname(), connection.getpeername()
    wanted = (_in_table(peer, peer_port), _in_table(own, own_port))
    for table in TABLES:
        for columns in _rows(table):
            ends = (columns[LOCAL].removeprefix(MAPPED_PREFIX), columns[REMOTE].removeprefix(MAPPED_PREFIX))
            if ends == wanted:
                # The system reports root for a socket that its process has closed.
                return int(columns[UID]) if int(columns[INODE]) else None
    return None


def is_trusted_peer(connection: socket.socket) -> bool:
    """Whether the other end of a TCP connection on this machine belongs to this account or root."""
    return _look_up_uid(connection) in {os.getuid(), ROOT}


def accept_own_account(library: ctypes.CDLL) -> Any:
    """Has the library accept only connections of this account and root; the result must live as long as the library.

    Raises:
        SystemExit: the library calls no `accept`, or the system does not report the accounts of connections.
    """
    if not os.access(TABLES[0], os.R_OK):
        raise SystemExit(f"{TABLES[0]} cannot be read, so the accounts of connections are unknown")
    accept = Accept(("accept", ctypes.CDLL(None)))
    trusted = {os.getuid(), ROOT}
    reported: set[str] = set()

    def refuse(descriptor: int, why: str) -> int:
        os.close(descriptor)
        if why not in reported:
            reported.add(why)
            with suppress(OSError):
                print(f"refused a connection {why}, and will refuse more", file=sys.stderr, flush=True)
        ctypes.set_errno(errno.ECONNABORTED)
        return -1

    def accept_trusted(listening: int, address: int, size: int) -> int:
        accepted: int = accept(listening, address, size)
        if accepted < 0:
            return accepted
        # An exception cannot pass through C++, which would use the return value as a connection.
        try:
            uid = _uid_of_peer(accepted)
        except Exception as error:
            return refuse(accepted, f"of an unknown account ({type(error).__name__})")
        if uid in trusted:
            return accepted
        return refuse(accepted, "closed by its process" if uid is None else f"of account {uid}")

    callback = Accept(accept_trusted)
    place = _import_pointer(library, b"accept")
    ctypes.c_void_p.from_address(place).value = ctypes.cast(callback, ctypes.c_void_p).value
    return callback


def _look_up_uid(connection: socket.socket) -> int | None:
    # The table is not a snapshot: while other connections change, a row may be missed.
    uids = (uid_of_peer(connection) for _ in range(MAX_LOOKUPS))
    return next((uid for uid in uids if uid is not None), None)


def _uid_of_peer(descriptor: int) -> int | None:
    connection = socket.socket(fileno=descriptor)
    try:
        return _look_up_uid(connection)
    except OSError as error:
        if error.errno == errno.ENOTCONN:
            return None
        raise
    finally:
        connection.detach()


def _rows(table: str) -> Iterator[list[str]]:
    try:
        with open(table, encoding="ascii") as file:
            next(file)  # The columns' names.
            for line in file:
                yield line.split()
    except FileNotFoundError:
        return  # A system without IPv6.


def _in_table(address: str, port: int) -> str:
    """An address as the tables format it: a number in this machine's byte order."""
    return f"{int.from_bytes(socket.inet_aton(address), sys.byteorder):08X}:{port:04X}"


def _import_pointer(library: ctypes.CDLL, function: bytes) -> int:
    """Memory location of the library's pointer to an imported function."""
    link_map = LinkMap.from_address(library._handle)
    tags: dict[int, int] = {}
    at = link_map.dynamic
    while True:
        tag, value = DYNAMIC.unpack(ctypes.string_at(at, DYNAMIC.size))
        if tag == DT_NULL:
            break
        tags[tag] = value
        at += DYNAMIC.size
    for place, symbol, _ in RELOCATION.iter_unpack(ctypes.string_at(tags[DT_JMPREL], tags[DT_PLTRELSZ])):
        name = ctypes.c_uint32.from_address(tags[DT_SYMTAB] + SYMBOL.size * (symbol >> 32)).value
        if ctypes.string_at(tags[DT_STRTAB] + name) == function:
            return int(link_map.base + place)
    raise SystemExit(f"the library does not call {function.decode()}")
