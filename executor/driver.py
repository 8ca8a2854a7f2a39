"""pymesos' drivers, with their known traps handled: the import, the subscription, and the executor's status updates."""

from __future__ import annotations

import http.client
import logging
import os
import signal
import socket
import threading
import time
import uuid
from http import HTTPStatus
from typing import Any

# pymesos takes SIGINT for itself and logs to standard error: Ctrl-C is ours to handle, and that is the user's script's.
_sigint = signal.getsignal(signal.SIGINT)
import pymesos  # noqa: E402
import pymesos.detector  # noqa: E402
import pymesos.process  # noqa: E402

signal.signal(signal.SIGINT, _sigint)
logging.getLogger("pymesos").handlers.clear()

__all__ = ["ExecutorDriver", "PatientConnection", "pymesos"]

logger = logging.getLogger(__name__)

RESEND_S = 5.0
RECONNECT_PAUSE_S = 0.25
"""An agent that is back waits two seconds for its executors, and then kills those that have not come."""
KEEPALIVE = {socket.TCP_KEEPIDLE: 15, socket.TCP_KEEPINTVL: 5, socket.TCP_KEEPCNT: 3}
"""Whoever has vanished without a word is noticed after 30 seconds."""
FINAL = (HTTPStatus.BAD_REQUEST, HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN)


class PatientConnection(pymesos.process.Connection):
    """A subscription that is closed, not fatal, when it cannot be made or is answered with something else than events.

    pymesos raises in its thread and interrupts the main thread when a host name cannot be resolved or a network is
    down, and on any answer but 200, 307 and 503; a master or agent that is just starting says 404. Answers that will
    not change are handed to the driver, whose `refused(http_status, reason)` is called.

    To be put in the place of `pymesos.process.Connection`, for which pymesos has no seam.
    """

    def __init__(self, addr: str, callback: Any) -> None:
        self._connect_error = ""
        try:
            super().__init__(addr, callback)
        except OSError as error:
            # What pymesos would have set; `handle_connect_event` then tells it to back off.
            self._connect_error = str(error)
            self._callback = callback
            self._parser: Any = None
            self._request = callback.gen_request()
            self._response = b""
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in KEEPALIVE.items():
            self._sock.setsockopt(socket.IPPROTO_TCP, option, value)

    def handle_connect_event(self) -> str:
        return self._connect_error or str(super().handle_connect_event())

    def read(self) -> bool:
        try:
            return bool(super().read())
        except (RuntimeError, TypeError) as error:  # TypeError: it adds text to bytes when the answer is in parts
            parser = self._parser
            status = parser.get_status_code() if parser is not None and parser.is_headers_complete() else 0
            if status in FINAL:
                self._callback.refused(status, str(error))
            else:
                logger.warning("the answer to SUBSCRIBE was not usable, trying again: %s", error)
            return False


pymesos.process.Connection = PatientConnection


