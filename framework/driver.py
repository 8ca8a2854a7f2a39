"""pymesos' scheduler driver, with its known traps handled."""

from __future__ import annotations

import http.client
import logging
import time
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from dike.exceptions import DikeError
from framework.events import EventScheduler, Refused
from framework.quiet_pymesos import pymesos

logger = logging.getLogger(__name__)

RECONNECT_PAUSE_S = 0.5
HEALTHY_CONNECTION_S = 5.0


class MasterUnavailableError(DikeError):
    """A call could not be delivered; the connection is being made again."""


@dataclass(frozen=True)
class FrameworkSettings:
    """How the framework presents itself to Mesos.

    Attributes:
        name: shown in Mesos' state and web page.
        user: operating-system user its tasks run as; empty lets Mesos take the agent's.
        role: Mesos role it subscribes under.
        failover_timeout_s: how long Mesos keeps its tasks when it is gone.
        principal, secret: credentials for HTTP basic authentication; None for none.
    """

    name: str
    user: str
    role: str = "*"
    failover_timeout_s: float = 10.0
    principal: str | None = None
    secret: str | None = None

    def framework_info(self) -> dict[str, Any]:
        """Mesos' FrameworkInfo in JSON form."""
        info: dict[str, Any] = {
            "name": self.name,
            "user": self.user,
            "role": self.role,
            "failover_timeout": self.failover_timeout_s,
            # Executors end with their agent: an old chief must never write beside a new one.
            "checkpoint": False,
        }
        if self.principal is not None:
            info["principal"] = self.principal
        return info


class _PatientConnection(pymesos.process.Connection):
    """A subscription that is closed, not fatal, when the master answers it with something else than events.

    pymesos raises in its thread and interrupts the main thread on any answer but 200, 307 and 503; a master that is
    just starting says 404. Answers that will not change are handed to the driver.
    """

    def read(self) -> bool:
        try:
            return bool(super().read())
        except (RuntimeError, TypeError) as error:  # TypeError: it adds text to bytes when the answer is in parts
            parser = self._parser
            status = parser.get_status_code() if parser.is_headers_complete() else 0
            if status in (HTTPStatus.BAD_REQUEST, HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN):
                self._callback.refused(status, str(error))
            else:
                logger.warning("the master's answer to SUBSCRIBE was not usable, trying again: %s", error)
            return False


# pymesos has no seam for its connection class.
pymesos.process.Connection = _PatientConnection


class Driver(pymesos.MesosSchedulerDriver):
    """Talks to the Mesos master's v1 scheduler API.

    What pymesos 0.3.15 gets wrong and this class puts right:
      * it offers the capability GPU_RESOURCES only if it could read the master's version first, and a framework
        without it is never offered an agent that has GPUs;
      * it stops for good on a master that is starting (see `_PatientConnection`);
      * it tries again without a pause when a connection is accepted and closed;
      * it keeps subscribing after an ERROR event (`EventScheduler.error` stops it);
      * `killTask` and `reconcileTasks` drop the agent's id, without which Mesos cannot tell lost from unknown;
      * its calls share one mutable dictionary of HTTP headers, credentials included, between all drivers;
      * a call while there is no connection is dropped in silence.

    Raises:
        MasterUnavailableError: from every call that could not be delivered.
    """

    def __init__(self, settings: FrameworkSettings, master: str, scheduler: EventScheduler) -> None:
        super().__init__(
            scheduler,
            settings.framework_info(),
            master,
            implicit_acknowledgements=False,
            principal=settings.principal,
            secret=settings.secret,
        )
        self._scheduler = scheduler
        self._connected_at = 0.0

    @property
    def framework(self) -> dict[str, Any]:
        """FrameworkInfo as it is sent with SUBSCRIBE."""
        return {**self._framework, "capabilities": [{"type": "GPU_RESOURCES"}]}

    def gen_request(self) -> bytes:
        """The SUBSCRIBE request; called for each new connection, so the place to pause between two of them."""
        if time.monotonic() - self._connected_at < HEALTHY_CONNECTION_S:
            time.sleep(RECONNECT_PAUSE_S)
        self._connected_at = time.monotonic()
        return bytes(super().gen_request())

    def refused(self, http_status: int, reason: str) -> None:
        """The master will not have this framework."""
        self.stop(failover=True)
        self._scheduler.events.put(Refused(reason, http_status))

    def kill(self, task_id: str, agent_id: str) -> None:
        """Asks for a task's end; Mesos answers with its last status update."""
        self._call("KILL", {"task_id": {"value": task_id}, "agent_id": {"value": agent_id}})

    def reconcile(self, tasks: dict[str, str]) -> None:
        """Asks for the state of the given tasks (task id -> agent id), or of all there are if none is given."""
        self._call(
            "RECONCILE",
            {"tasks": [{"task_id": {"value": task}, "agent_id": {"value": agent}} for task, agent in tasks.items()]},
        )

    def _call(self, kind: str, content: dict[str, Any]) -> None:
        self._send({"type": kind, "framework_id": {"value": self.framework_id}, kind.lower(): content})

    def _send(self, body: Any, path: str = "/api/v1/scheduler", method: str = "POST", headers: Any = None) -> Any:
        try:
            return super()._send(body, path, method, {})
        except (OSError, RuntimeError, http.client.HTTPException) as error:
            raise MasterUnavailableError(f"The Mesos master did not take a call: {error}") from error

    def acceptOffers(self, offer_ids: Any, operations: Any, filters: Any = None) -> None:  # noqa: N802
        """Launches on offers; unlike pymesos' own, never in vain."""
        self._require_connection()
        super().acceptOffers(offer_ids, operations, filters)

    def declineOffer(self, offer_ids: Any, filters: Any = None) -> None:  # noqa: N802
        """Gives offers back; unlike pymesos' own, never in vain."""
        self._require_connection()
        super().declineOffer(offer_ids, filters)

    def _require_connection(self) -> None:
        if not self.connected:
            raise MasterUnavailableError("There is no connection to the Mesos master.")
