"""Finds the Mesos master that a user named, and queries its HTTP endpoints."""

from __future__ import annotations

import base64
import dataclasses
import http.client
import json
import logging
import re
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from typing import Any

from kazoo.exceptions import KazooException
from kazoo.handlers.threading import KazooTimeoutError

from dike.exceptions import BadInputError, DikeError
from executor.driver import pymesos
from framework.mesos.offers import attribute_text, node_class, node_names
from solver import NodeClass

DEFAULT_PORT = 5050
RETRY_INTERVAL_S = 0.5
REQUEST_TIMEOUT_S = 5.0
JSON, FORM = "application/json", "application/x-www-form-urlencoded"
Credentials = tuple[str, str]
"""Principal and secret, for HTTP basic authentication."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Master:
    """A master that has answered.

    Attributes:
        uri: address for the driver: `host:port` or a `zk://` URI.
        host, port: the leading master's address.
        version: its Mesos version.
        credentials: for masters that require authentication.
    """

    uri: str
    host: str
    port: int
    version: str
    credentials: Credentials | None = field(default=None, repr=False)

    @property
    def address(self) -> str:
        return f"{self.host}:{self.port}"

    def ask(self, path: str) -> dict[str, Any] | None:
        """Returns the JSON object that a GET of this path yields; None if it fails."""
        try:
            values = _ask(f"http://{self.address}{path}", self.credentials).values()
        except (_NoAnswerError, ValueError) as error:
            logger.info("the master does not answer %s: %s", path, error)
            return None
        return values if isinstance(values, dict) else None

    def agents(self, admits: Callable[[Mapping[str, str], str], bool] = lambda *_: True) -> list[NodeClass] | None:
        """Lists all active agents with their total and free resources; None if the master does not answer.

        Args:
            admits: from an agent's attributes and host name, whether to include it.
        """
        answer = self.ask("/slaves")
        if answer is None:
            return None
        slaves: list[dict[str, Any]] = [slave for slave in answer.get("slaves", []) if slave.get("active")]
        names = node_names({slave["id"]: slave["hostname"] for slave in slaves})
        nodes = []
        for slave in slaves:
            attributes = {name: attribute_text(value) for name, value in slave.get("attributes", {}).items()}
            if not admits(attributes, slave["hostname"]):
                continue
            scalars = {key: float(slave["resources"].get(key, 0)) for key in ("cpus", "mem", "disk", "gpus")}
            used = slave.get("used_resources", {})
            free = {key: amount - float(used.get(key, 0)) for key, amount in scalars.items()}
            nodes.append(dataclasses.replace(node_class(names[slave["id"]], scalars, attributes), free=free))
        return nodes


class LeadingMaster:
    """The current leading master; may be used from any thread.

    Args:
        found: the initial leader.
        is_private: whether it belongs to this process, and ends with it.
        is_here: whether all agents are on this machine, too.
        failure: returns why a private Mesos has failed; empty while it runs.
    """

    def __init__(
        self,
        found: Master,
        *,
        is_private: bool = False,
        is_here: bool = False,
        failure: Callable[[], str] = lambda: "",
    ) -> None:
        self._now = found
        self.is_private = is_private
        self.is_here = is_here
        self.failure = failure

    @property
    def uri(self) -> str:
        """Address for the driver: `host:port` or a `zk://` URI."""
        return self._now.uri

    @property
    def host(self) -> str:
        return self._now.host

    @property
    def port(self) -> int:
        return self._now.port

    @property
    def address(self) -> str:
        return self._now.address

    @property
    def version(self) -> str:
        return self._now.version

    @property
    def credentials(self) -> Credentials | None:
        return self._now.credentials

    def on_subscribed(self, address: str, version: str) -> None:
        """Updates the leader after a subscription.

        A master that the user named by its address is kept: the address that a master reports may not be reachable from
        this machine, and a master that no longer leads redirects to its successor.

        Args:
            address: its `host:port`.
            version: its Mesos version; empty if unknown.
        """
        now = dataclasses.replace(self._now, version=version or self._now.version)
        if now.uri.startswith("zk://"):
            host, _, port = address.rpartition(":")
            now = dataclasses.replace(now, host=host, port=int(port))
        self._now = now

    def ask(self, path: str) -> dict[str, Any] | None:
        """See `Master.ask`."""
        return self._now.ask(path)

    def agents(self, admits: Callable[[Mapping[str, str], str], bool] = lambda *_: True) -> list[NodeClass] | None:
        """See `Master.agents`."""
        return self._now.agents(admits)

    def teardown(self, framework_id: str) -> str:
        """Ends a framework that may still be registered, with all its tasks; returns the result for the log."""
        form = urllib.parse.urlencode({"frameworkId": framework_id}).encode()
        try:
            answer = _ask(f"http://{self.address}/master/teardown", self.credentials, form, FORM)
        except _NoAnswerError as error:
            return f"not ended: {error}"
        # Mesos answers 400 for an unknown framework: it has ended already.
        return f"HTTP {answer.status}"


def connect(uri: str, timeout_s: float) -> Master:
    """Waits until a Mesos master answers.

    Args:
        uri: `host`, `host:port` or `zk://host:port[,host:port...]/path`.
        timeout_s: maximum time to wait.

    Raises:
        BadInputError: if the address is malformed, nothing answers in time, or the server is not a Mesos master.
    """
    deadline = time.monotonic() + timeout_s
    uses_zookeeper = uri.startswith("zk://")
    address = None if uses_zookeeper else _parse_address(uri)
    reason = "no answer"
    while True:
        if uses_zookeeper:
            # Looked up in each iteration: ZooKeeper names a dead master for some more seconds.
            address = _leader(uri, deadline) or address
        if address is None:
            raise BadInputError(f"{uri} named no leading Mesos master within {timeout_s:g} s; check --master.")
        host, port = address
        try:
            answer = _ask(f"http://{host}:{port}/version", timeout_s=min(REQUEST_TIMEOUT_S, max(timeout_s, 0.1)))
        except _NoAnswerError as error:
            reason = str(error)
        else:
            version = _mesos_version(answer)
            if version is not None and _is_master(host, port):
                return Master(uri if "://" in uri else f"{host}:{port}", host, port, version)
            # A Mesos master that is starting serves its version before the rest.
            if answer.status < http.HTTPStatus.INTERNAL_SERVER_ERROR and (version is None or _is_agent(host, port)):
                raise BadInputError(
                    f"The server at {host}:{port} is not a Mesos master; check --master (its port is usually 5050)."
                )
            reason = f"HTTP {answer.status}"
        if time.monotonic() >= deadline:
            raise BadInputError(
                f"No Mesos master answered at {host}:{port} within {timeout_s:g} s ({reason}); check --master, or "
                "leave it out to use a private Mesos on this machine."
            )
        time.sleep(RETRY_INTERVAL_S)


def leader_age_s(address: str, credentials: Credentials | None = None) -> float | None:
    """Returns for how many seconds a master has been the leader, by its own clock; None if it does not answer."""
    question = json.dumps({"type": "GET_MASTER"}).encode()
    try:
        answer = _ask(f"http://{address}/api/v1", credentials, question)
        elected_s = float(answer.values()["get_master"]["elected_time"])
        now_s = parsedate_to_datetime(answer.date).timestamp()
    except (_NoAnswerError, ValueError, KeyError, TypeError) as error:
        logger.info("the master does not report its election time: %s", error)
        return None
    return max(0.0, now_s - elected_s)


def post_operation(address: str, credentials: Credentials | None, call: Mapping[str, Any]) -> None:
    """Makes a call of the operator API.

    Args:
        address: the master's `host:port`.
        credentials: for masters that require authentication.
        call: in Mesos' JSON form.

    Raises:
        DikeError: the master does not answer, or refuses.
    """
    try:
        answer = _ask(f"http://{address}/api/v1", credentials, json.dumps(call).encode())
    except _NoAnswerError as error:
        raise DikeError(f"The Mesos master at {address} does not answer: {error}.") from error
    if answer.status not in (http.HTTPStatus.OK, http.HTTPStatus.ACCEPTED):
        text = answer.content.decode(errors="replace").strip()
        raise DikeError(f"The Mesos master refused {call['type']}: HTTP {answer.status} {text}")


class _NoAnswerError(Exception):
    """No HTTP response."""


@dataclass(frozen=True)
class _Answer:
    """An HTTP response; `date` is its Date header."""

    status: int
    content: bytes
    date: str

    def values(self) -> Any:
        """Parses its JSON.

        Raises:
            ValueError: if its status is not 200, or it is not JSON.
        """
        if self.status != http.HTTPStatus.OK:
            raise ValueError(f"HTTP {self.status}")
        return json.loads(self.content)


# No proxy of the environment: masters are in the cluster's own network, or on this machine.
# Python's own HTTP client, because others would slow down the start of every `dike run`.
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def _ask(
    url: str,
    credentials: Credentials | None = None,
    content: bytes | None = None,
    media_type: str = JSON,
    timeout_s: float = REQUEST_TIMEOUT_S,
) -> _Answer:
    """Sends a GET, or a POST if there is content; follows redirects.

    Raises:
        _NoAnswerError: if there is no HTTP response.
    """
    headers = {"Accept": JSON, "Content-Type": media_type}
    request = urllib.request.Request(url, content, headers)  # noqa: S310 (always http)
    if credentials is not None:
        request.add_header("Authorization", f"Basic {base64.b64encode(':'.join(credentials).encode()).decode()}")
    try:
        try:
            answer = _OPENER.open(request, timeout=timeout_s)
        except urllib.error.HTTPError as error:
            answer = error
        with answer:
            return _Answer(answer.status, answer.read(), answer.headers.get("Date", ""))
    except (OSError, http.client.HTTPException) as error:
        reason = error.reason if isinstance(error, urllib.error.URLError) else error
        raise _NoAnswerError(str(reason) or type(reason).__name__) from error


def _mesos_version(answer: _Answer) -> str | None:
    """Returns the version; None if the server is not Mesos."""
    try:
        data = json.loads(answer.content)
    except ValueError:
        return None
    if isinstance(data, dict) and "build_user" in data and isinstance(data.get("version"), str):
        return str(data["version"])
    return None


def _is_master(host: str, port: int) -> bool:
    return _healthy(f"http://{host}:{port}/master/health")


def _is_agent(host: str, port: int) -> bool:
    return _healthy(f"http://{host}:{port}/slave(1)/health")


def _healthy(url: str) -> bool:
    try:
        return _ask(url).status == http.HTTPStatus.OK
    except _NoAnswerError:
        return False


def _parse_address(uri: str) -> tuple[str, int]:
    # Not a URL parser: accepts the forms that people paste.
    host, separator, port = uri.removeprefix("http://").rstrip("/").rpartition(":")
    if not separator:
        host, port = port, str(DEFAULT_PORT)
    if not re.fullmatch(r"[\w.-]+", host) or not re.fullmatch(r"[0-9]{1,5}", port) or not 0 < int(port) < 2**16:
        raise _not_an_address(uri)
    return host, int(port)


def _not_an_address(uri: str) -> BadInputError:
    return BadInputError(f"'{uri}' is not the address of a master; --master takes HOST:PORT or zk://HOST:PORT/PATH.")


class _DetectorCallbacks:
    """Receives the callbacks of pymesos' detector."""

    def __init__(self) -> None:
        self.changed = threading.Event()
        self.address: tuple[str, int] | None = None

    def onNewMasterDetectedMessage(self, data: bytes) -> None:  # noqa: N802 (pymesos' name)
        try:
            address = json.loads(data)["address"]
            self.address = (str(address["ip"]), int(address["port"]))
        except (ValueError, KeyError, TypeError) as error:
            logger.warning("the ZooKeeper entry is not a Mesos master: %s", error)
            return
        self.changed.set()

    def onNoMasterDetectedMessage(self) -> None:  # noqa: N802 (pymesos' name)
        logger.info("ZooKeeper names no leading Mesos master yet")


def _leader(uri: str, deadline: float) -> tuple[str, int] | None:
    """Looks up the leading master in ZooKeeper; None if it names none in time.

    Raises:
        BadInputError: if the address is malformed.
    """
    if not re.fullmatch(r"zk://[\w.-]+:[0-9]+(,[\w.-]+:[0-9]+)*/\S+", uri):
        raise _not_an_address(uri)
    found = _DetectorCallbacks()
    detector = pymesos.detector.MasterDetector(uri.partition("://")[2], found)
    starting = threading.Thread(target=_start_detector, args=(detector,), daemon=True)
    starting.start()
    found.changed.wait(max(0.0, deadline - time.monotonic()))
    detector.stop()
    return found.address


def _start_detector(detector: pymesos.detector.MasterDetector) -> None:
    try:
        detector.start()
    except (KazooTimeoutError, KazooException) as error:
        logger.info("ZooKeeper did not answer: %s", error)
