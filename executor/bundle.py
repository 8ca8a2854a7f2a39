"""Fetches the folder of the user's script from the framework."""

from __future__ import annotations

import tarfile
import tempfile
from pathlib import Path

import httpx

TIMEOUT_S = 60.0


class BundleError(Exception):
    """The bundle could not be fetched or unpacked; the message says why."""


def fetch(url: str, folder: Path) -> None:
    """Unpacks the gzipped tar archive at `url` into `folder`, which is created.

    Raises:
        BundleError: if the framework does not answer, refuses, or sends something else than an archive.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile() as archive:
            with httpx.stream("GET", url, timeout=TIMEOUT_S, trust_env=False) as response:
                response.raise_for_status()
                for block in response.iter_bytes():
                    archive.write(block)
            archive.seek(0)
            with tarfile.open(fileobj=archive, mode="r:gz") as tar:
                # The "data" filter refuses members that would land outside the folder.
                tar.extractall(folder, filter="data")
    except httpx.HTTPStatusError as error:
        raise BundleError(f"the framework refused the script's bundle: HTTP {error.response.status_code}") from error
    except httpx.HTTPError as error:
        raise BundleError(f"the script's bundle could not be fetched from the framework: {error}") from error
    except (tarfile.TarError, EOFError, OSError) as error:
        raise BundleError(f"the script's bundle could not be unpacked: {error}") from error
