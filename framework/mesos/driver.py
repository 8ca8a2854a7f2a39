"""pymesos' scheduler driver with its known defects worked around, and the calls that a scheduler makes."""

from __future__ import annotations

import http.client
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from dike.exceptions import DikeError
from executor.driver import ResilientConnection, pymesos
from framework.mesos.events import EventScheduler, Refused

logger = logging.getLogger(__name__)

RECONNECT_PAUSE_S = 0.5
MAX_BACKOFF_S = 2.0
MASTER_TIMEOUT_S = 10 * 365 * 24 * 3600.0
"""Maximum time without a master: never give up."""
HEALTHY_CONNECTION_S = 5.0
CALL_TIMEOUT_S = 5.0
"""Maximum time that a master may take to answer a call."""


class MasterUnavailableError(DikeError):
    """A call could not be delivered; the driver is reconnecting."""


class CallRefusedError(DikeError):
    """The master received a call and refused it; a retry would not help."""


@dataclass(frozen=True)
class FrameworkSettings:
    """Settings of a subscription.

    Attributes:
        name: shown in Mesos' state and web page.
        user: operating-system user that its tasks run as.
        role: Mesos role.
        failover_timeout_s: how long Mesos keeps its tasks after it disconnects.
        framework_id: id of an earlier subscription to resume; None for a new framework.
        webui_url: URL of its web page; None if it has none.
        checkpoint: whether executors survive a restart of their agent's process.
        principal, secret: credentials for HTTP basic authentication; None for none.
    """

    name: str
    user: str
    role: str = "*"
    failover_timeout_s: float = 60.0
    framework_id: str | None = None
    webui_url: str | None = None
    checkpoint: bool = False
    principal: str | None = None
    secret: str | None = None

    def framework_info(self) -> dict[str, Any]:
        info: dict[str, Any] = {
            "name": self.name,
            "user": self.user,
            "role": self.role,
            "failover_timeout": self.failover_timeout_s,
            "checkpoint": self.checkpoint,
        }
        if self.framework_id is not None:
            info["id"] = {"value": self.framework_id}
        if self.webui_url is not None:
            info["webui_url"] = self.webui_url
        if self.principal is not None:
            info["principal"] = self.principal
        return info


# pymesos has no option for its connection class.
pymesos.process.Connection = ResilientConnection


def driver_failure() -> str:
    """Returns the error that ended pymesos' thread, which also interrupts the main thread; empty if none."""
    failure = pymesos.process._exc_info
    return str(failure[1]) if failure else ""


class MesosCalls(Protocol):
    """Calls that a scheduler makes on the master; `Driver` sends them to a real one."""

    def acceptOffers(self, offer_ids: Any, operations: Any, filters: Any = None) -> None: ...  # noqa: N802
    def declineOffer(self, offer_ids: Any, filters: Any = None) -> None: ...  # noqa: N802
    def acknowledgeStatusUpdate(self, status: dict[str, Any]) -> None: ...  # noqa: N802
    def reviveOffers(self) -> None: ...  # noqa: N802
    def suppressOffers(self) -> None: ...  # noqa: N802
    def sendFrameworkMessage(self, executor_id: Any, agent_id: Any, data: str) -> None: ...  # noqa: N802
    def kill(self, task_id: str, agent_id: str) -> None: ...
    def reconcile(self, tasks: dict[str, str]) -> None: ...


def try_call(call: Callable[..., None], *arguments: Any) -> bool:
    """Makes a call that may fail because it is repeated later or made up for by reconciliation; returns whether it
    succeeded.
    """
    try:
        call(*arguments)
    except (MasterUnavailableError, CallRefusedError) as error:
        logger.info("%s", error)
        return False
    return True


