"""HTTP requests to a service: parsed answers, and one-sentence errors."""

from __future__ import annotations

import contextlib
import ipaddress
import json
import time
from collections.abc import Iterator, Mapping
from http import HTTPStatus
from typing import Any, TypeVar

import httpx
from pydantic import TypeAdapter, ValidationError

from dike.exceptions import BadInputError, DikeError
from framework.service.api.schemas import Problem

API = "/api/v1"
TIMEOUT = httpx.Timeout(30.0, connect=10.0, write=60.0)
STREAM_TIMEOUT_S = 60.0
"""Maximum silence of a stream: the service sends keep-alive lines more often."""
RETRY_DELAYS_S = (0.2, 0.5, 1.0)
MAX_RETRIED_S = 10.0
"""A GET that failed after longer than this is not retried: the service would be as slow again."""
NDJSON = "application/x-ndjson"

_UNAVAILABLE = (HTTPStatus.BAD_GATEWAY, HTTPStatus.SERVICE_UNAVAILABLE, HTTPStatus.GATEWAY_TIMEOUT)
Answer = TypeVar("Answer")


class ServiceUnavailableError(BadInputError):
    """No service answers at the address, or it is temporarily unavailable."""


class ServiceHttp:
    """A connection to a service.

    Raises:
        ServiceUnavailableError: from every method, if no service answers.
        BadInputError: from every method, if it refuses the request.
        DikeError: from every method, if the service fails.
    """

    def __init__(self, url: str, token: str | None) -> None:
        self.url = str(_parse(url)).rstrip("/")
        self._has_token = token is not None
        headers = {} if token is None else {"Authorization": f"Bearer {_checked(token)}"}
        self._http = httpx.Client(
            base_url=f"{self.url}{API}",
            headers=headers,
            timeout=TIMEOUT,
            # Without TLS nothing is verified, and reading all certificates is slow.
            verify=self.url.startswith("https:"),
            # A proxy from the environment does not lead to this machine's loopback.
            trust_env=not is_loopback_url(url),
        )

    def close(self) -> None:
        self._http.close()

    def get(self, path: str, form: type[Answer], wanted: Mapping[str, Any] | None = None) -> Answer:
        """GETs an answer of type `form`, with retries."""
        answer = self.get_or_none(path, form, wanted)
        if answer is None:
            raise BadInputError(f"The service at {self.url} has no {path}.")
        return answer

    def get_or_none(self, path: str, form: type[Answer], wanted: Mapping[str, Any] | None = None) -> Answer | None:
        """Like `get`; None for a 404."""
        answer = self._get_with_retries(path, wanted)
        return None if answer.status_code == HTTPStatus.NOT_FOUND else self._read(answer, form)

    def post(self, path: str, form: type[Answer], **content: Any) -> Answer:
        """POSTs once, without retries; the error says if the service may have received the request."""
        try:
            return self._read(self._send("POST", path, **content), form)
        except ServiceUnavailableError as error:
            if isinstance(error.__cause__, httpx.ReadError | httpx.ReadTimeout | httpx.RemoteProtocolError):
                raise ServiceUnavailableError(
                    f"The service at {self.url} has not answered ({type(error.__cause__).__name__}), and may have done "
                    "what it was asked for: look at dike jobs before you try again."
                ) from error
            raise

    def lines(self, path: str, wanted: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """Streams JSON objects, one a line; keep-alive lines yield an empty one."""
        headers = {"Accept": NDJSON}
        timeout = httpx.Timeout(30.0, read=STREAM_TIMEOUT_S)
        with (
            self._transport_errors(),
            self._http.stream("GET", path, params=dict(wanted), headers=headers, timeout=timeout) as answer,
        ):
            if answer.status_code != HTTPStatus.OK:
                answer.read()
                self._check(answer)
            for text in answer.iter_lines():
                yield self._object(text) if text else {}

    def blocks(self, path: str, wanted: Mapping[str, Any]) -> Iterator[bytes]:
        timeout = httpx.Timeout(30.0, read=STREAM_TIMEOUT_S)
        with (
            self._transport_errors(),
            self._http.stream("GET", path, params=dict(wanted), timeout=timeout) as answer,
        ):
            if answer.status_code != HTTPStatus.OK:
                answer.read()
                self._check(answer)
            yield from answer.iter_bytes()

    def _get_with_retries(self, path: str, wanted: Mapping[str, Any] | None) -> httpx.Response:
        for delay_s in RETRY_DELAYS_S:
            start_s = time.monotonic()
            try:
                answer = self._send("GET", path, params=wanted)
                if answer.status_code not in _UNAVAILABLE:
                    return answer
            except ServiceUnavailableError:
                # Faster failures are retried; the last attempt raises.
                if time.monotonic() - start_s >= MAX_RETRIED_S:
                    raise
            time.sleep(delay_s)
        return self._send("GET", path, params=wanted)

    def _send(self, method: str, path: str, **content: Any) -> httpx.Response:
        with self._transport_errors():
            return self._http.request(method, path, **content)

    def _read(self, answer: httpx.Response, form: type[Answer]) -> Answer:
        self._check(answer)
        try:
            return TypeAdapter(form).validate_json(answer.content)
        except ValidationError as error:
            raise self._not_ours() from error

    def _object(self, text: str) -> dict[str, Any]:
        try:
            return dict(json.loads(text))
        except (ValueError, TypeError) as error:
            raise self._not_ours() from error

    def _check(self, answer: httpx.Response) -> None:
        status = answer.status_code
        if status < HTTPStatus.MULTIPLE_CHOICES:
            return
        has_message = "error=" in answer.headers.get("WWW-Authenticate", "")
        if status == HTTPStatus.UNAUTHORIZED and not has_message:
            problem = "does not know this token; give the right one" if self._has_token else "wants a token; give yours"
            raise BadInputError(f"The service at {self.url} {problem} with --token-file or in $DIKE_TOKEN.")
        try:
            detail = Problem.model_validate_json(answer.content).detail
        except ValidationError as error:
            if status in _UNAVAILABLE:
                raise self._unavailable(f"HTTP {status}") from error
            raise self._not_ours() from error
        if status in _UNAVAILABLE:
            raise ServiceUnavailableError(f"The service at {self.url} cannot answer at the moment: {detail}")
        if status >= HTTPStatus.INTERNAL_SERVER_ERROR:
            raise DikeError(f"The service at {self.url} has failed: {detail}")
        raise BadInputError(detail)

    @contextlib.contextmanager
    def _transport_errors(self) -> Iterator[None]:
        try:
            yield
        except httpx.TransportError as error:
            raise self._unavailable(str(error) or type(error).__name__) from error

    def _unavailable(self, reason: str) -> ServiceUnavailableError:
        return ServiceUnavailableError(
            f"No Dike service answers at {self.url} ({reason}); start one with dike serve, or name another with "
            "--service."
        )

    def _not_ours(self) -> BadInputError:
        return BadInputError(
            f"What answers at {self.url} is not a Dike service, or one of a version that this dike does not understand."
        )


def _parse(url: str) -> httpx.URL:
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL as error:
        raise BadInputError(f"'{url}' is not the address of a service: {error}.") from error
    if parsed.scheme not in ("http", "https") or not parsed.host or parsed.userinfo:
        raise BadInputError(f"'{url}' is not the address of a service; write http://HOST:PORT.")
    return parsed


def _checked(token: str) -> str:
    if not token or not token.isascii() or not token.isprintable() or " " in token:
        raise BadInputError("The token is not one word of ASCII characters; copy it exactly.")
    return token


def is_loopback_url(url: str) -> bool:
    """Whether a service's address is on loopback; raises `BadInputError` if it is invalid."""
    host = _parse(url).host
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
