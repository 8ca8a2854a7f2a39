"""Asks a daemon on loopback, without the proxies that a user's environment may name."""

from __future__ import annotations

import http.client
import json
from typing import Any

REQUEST_TIMEOUT_S = 10.0


def get_json(host: str, port: int, path: str, timeout_s: float = REQUEST_TIMEOUT_S) -> dict[str, Any] | None:
    """The daemon's JSON answer to a GET; None when it does not answer that, or not yet."""
    connection = http.client.HTTPConnection(host, port, timeout=timeout_s)
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        answer: dict[str, Any] | None = json.load(response) if response.status == http.client.OK else None
    except (OSError, http.client.HTTPException, ValueError):
        return None
    finally:
        connection.close()
    return answer