class Driver(pymesos.MesosSchedulerDriver):
    """Client of the Mesos master's v1 scheduler API.

    Works around these defects of pymesos 0.3.15:
      * it declares the capability GPU_RESOURCES only if it could read the master's version first, and a framework
        without it is never offered an agent that has GPUs;
      * it stops for good on a master that is starting (see `executor.driver`);
      * it retries without a pause when a connection is accepted and closed;
      * it gives up after a day without a master, and before that when its growing backoff overflows;
      * it keeps subscribing after an ERROR event (`EventScheduler.error` stops it);
      * `killTask` and `reconcileTasks` drop the agent's id, without which Mesos cannot distinguish lost from unknown
        tasks;
      * all drivers share one mutable dictionary of HTTP headers, credentials included;
      * a call without a connection is dropped silently;
      * a call waits a day for its answer, and blocks subscribing to another master meanwhile;
      * it asks each new master for its version first, with the same timeout;
      * it closes a connection that another thread is using.

    After a call times out, further calls fail immediately for as long as that call took, so that a hanging master does
    not block a series of calls.

    Args:
        settings: settings of the subscription.
        master: `host:port` or a `zk://` URI.
        scheduler: receives the events.
        may_subscribe: called before each subscription, on the driver's thread; the driver waits until it returns true.
            Subscribing throws out any process that has taken over the framework.

    Raises:
        MasterUnavailableError: from every call that could not be delivered.
        CallRefusedError: from every call that the master refused.
    """

    def __init__(
        self,
        settings: FrameworkSettings,
        master: str,
        scheduler: EventScheduler,
        may_subscribe: Callable[[], bool] = lambda: True,
    ) -> None:
        super().__init__(
            scheduler,
            settings.framework_info(),
            master,
            implicit_acknowledgements=False,
            principal=settings.principal,
            secret=settings.secret,
            timeout=MASTER_TIMEOUT_S,
        )
        self._scheduler = scheduler
        self._may_subscribe = may_subscribe
        self._connected_at = 0.0
        self._fail_fast_until_s = 0.0

    @property
    def framework(self) -> dict[str, Any]:
        """FrameworkInfo of the SUBSCRIBE call."""
        return {**self._framework, "capabilities": [{"type": "GPU_RESOURCES"}, {"type": "PARTITION_AWARE"}]}

    def gen_request(self) -> bytes:
        """Returns the SUBSCRIBE request. pymesos calls this for each new connection, so it pauses here between two of
        them.
        """
        if time.monotonic() - self._connected_at < HEALTHY_CONNECTION_S:
            time.sleep(RECONNECT_PAUSE_S)
        while not self._may_subscribe():
            if self.aborted:
                return b""
            time.sleep(RECONNECT_PAUSE_S)
        self._connected_at = time.monotonic()
        self._fail_fast_until_s = 0.0
        return bytes(super().gen_request())

    def _backoff(self, num_conn_retry: int) -> float:
        """Seconds that pymesos sleeps after a failed attempt to connect."""
        return RECONNECT_PAUSE_S if num_conn_retry == 0 else MAX_BACKOFF_S

    def refused(self, http_status: int, reason: str) -> None:
        """Stops, because the master refuses this framework (called by `ResilientConnection`)."""
        self.stop(failover=True)
        self._scheduler.events.put(Refused(reason, http_status))

    def kill(self, task_id: str, agent_id: str) -> None:
        """Kills a task; Mesos answers with its last status update."""
        self._call("KILL", {"task_id": {"value": task_id}, "agent_id": {"value": agent_id}})

    def reconcile(self, tasks: dict[str, str]) -> None:
        """Requests the states of the given tasks (task id -> agent id), or of all tasks if none is given."""
        self._call(
            "RECONCILE",
            {"tasks": [{"task_id": {"value": task}, "agent_id": {"value": agent}} for task, agent in tasks.items()]},
        )

    def _call(self, kind: str, content: dict[str, Any]) -> None:
        self._send({"type": kind, "framework_id": {"value": self.framework_id}, kind.lower(): content})

    def _send(self, body: Any, path: str = "/api/v1/scheduler", method: str = "POST", headers: Any = None) -> Any:
        begun = time.monotonic()
        # TEARDOWN is sent only once, so it is always tried.
        if begun < self._fail_fast_until_s and body["type"] != "TEARDOWN":
            raise MasterUnavailableError("The Mesos master did not answer the last call.")
        try:
            return super()._send(body, path, method, {})
        except RuntimeError as error:
            # pymesos raises no other type: only the text distinguishes a refusal from a missing connection.
            if str(error).startswith("Failed to send request 4"):
                raise CallRefusedError(f"The Mesos master refused a call: {error}") from error
            raise MasterUnavailableError(f"The Mesos master did not take a call: {error}") from error
        except (OSError, http.client.HTTPException) as error:
            now = time.monotonic()
            self._fail_fast_until_s = now + (now - begun)
            raise MasterUnavailableError(f"The Mesos master did not take a call: {error}") from error

    def _get_conn(self) -> Any:
        connection = super()._get_conn()
        if connection is not None:
            # pymesos' own attribute, `_timeout`, is also its timeout for subscribing.
            connection.timeout = CALL_TIMEOUT_S
        return connection

    def _get_version(self, master: str | None) -> None:
        """Skips the request: the capabilities do not depend on the version."""

    def _close(self) -> None:
        # A call in progress on another thread uses the connection that is closed here.
        with self._lock:
            super()._close()

    def acceptOffers(self, offer_ids: Any, operations: Any, filters: Any = None) -> None:  # noqa: N802
        """Unlike pymesos' method, raises without a connection."""
        self._require_connection()
        super().acceptOffers(offer_ids, operations, filters)

    def declineOffer(self, offer_ids: Any, filters: Any = None) -> None:  # noqa: N802
        """Unlike pymesos' method, raises without a connection."""
        self._require_connection()
        super().declineOffer(offer_ids, filters)

    def reviveOffers(self, roles: Any = ()) -> None:  # noqa: N802
        """Unlike pymesos' method, raises without a connection."""
        self._require_connection()
        super().reviveOffers(roles)

    def suppressOffers(self, roles: Any = ()) -> None:  # noqa: N802
        """Unlike pymesos' method, raises without a connection."""
        self._require_connection()
        super().suppressOffers(roles)

    def _require_connection(self) -> None:
        if not self.connected:
            raise MasterUnavailableError("There is no connection to the Mesos master.")
