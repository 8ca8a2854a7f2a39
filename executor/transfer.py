"""Short transfers between agents, which measure the network between them: `python -m executor.transfer`.

A Mesos executor with one task. It listens at the task's port for bytes of others, and sends some to another when the
framework tells it to. Whoever receives takes the time, from the first byte to the last, and tells the sender.
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

CHUNK = 2**20
PATIENCE_S = 10.0
"""How long the other side may take to answer, or to send something."""
ANSWER_S = 60.0
"""How long the last bytes may take."""
TOKEN_BYTES = 32


@dataclass(frozen=True)
class TransferOrder:
    """What an agent's task is told at its launch, as `TaskInfo.data`.

    Attributes:
        host, port: where it listens.
        token: what a sender has to know; `TOKEN_BYTES` letters and digits.
        size_bytes: a transfer ends when so much has been sent.
        limit_s: or after so many seconds.
    """

    host: str
    port: int
    token: str
    size_bytes: int
    limit_s: float

    def encode(self) -> str:
        """The order as base64 text."""
        return encode(asdict(self))

    @classmethod
    def decode(cls, data: str) -> TransferOrder:
        """Reads what `encode` wrote."""
        return cls(**decode(data))


@dataclass(frozen=True)
class TransferResult:
    """What an agent's task says of a transfer that it was told to make.

    Attributes:
        transfer: its number.
        bytes: how many came to the other agent within `seconds`.
        seconds: from the first piece to the last; 0 if there was one piece only.
        error: why nothing came; empty if something did.
    """

    transfer: str
    bytes: int = 0
    seconds: float = 0.0
    error: str = ""

    def encode(self) -> str:
        """The message as base64 text."""
        return encode(asdict(self))

    @classmethod
    def decode(cls, data: str) -> TransferResult:
        """Reads what `encode` wrote.

        Raises:
            ValueError: if it is something else.
        """
        return read_message(cls, decode(data))


class TransferExecutor(pymesos.Executor):
    """Receives, and sends when it is told to."""

    def __init__(self) -> None:
        self._order: TransferOrder | None = None

    def launchTask(self, driver: Any, task: Mapping[str, Any]) -> None:  # noqa: N802 (pymesos' names)
        """Begins to listen."""
        status = {"task_id": task["task_id"], "state": "TASK_RUNNING"}
        order = self._order = TransferOrder.decode(task["data"])
        try:
            server = listening(order)
        except OSError as error:
            status |= {"state": "TASK_FAILED", "message": f"port {order.port} cannot be listened at: {error.strerror}"}
        else:
            threading.Thread(target=serve, args=(server, order), daemon=True).start()
        driver.sendStatusUpdate(status)

    def frameworkMessage(self, driver: Any, message: str) -> None:  # noqa: N802
        """Sends to another agent, and tells the framework how that went."""
        assert self._order is not None
        threading.Thread(target=self._send, args=(driver, self._order, decode(message)), daemon=True).start()

    def _send(self, driver: Any, order: TransferOrder, told: Mapping[str, Any]) -> None:
        try:
            count, seconds = send(order, told["host"], told["port"])
            result = TransferResult(told["transfer"], count, seconds)
        except (OSError, ValueError) as error:
            result = TransferResult(told["transfer"], error=str(error) or type(error).__name__)
        driver.sendFrameworkMessage(result.encode())

    def killTask(self, driver: Any, task_id: Mapping[str, Any]) -> None:  # noqa: N802
        """Ends."""
        driver.sendStatusUpdate({"task_id": task_id, "state": "TASK_KILLED"})

    def shutdown(self, driver: Any) -> None:
        """Ends: the framework or the agent is gone."""
        os._exit(0)


def listening(order: TransferOrder) -> socket.socket:
    """A socket that listens where the order says; on all addresses where this machine does not know that one."""
    try:
        return socket.create_server((order.host, order.port))
    except OSError:
        return socket.create_server(("", order.port))


def serve(server: socket.socket, order: TransferOrder) -> None:
    """Receives from whoever knows the token, for ever."""
    while True:
        connection, _ = server.accept()
        threading.Thread(target=_receive, args=(connection, order), daemon=True).start()


def _receive(connection: socket.socket, order: TransferOrder) -> None:
    with connection, contextlib.suppress(OSError):
        connection.settimeout(PATIENCE_S)
        token = b"".join(_chunks(connection, TOKEN_BYTES))
        if not hmac.compare_digest(token, order.token.encode()):
            return
        received, first_s, last_s = 0, 0.0, 0.0
        for chunk in _chunks(connection, order.size_bytes):
            last_s = time.perf_counter()
            # The time runs from the end of the first piece, so that piece is not counted.
            received, first_s = (received + len(chunk), first_s) if first_s else (0, last_s)
        connection.sendall(json.dumps({"bytes": received, "seconds": last_s - first_s}).encode())


def _chunks(connection: socket.socket, size: int) -> Iterator[bytes]:
    """What comes, up to so many bytes."""
    while size > 0 and (chunk := connection.recv(min(size, CHUNK))):
        size -= len(chunk)
        yield chunk


def send(order: TransferOrder, host: str, port: int) -> tuple[int, float]:
    """Sends to another agent.

    Args:
        order: how much, for how long, with which token.
        host: the other agent's address.
        port: where its task listens.

    Returns:
        Bytes that came there, and within how many seconds.

    Raises:
        OSError: if the other side cannot be reached.
        ValueError: if it did not say what came.
    """
    piece = memoryview(bytes(CHUNK))
    with socket.create_connection((host, port), PATIENCE_S) as connection:
        connection.sendall(order.token.encode())
        left, until_s = order.size_bytes, time.monotonic() + order.limit_s
        while left > 0 and time.monotonic() < until_s:
            left -= connection.send(piece[:left])
        connection.shutdown(socket.SHUT_WR)
        # What is in the buffers of a slow link has to arrive first.
        connection.settimeout(ANSWER_S)
        answer = b"".join(_chunks(connection, CHUNK))
    if not answer:
        raise ValueError("it has hung up")
    said = json.loads(answer)
    return int(said["bytes"]), float(said["seconds"])


def main() -> None:
    """Serves until its framework or its agent is gone."""
    if "MESOS_AGENT_ENDPOINT" not in os.environ:
        sys.exit("python -m executor.transfer is started by a Mesos agent; it has nothing to do by itself")
    ExecutorDriver(TransferExecutor()).run()


if __name__ == "__main__":
    main()