class ExecutorDriver(pymesos.MesosExecutorDriver):
    """Delivers every status update, whatever happens to the agent's connection.

    With MESOS_CHECKPOINT=1 the executor and its task go on without the agent, for MESOS_RECOVERY_TIMEOUT at most, and
    subscribe again at the agent that is back. pymesos 0.3.15 differs from Mesos' contract in these places:
      * it takes `MESOS_CHECKPOINT=0` for true, and so would stay for ever after its agent has died;
      * with it, it does stay for ever;
      * it waits longer between two attempts than an agent waits for its executors, and ends on an agent that recovers;
      * it keeps no unacknowledged updates, so one that is sent while the agent is away is lost;
      * it closes the connection that another thread sends by;
      * it shares one mutable dictionary of HTTP headers between all calls and drivers.
    """

    def __init__(self, executor: pymesos.Executor) -> None:
        super().__init__(executor)
        self.checkpoint = os.environ.get("MESOS_CHECKPOINT") == "1"
        self._recovery_timeout_s = _duration_s("MESOS_RECOVERY_TIMEOUT", 15 * 60.0)
        self._pause_s = min(RECONNECT_PAUSE_S, _duration_s("MESOS_SUBSCRIPTION_BACKOFF_MAX", RECONNECT_PAUSE_S))
        self._away: threading.Timer | None = None
        self._has_asked = False
        self._acknowledged = threading.Condition()

    def gen_request(self) -> bytes:
        """The SUBSCRIBE request; called for each new connection, so the place to pause between two of them."""
        if self._has_asked:
            time.sleep(self._pause_s)
        self._has_asked = True
        with self._acknowledged:
            return bytes(super().gen_request())

    def _backoff(self, num_conn_retry: int) -> float:
        """How long pymesos sleeps after a failed attempt: `gen_request` pauses already."""
        return 0.0

    def refused(self, http_status: int, reason: str) -> None:
        """The agent knows neither us nor our task any more."""
        logger.error("the agent refuses this executor: %s", reason)
        self.on_shutdown()

    def on_close(self) -> None:
        """The connection is gone, or could not be made."""
        # A request under way ends first: it uses what is closed here.
        with self._lock:
            if self.checkpoint and self._away is None and not self.aborted:
                logger.warning("the agent is away; the task goes on")
                self._away = threading.Timer(self._recovery_timeout_s, self._give_up)
                self._away.daemon = True
                self._away.start()
            super().on_close()

    def on_subscribed(self, info: dict[str, Any]) -> None:
        """The agent has taken us in, for the first time or again."""
        with self._lock:
            if self._away is not None:
                self._away.cancel()
                self._away = None
        super().on_subscribed(info)
        # Those too that came up while the subscription was under way.
        self._post_unacknowledged()

    def _give_up(self) -> None:
        with self._lock:
            if self._away is None:
                return
            logger.error("the agent has not come back within %g s: ending", self._recovery_timeout_s)
            self._away = None
            self.on_shutdown()

    def sendStatusUpdate(self, status: dict[str, Any]) -> None:  # noqa: N802 (pymesos' name)
        """Sends an update; it is sent again until the agent acknowledges it."""
        identifier = uuid.uuid4()
        status = {
            "timestamp": time.time(),
            "source": "SOURCE_EXECUTOR",
            **status,
            "uuid": pymesos.encode_data(identifier.bytes),
            "executor_id": self.executor_id,
        }
        with self._acknowledged:
            self.updates[identifier] = {"status": status}
        self._post_update(status)

    def wait_for_acknowledgements(self, timeout_s: float) -> bool:
        """Waits until the agent has taken every update, sending it again every few seconds.

        Args:
            timeout_s: how long an agent may take that is there; one that may come back is waited for.

        Returns:
            Whether none is left.
        """
        deadline = time.monotonic() + timeout_s
        with self._acknowledged:
            while self.updates and time.monotonic() < deadline:
                waiting = min(RESEND_S, deadline - time.monotonic())
                if not self._acknowledged.wait_for(lambda: not self.updates, waiting):
                    if self._away is None:
                        self._post_unacknowledged()
                    else:
                        deadline = time.monotonic() + timeout_s
            return not self.updates

    def on_acknowledged(self, event: dict[str, Any]) -> None:
        """The agent has taken an update."""
        with self._acknowledged:
            super().on_acknowledged(event)
            self._acknowledged.notify_all()

    def _post_unacknowledged(self) -> None:
        with self._acknowledged:
            updates = [update["status"] for update in self.updates.values()]
        for status in updates:
            self._post_update(status)

    def _post_update(self, status: dict[str, Any]) -> None:
        try:
            self._send(
                {
                    "type": "UPDATE",
                    "executor_id": self.executor_id,
                    "framework_id": self.framework_id,
                    "update": {"status": status},
                }
            )
        except (OSError, RuntimeError, http.client.HTTPException) as error:
            # Kept in `updates`: it goes out again with the next subscription or the next round of waiting.
            logger.warning("status update %s not delivered yet: %s", status["state"], error)

    def _send(self, body: Any, path: str = "/api/v1/executor", method: str = "POST", headers: Any = None) -> Any:
        return super()._send(body, path, method, {})


def _duration_s(variable: str, default_s: float) -> float:
    text = os.environ.get(variable)
    return float(pymesos.utils.parse_duration(text)) if text else default_s
