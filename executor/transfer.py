"""Short transfers between agents, which measure the network between them: `python -m executor.transfer`.

A Mesos executor with one task. It listens at the task's port for bytes from others, and sends bytes to another on the
framework's request. The receiver takes the time from the first byte to the last, and returns it to the sender.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from executor.driver import ExecutorDriver, pymesos
from executor.messages import decode, encode, read_message

CHUNK_BYTES = 2**20
PEER_TIMEOUT_S = 10.0
"""Maximum time for the peer to answer or to send."""
RESULT_TIMEOUT_S = 60.0
"""Maximum time until the last bytes have arrived."""
TOKEN_BYTES = 32


@dataclass(frozen=True)
class TransferOrder:
    """The order of an agent's task, in `TaskInfo.data`.

    Attributes:
        host, port: the address to listen at.
        token: secret that a sender has to present; `TOKEN_BYTES` letters and digits.
        size_bytes: maximum size of a transfer.
        limit_s: maximum duration of a transfer.
    """

    host: str
    port: int
    token: str
    size_bytes: int
    limit_s: float

    def encode(self) -> str:
        return encode(asdict(self))

    @classmethod
    def decode(cls, data: str) -> TransferOrder:
        return cls(**decode(data))


@dataclass(frozen=True)
class TransferResult:
    """The result of a requested transfer.

    Attributes:
        transfer: its number.
        bytes: bytes that arrived within `seconds`.
        seconds: from the first piece to the last; 0 for a single piece.
        error: why nothing arrived; empty otherwise.
    """

    transfer: str
    bytes: int = 0
    seconds: float = 0.0
    error: str = ""

    def encode(self) -> str:
        return encode(asdict(self))

    @classmethod
    def decode(cls, data: str) -> TransferResult:
        """Raises ValueError if it is something else."""
        return read_message(cls, decode(data))


class TransferExecutor(pymesos.Executor):
    """Receives transfers, and makes those that the framework requests."""

    def __init__(self) -> None:
        self._order: TransferOrder | None = None

    def launchTask(self, driver: Any, task: Mapping[str, Any]) -> None:  # noqa: N802 (pymesos' names)
        status = {"task_id": task["task_id"], "state": "TASK_RUNNING"}
        order = self._order = TransferOrder.decode(task["data"])
        try:
            server = listen(order)
        except OSError as error:
            status |= {
                "state": "TASK_FAILED",
                "message": f"the task cannot listen at port {order.port}: {error.strerror}",
            }
        else:
            threading.Thread(target=serve, args=(server, order), daemon=True).start()
        driver.sendStatusUpdate(status)

    def frameworkMessage(self, driver: Any, message: str) -> None:  # noqa: N802
        assert self._order is not None
        threading.Thread(target=self._send, args=(driver, self._order, decode(message)), daemon=True).start()

    def _send(self, driver: Any, order: TransferOrder, request: Mapping[str, Any]) -> None:
        try:
            count, seconds = send(order, request["host"], request["port"])
            result = TransferResult(request["transfer"], count, seconds)
        except (OSError, ValueError) as error:
            result = TransferResult(request["transfer"], error=str(error) or type(error).__name__)
        driver.sendFrameworkMessage(result.encode())

    def killTask(self, driver: Any, task_id: Mapping[str, Any]) -> None:  # noqa: N802
        driver.sendStatusUpdate({"task_id": task_id, "state": "TASK_KILLED"})

    def shutdown(self, driver: Any) -> None:
        os._exit(0)


def listen(order: TransferOrder) -> socket.socket:
    """Listens at the order's address; at all addresses if this machine does not have that one."""
    try:
        return socket.create_server((order.host, order.port))
    except OSError:
        return socket.create_server(("", order.port))


def serve(server: socket.socket, order: TransferOrder) -> None:
    """Receives, forever, from all peers that present the token."""
    while True:
        connection, _ = server.accept()
        threading.Thread(target=_receive, args=(connection, order), daemon=True).start()


def _receive(connection: socket.socket, order: TransferOrder) -> None:
    with connection, contextlib.suppress(OSError):
        connection.settimeout(PEER_TIMEOUT_S)
        token = b"".join(_chunks(connection, TOKEN_BYTES))
        if not hmac.compare_digest(token, order.token.encode()):
            return
        received, first_s, last_s = 0, 0.0, 0.0
        for chunk in _chunks(connection, order.size_bytes):
            last_s = time.perf_counter()
            # Time is measured from the end of the first piece, so that piece is not counted.
            received, first_s = (received + len(chunk), first_s) if first_s else (0, last_s)
        connection.sendall(json.dumps({"bytes": received, "seconds": last_s - first_s}).encode())


def _chunks(connection: socket.socket, size: int) -> Iterator[bytes]:
    while size > 0 and (chunk := connection.recv(min(size, CHUNK_BYTES))):
        size -= len(chunk)
        yield chunk


def send(order: TransferOrder, host: str, port: int) -> tuple[int, float]:
    """Sends to another agent; returns the bytes that arrived, and the seconds that took.

    Raises:
        OSError: if the peer cannot be reached.
        ValueError: if it sent no result.
    """
    piece = memoryview(bytes(CHUNK_BYTES))
    with socket.create_connection((host, port), PEER_TIMEOUT_S) as connection:
        connection.sendall(order.token.encode())
        left, until_s = order.size_bytes, time.monotonic() + order.limit_s
        while left > 0 and time.monotonic() < until_s:
            left -= connection.send(piece[:left])
        connection.shutdown(socket.SHUT_WR)
        # The buffers of a slow link have to drain first.
        connection.settimeout(RESULT_TIMEOUT_S)
        answer = b"".join(_chunks(connection, CHUNK_BYTES))
    if not answer:
        raise ValueError("the other agent closed the connection without a result")
    result = json.loads(answer)
    return int(result["bytes"]), float(result["seconds"])


def main() -> None:
    if "MESOS_AGENT_ENDPOINT" not in os.environ:
        sys.exit("python -m executor.transfer is started by a Mesos agent; run `dike agents measure` instead")
    ExecutorDriver(TransferExecutor()).run()


if __name__ == "__main__":
    main()
