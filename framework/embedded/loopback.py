"""Requests to a daemon on loopback, ignoring the proxies of the user's environment."""

from __future__ import annotations

import base64
import http.client
import json
from typing import Any

REQUEST_TIMEOUT_S = 10.0


def get_json(
    address: str, port: int, path: str, credentials: tuple[str, str], timeout_s: float = REQUEST_TIMEOUT_S
) -> dict[str, Any] | None:
    """The daemon's JSON answer to a GET; None without a valid one."""
    connection = http.client.HTTPConnection(address, port, timeout=timeout_s)
    basic = base64.b64encode(":".join(credentials).encode()).decode()
    try:
        connection.request("GET", path, headers={"Authorization": f"Basic {basic}"})
        response = connection.getresponse()
        answer: dict[str, Any] | None = json.load(response) if response.status == http.client.OK else None
    except (OSError, http.client.HTTPException, ValueError):
        return None
    finally:
        connection.close()
    return answer
