"""pymesos' executor driver, with its known traps handled."""

from __future__ import annotations

import http.client
import logging
import os
import threading
import time
import uuid
from typing import Any

import pymesos

logger = logging.getLogger(__name__)

RESEND_S = 5.0


class ExecutorDriver(pymesos.MesosExecutorDriver):
    """Delivers every status update, whatever happens to the agent's connection.

    pymesos 0.3.15 differs from Mesos' contract in three places:
      * it takes `MESOS_CHECKPOINT=0` for true, and so would stay for ever after its agent has died;
      * it keeps no unacknowledged updates, so one that is sent while the agent is away is lost;
      * it shares one mutable dictionary of HTTP headers between all calls and drivers.
    """

    def __init__(self, executor: pymesos.Executor) -> None:
        super().__init__(executor)
        self.checkpoint = os.environ.get("MESOS_CHECKPOINT") == "1"
        self._acknowledged = threading.Condition()

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

        Returns:
            Whether none is left.
        """
        deadline = time.monotonic() + timeout_s
        with self._acknowledged:
            while self.updates and time.monotonic() < deadline:
                waiting = min(RESEND_S, deadline - time.monotonic())
                if not self._acknowledged.wait_for(lambda: not self.updates, waiting):
                    for update in list(self.updates.values()):
                        self._post_update(update["status"])
            return not self.updates

    def on_acknowledged(self, event: dict[str, Any]) -> None:
        """The agent has taken an update."""
        with self._acknowledged:
            super().on_acknowledged(event)
            self._acknowledged.notify_all()

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
