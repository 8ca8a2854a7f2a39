"""Announces the end of a search: `dike tune --on-end`."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING

import httpx

if TYPE_CHECKING:
    from framework.search.records import SearchOutcome

TIMEOUT_S = 60.0


def announce_end(target: str, result: SearchOutcome) -> None:
    """Posts the result as JSON to a URL, or runs a command with it as input. A failure is a warning.

    The JSON is that of `dike tune --format json`.
    """
    document = json.dumps(result.to_json()).encode()
    try:
        if target.startswith(("http://", "https://")):
            httpx.post(
                target, content=document, headers={"Content-Type": "application/json"}, timeout=TIMEOUT_S
            ).raise_for_status()
        else:
            # The user's own command line; it is never read from a database, where others may write.
            command = ["/bin/sh", "-c", target]
            subprocess.run(command, input=document, stdout=sys.stderr, timeout=TIMEOUT_S, check=True)
    except (httpx.HTTPError, httpx.InvalidURL, OSError, subprocess.SubprocessError) as error:
        print(f"dike: the end of the search could not be announced (--on-end): {error}", file=sys.stderr)
