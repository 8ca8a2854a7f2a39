"""pymesos' drivers, with fixes for its import, its subscription, and the executor's status updates."""

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

# On import pymesos handles SIGINT and logs to stderr; Dike handles Ctrl-C itself, and stderr is the user's script's.
_sigint = signal.getsignal(signal.SIGINT)
import pymesos  # noqa: E402
import pymesos.detector  # noqa: E402
import pymesos.process  # noqa: E402

signal.signal(signal.SIGINT, _sigint)
logging.getLogger("pymesos").handlers.clear()

__all__ = ["ExecutorDriver", "ResilientConnection", "pymesos"]

logger = logging.getLogger(__name__)

RESEND_INTERVAL_S = 5.0
RECONNECT_DELAY_S = 0.25
"""Short: a recovered agent waits two seconds for its executors, then kills those that are missing."""
KEEPALIVE_OPTIONS = {socket.TCP_KEEPIDLE: 15, socket.TCP_KEEPINTVL: 5, socket.TCP_KEEPCNT: 3}
"""Detects a vanished peer after 30 seconds."""
PERMANENT_ERRORS = (HTTPStatus.BAD_REQUEST, HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN)


class ResilientConnection(pymesos.process.Connection):
    """A subscription that is closed instead of raising if it cannot be made or gets an unusable answer.

    pymesos raises in its thread and interrupts the main thread if a host name cannot be resolved, if a network is down,
    and on any answer but 200, 307 and 503; a master or agent that is starting answers 404. Permanent errors are passed
    to the driver's `refused(http_status, reason)`.

    Replaces `pymesos.process.Connection`; pymesos has no setting for it.
    """

    def __init__(self, addr: str, callback: Any) -> None:
        self._connect_error = ""
        try:
            super().__init__(addr, callback)
        except OSError as error:
            # The attributes that pymesos would have set; it backs off after `handle_connect_event`.
            self._connect_error = str(error)
            self._callback = callback
            self._parser: Any = None
            self._request = callback.gen_request()
            self._response = b""
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in KEEPALIVE_OPTIONS.items():
            self._sock.setsockopt(socket.IPPROTO_TCP, option, value)

    def handle_connect_event(self) -> str:
        return self._connect_error or str(super().handle_connect_event())

    def read(self) -> bool:
        try:
            return bool(super().read())
        except (RuntimeError, TypeError) as error:  # TypeError: pymesos adds str to bytes for chunked answers
            parser = self._parser
            status = parser.get_status_code() if parser is not None and parser.is_headers_complete() else 0
            if status in PERMANENT_ERRORS:
                self._callback.refused(status, str(error))
            else:
                logger.warning("the answer to SUBSCRIBE is unusable, retrying: %s", error)
            return False


pymesos.process.Connection = ResilientConnection


class ExecutorDriver(pymesos.MesosExecutorDriver):
    """Delivers every status update, whatever happens to the connection to the agent.

    With MESOS_CHECKPOINT=1 the executor and its tasks continue without the agent for up to MESOS_RECOVERY_TIMEOUT, and
    subscribe to the recovered agent. pymesos 0.3.15 violates Mesos' contract in these places:
      * it takes `MESOS_CHECKPOINT=0` for true, and so would never end after the agent has died;
      * with a true value, it never ends either;
      * it pauses between two attempts for longer than an agent waits, and ends on an agent that is recovering;
      * it loses updates that are sent while the agent is away, since it stores no unacknowledged ones;
      * it closes a connection that another thread is sending on;
      * it shares one mutable dictionary of HTTP headers between all calls and drivers.
    """

    def __init__(self, executor: pymesos.Executor) -> None:
        super().__init__(executor)
        self.checkpoint = os.environ.get("MESOS_CHECKPOINT") == "1"
        self._recovery_timeout_s = _duration_s("MESOS_RECOVERY_TIMEOUT", 15 * 60.0)
        self._reconnect_delay_s = min(
            RECONNECT_DELAY_S, _duration_s("MESOS_SUBSCRIPTION_BACKOFF_MAX", RECONNECT_DELAY_S)
        )
        self._recovery_timer: threading.Timer | None = None
        self._has_subscribed = False
        self._acknowledged = threading.Condition()

    def gen_request(self) -> bytes:
        """Returns the SUBSCRIBE request. Pauses from the second connection on."""
        if self._has_subscribed:
            time.sleep(self._reconnect_delay_s)
        self._has_subscribed = True
        with self._acknowledged:
            return bytes(super().gen_request())

    def _backoff(self, num_conn_retry: int) -> float:
        """Returns 0: `gen_request` pauses already."""
        return 0.0

    def refused(self, http_status: int, reason: str) -> None:
        """Ends the executor: the agent no longer accepts it."""
        logger.error("the agent refuses this executor: %s", reason)
        self.on_shutdown()

    def on_close(self) -> None:
        """Starts the recovery timer: the connection was lost, or could not be made."""
        # Waits for a pending request, which uses the connection.
        with self._lock:
            if self.checkpoint and self._recovery_timer is None and not self.aborted:
                logger.warning("the connection to the agent is lost; the tasks continue")
                self._recovery_timer = threading.Timer(self._recovery_timeout_s, self._give_up_recovery)
                self._recovery_timer.daemon = True
                self._recovery_timer.start()
            super().on_close()

    def on_subscribed(self, info: dict[str, Any]) -> None:
        """Cancels the recovery timer, and sends unacknowledged updates."""
        with self._lock:
            if self._recovery_timer is not None:
                self._recovery_timer.cancel()
                self._recovery_timer = None
        super().on_subscribed(info)
        # Includes updates that were sent during the subscription.
        self._post_unacknowledged()

    def _give_up_recovery(self) -> None:
        with self._lock:
            if self._recovery_timer is None:
                return
            logger.error("the agent has not recovered within %g s: ending", self._recovery_timeout_s)
            self._recovery_timer = None
            self.on_shutdown()

    def sendStatusUpdate(self, status: dict[str, Any]) -> None:  # noqa: N802 (pymesos' name)
        """Sends an update until the agent acknowledges it."""
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
        """Waits until the agent has acknowledged all updates; resends them every `RESEND_INTERVAL_S`.

        Args:
            timeout_s: maximum wait while the agent is connected; starts anew while it may recover.

        Returns:
            Whether all are acknowledged.
        """
        deadline = time.monotonic() + timeout_s
        with self._acknowledged:
            while self.updates and time.monotonic() < deadline:
                waiting = min(RESEND_INTERVAL_S, deadline - time.monotonic())
                if not self._acknowledged.wait_for(lambda: not self.updates, waiting):
                    if self._recovery_timer is None:
                        self._post_unacknowledged()
                    else:
                        deadline = time.monotonic() + timeout_s
            return not self.updates

    def on_kill(self, event: dict[str, Any]) -> None:
        """Passes on whether the agent is being drained: only then Mesos names a grace period, which pymesos drops."""
        drains = "grace_period" in event.get("kill_policy", {})
        end = getattr(self.executor, "drainTask", None) if drains else None
        (end or self.executor.killTask)(self, event["task_id"])

    def on_acknowledged(self, event: dict[str, Any]) -> None:
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
            # It stays in `updates`: resent on the next subscription, or by `wait_for_acknowledgements`.
            logger.warning("status update %s not delivered yet: %s", status["state"], error)

    def _send(self, body: Any, path: str = "/api/v1/executor", method: str = "POST", headers: Any = None) -> Any:
        return super()._send(body, path, method, {})


def _duration_s(variable: str, default_s: float) -> float:
    text = os.environ.get(variable)
    return float(pymesos.utils.parse_duration(text)) if text else default_s
