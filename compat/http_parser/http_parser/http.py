"""The `HttpParser` that pymesos drives, on top of `httptools`."""

from __future__ import annotations

import httptools

__all__ = ["HttpParser"]


class HttpParser:
    """Incremental parser of one HTTP response.

    Offers the methods of http-parser 0.9.0 that pymesos calls, with the same meaning: feed bytes with `execute`,
    then ask what has arrived. A body is handed out once, by `recv_body`, with any chunked encoding removed.
    """

    def __init__(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self._headers: dict[str, str] = {}
        self._headers_complete = False
        self._message_complete = False
        self._body = bytearray()
        self._error: Exception | None = None

    def execute(self, data: bytes, length: int) -> int:
        """Feeds `data[:length]`; returns how many bytes were taken: `length`, or 0 when they are not HTTP."""
        try:
            self._parser.feed_data(bytes(data[:length]))
        except httptools.HttpParserError as error:
            self._error = error
            return 0
        return length

    def get_errno(self) -> str:
        """What was wrong with the bytes that `execute` refused; empty when nothing was."""
        return str(self._error) if self._error else ""

    def get_status_code(self) -> int:
        """Status code of the response, 0 before its first line has arrived."""
        return int(self._parser.get_status_code())

    def get_headers(self) -> dict[str, str]:
        """The headers so far, names in the case they came in."""
        return dict(self._headers)

    def is_headers_complete(self) -> bool:
        return self._headers_complete

    def is_message_complete(self) -> bool:
        return self._message_complete

    def is_chunked(self) -> bool:
        return any(
            name.lower() == "transfer-encoding" and "chunked" in value.lower() for name, value in self._headers.items()
        )

    def is_partial_body(self) -> bool:
        """Whether body bytes wait for `recv_body`."""
        return bool(self._body)

    def recv_body(self) -> bytes:
        """Takes the body bytes that have arrived since the last call."""
        body = bytes(self._body)
        self._body.clear()
        return body

    # Callbacks of httptools.

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.decode("latin-1")] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        self._headers_complete = True

    def on_body(self, body: bytes) -> None:
        self._body += body

    def on_message_complete(self) -> None:
        self._message_complete = True
