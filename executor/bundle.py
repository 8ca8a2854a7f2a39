"""Fetches the folder of the user's script from the framework, and reads such archives without trusting them."""

from __future__ import annotations

import contextlib
import gzip
import http.client
import io
import tempfile
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus
from pathlib import Path
from typing import BinaryIO
from urllib.parse import urlsplit

from backports import tarfile  # Python's own has filters since 3.11.4; Debian 12 has 3.11.2

TIMEOUT_S = 60.0
PATIENCE_S = 120.0
"""How long it is tried again where the framework has too much to do: it serves only so many executors at a time."""
AWAY_S = 15.0
"""The same where nobody answers: a service may be starting anew."""
RETRY_S = 2.0
BLOCK_BYTES = 1 << 16
MEMBERS_LIMIT = 20_000
"""How many files and folders an archive may hold: each takes time, however small it is."""
UNPACKED_LIMIT_BYTES = 200 * 2**20
"""How large an archive may be once decompressed: twice what may be packed, and 512 bytes and more for each file."""


class BundleError(Exception):
    """The bundle could not be fetched or unpacked; the message says why."""


def fetch(url: str, folder: Path) -> None:
    """Unpacks the gzipped tar archive at `url` into `folder`, which is created.

    Raises:
        BundleError: if the framework does not answer, refuses, has too much to do for long, or sends something else
            than an archive of plain files.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile() as archive:
            _download(url, archive)
            archive.seek(0)
            unpack(archive, folder)
    except OSError as error:
        raise BundleError(f"the script's bundle could not be unpacked: {error}") from error


def unpack(archive: BinaryIO, folder: Path) -> None:
    """Unpacks a gzipped tar archive into a folder.

    Raises:
        BundleError: if it is something else than an archive of plain files.
        OSError: if they cannot be written.
    """
    with opened(archive) as tar:
        # The "data" filter refuses members that would land outside the folder.
        tar.extractall(folder, members=plain_members(tar), filter="data")


def _download(url: str, archive: BinaryIO) -> None:
    began_s = answered_s = time.monotonic()
    while True:
        try:
            for block in _blocks(url):
                archive.write(block)
                if archive.tell() > UNPACKED_LIMIT_BYTES:
                    raise BundleError("the script's bundle does not end")
            return
        except _NotSentError as error:
            now_s = time.monotonic()
            if not error.is_away:
                answered_s = now_s
            if not error.may_pass or now_s - began_s >= PATIENCE_S or now_s - answered_s >= AWAY_S:
                raise BundleError(str(error)) from error
        archive.seek(0)
        archive.truncate()
        time.sleep(RETRY_S)


class _NotSentError(Exception):
    """The framework has not sent the bundle.

    Attributes:
        may_pass: whether it, or the way to it, may only be overloaded, or it is being started anew.
        is_away: whether nobody has answered at all.
    """

    def __init__(self, message: str, *, may_pass: bool, is_away: bool = False) -> None:
        super().__init__(message)
        self.may_pass = may_pass
        self.is_away = is_away


def _blocks(url: str) -> Iterator[bytes]:
    """What is at a URL, by Python's own client: any other takes longer to be made than the answer to come."""
    parts = urlsplit(url)
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    try:
        with contextlib.closing(kind(parts.netloc, timeout=TIMEOUT_S)) as connection:
            connection.request("GET", parts.path)
            response = connection.getresponse()
            if response.status != HTTPStatus.OK:
                busy = response.status == HTTPStatus.SERVICE_UNAVAILABLE
                raise _NotSentError(f"the framework refused the script's bundle: HTTP {response.status}", may_pass=busy)
            while block := response.read(BLOCK_BYTES):
                yield block
            if response.length:
                raise http.client.IncompleteRead(b"", response.length)
    except (OSError, http.client.HTTPException) as error:
        # In the midst of an answer it gives up, too.
        is_away = isinstance(error, ConnectionError) and not isinstance(error, http.client.HTTPException)
        may_pass = is_away or isinstance(error, TimeoutError | http.client.HTTPException)
        text = f"the script's bundle could not be fetched from the framework: {error}"
        raise _NotSentError(text, may_pass=may_pass, is_away=is_away) from error


@contextmanager
def opened(archive: BinaryIO) -> Iterator[tarfile.TarFile]:
    """A gzipped tar archive, to be read from its beginning to its end; a bomb is noticed before it has grown.

    Raises:
        BundleError: from anything done with it, if it is malformed, or larger than may be.
    """
    try:
        with gzip.GzipFile(fileobj=archive) as stream, tarfile.open(fileobj=_Limited(stream), mode="r|") as tar:
            yield tar
    except RecursionError:
        # Headers that belong to the next member, thousands of them.
        raise BundleError("the script's bundle could not be unpacked: its headers do not end") from None
    except (tarfile.TarError, gzip.BadGzipFile, zlib.error, EOFError, ValueError, OverflowError) as error:
        raise BundleError(f"the script's bundle could not be unpacked: {error}") from error


def plain_members(tar: tarfile.TarFile) -> Iterator[tarfile.TarInfo]:
    """All members, in order.

    Raises:
        BundleError: at the first that is neither a file nor a folder (`framework.project.bundle.pack` makes no
            others), or is said to be larger than may be, and if they are too many.
    """
    for number, member in enumerate(tar):
        if number >= MEMBERS_LIMIT:
            raise BundleError(f"the script's bundle could not be unpacked: it holds more than {MEMBERS_LIMIT} files")
        if not (member.isreg() or member.isdir()) or member.issparse():
            raise BundleError(f"the script's bundle could not be unpacked: {member.name!r} is no plain file")
        # Before it is skipped: that takes as long as its header says, whether or not anything is there.
        if tar.offset > UNPACKED_LIMIT_BYTES:
            raise BundleError(f"the script's bundle could not be unpacked: {_too_large()}")
        yield member


class _Limited(io.RawIOBase):
    """Lets no more be read of a stream than an archive may hold."""

    def __init__(self, stream: gzip.GzipFile) -> None:
        self._stream = stream
        self._left = UNPACKED_LIMIT_BYTES

    def read(self, size: int = -1) -> bytes:
        data = self._stream.read(size)
        self._left -= len(data)
        if self._left < 0:
            raise tarfile.ReadError(_too_large())
        return data


def _too_large() -> str:
    return f"it holds more than {UNPACKED_LIMIT_BYTES // 2**20} MiB"
