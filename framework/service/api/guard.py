"""ASGI middleware around every request: size limits, timeouts, security headers, metrics."""

from __future__ import annotations

import asyncio
import time
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from framework.service.metrics import ServiceMetrics

PREFIX = "/api/v1"
METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
CHUNK_TIMEOUT_S = 30.0
"""Maximum pause within a request's body."""
BODY_TIMEOUT_S = 600.0

_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'self'; img-src 'self' data:; object-src 'none'; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}


class Guard:
    """The outermost middleware.

    `hosts` are the names allowed in the Host header, against DNS rebinding: otherwise another site's page could make
    its own name resolve to this service; None for any.
    """

    def __init__(
        self,
        app: ASGIApp,
        metrics: ServiceMetrics,
        hosts: frozenset[str] | None,
        body_limit_bytes: dict[str, int],
        other_limit_bytes: int,
    ) -> None:
        self._app = app
        self._metrics = metrics
        self._hosts = hosts
        self._limits = body_limit_bytes
        self._other_limit = other_limit_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        answer = _Answer(scope, send, self._metrics)
        limit = self._limits.get(scope["path"], self._other_limit)
        headers = Headers(scope=scope)
        length = headers.get("content-length", "")
        if self._hosts is not None and _host_of(headers) not in self._hosts:
            await _problem(400, "The Host header is not a name of this service.")(scope, receive, answer.send)
        elif length.isdecimal() and int(length) > limit:
            await _problem(413, _too_large(limit))(scope, receive, answer.send)
        else:
            await self._app(scope, _Body(receive, limit).receive, answer.send)


class _Answer:
    def __init__(self, scope: Scope, send: Send, metrics: ServiceMetrics) -> None:
        self._scope = scope
        self._send = send
        self._metrics = metrics
        self._since_s = time.perf_counter()

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._start(message)
        await self._send(message)

    def _start(self, message: Message) -> None:
        headers = MutableHeaders(scope=message)
        headers.update(_HEADERS)
        # The API's answers are never cached; the page's files are revalidated.
        headers["Cache-Control"] = "no-store" if self._scope["path"].startswith(PREFIX) else "no-cache"
        # Known values only: clients must not be able to fill the memory with labels.
        route = getattr(self._scope.get("route"), "path", None)
        if route is None:
            route = "other"
        elif self._scope["path"].startswith(PREFIX) and not route.startswith(PREFIX):
            # The route of an included router lacks the router's prefix.
            route = PREFIX + route
        method = self._scope["method"] if self._scope["method"] in METHODS else "other"
        self._metrics.answered(method, route, message["status"], time.perf_counter() - self._since_s)


class _Body:
    """Limits the size and duration of a request's body."""

    def __init__(self, receive: Receive, limit_bytes: int) -> None:
        self._receive = receive
        self._limit = limit_bytes
        self._left = limit_bytes
        self._until_s = time.monotonic() + BODY_TIMEOUT_S
        self._is_complete = False

    async def receive(self) -> Message:
        if self._is_complete:
            # The next message is the client's disconnect, without a deadline.
            return await self._receive()
        timeout_s = min(CHUNK_TIMEOUT_S, max(0.0, self._until_s - time.monotonic()))
        try:
            message = await asyncio.wait_for(self._receive(), timeout_s)
        except TimeoutError:
            raise HTTPException(408, "The request's body arrived too slowly.", {"Connection": "close"}) from None
        if message["type"] == "http.request":
            self._left -= len(message.get("body", b""))
            self._is_complete = not message.get("more_body", False)
            if self._left < 0:
                raise HTTPException(413, _too_large(self._limit), {"Connection": "close"})
        return message


def _host_of(headers: Headers) -> str | None:
    try:
        return urlsplit(f"//{headers.get('host', '')}").hostname
    except ValueError:
        return None


def _too_large(limit_bytes: int) -> str:
    return f"The request's body is larger than {limit_bytes / 2**20:.3g} MiB."


def _problem(status: int, detail: str) -> JSONResponse:
    return JSONResponse({"detail": detail}, status, {"Connection": "close"})
