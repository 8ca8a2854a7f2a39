"""pymesos' subscription, made patient: for executors and for the framework."""

from __future__ import annotations

import logging
import socket
from http import HTTPStatus
from typing import Any

from executor.quiet_pymesos import pymesos

logger = logging.getLogger(__name__)

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
