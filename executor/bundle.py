"""Downloads a job's bundle from the framework, and reads bundles as untrusted archives."""

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

RESPONSE_TIMEOUT_S = 60.0
BUSY_TIMEOUT_S = 120.0
"""Maximum time of retries while the framework answers that it is busy: it serves few executors at a time."""
UNREACHABLE_TIMEOUT_S = 15.0
"""Maximum time of retries while there is no answer: a service may be restarting."""
RETRY_INTERVAL_S = 2.0
BLOCK_BYTES = 1 << 16
MAX_MEMBERS = 20_000
"""Maximum number of files and folders in an archive: each takes time, however small it is."""
MAX_UNPACKED_BYTES = 200 * 2**20
"""Maximum size of a decompressed archive: twice the packing limit, which leaves 512 bytes and more for each file."""


class BundleError(Exception): ...


def fetch(url: str, folder: Path) -> None:
    """Downloads a gzipped tar archive and unpacks it into `folder`, which is created.

    Raises:
        BundleError: if the framework refuses, does not answer or stays busy, or sends anything but an archive of plain
            files.
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
        BundleError: if the archive is malformed or too large, or holds more than plain files and folders.
        OSError: if files cannot be written.
    """
    with open_archive(archive) as tar:
        # The "data" filter refuses members that would be written outside the folder.
        tar.extractall(folder, members=plain_members(tar), filter="data")


def _download(url: str, archive: BinaryIO) -> None:
    started_at_s = last_answer_s = time.monotonic()
    while True:
        try:
            for block in _download_blocks(url):
                archive.write(block)
                if archive.tell() > MAX_UNPACKED_BYTES:
                    raise BundleError("the script's bundle does not end")
            return
        except _DownloadError as error:
            now_s = time.monotonic()
            if not error.is_unreachable:
                last_answer_s = now_s
            if (
                not error.is_transient
                or now_s - started_at_s >= BUSY_TIMEOUT_S
                or now_s - last_answer_s >= UNREACHABLE_TIMEOUT_S
            ):
                raise BundleError(str(error)) from error
        archive.seek(0)
        archive.truncate()
        time.sleep(RETRY_INTERVAL_S)


class _DownloadError(Exception):
    """The framework has not sent the bundle.

    Attributes:
        is_transient: whether a retry may help: the framework is overloaded or restarting.
        is_unreachable: whether there was no answer at all.
    """

    def __init__(self, message: str, *, is_transient: bool, is_unreachable: bool = False) -> None:
        super().__init__(message)
        self.is_transient = is_transient
        self.is_unreachable = is_unreachable


def _download_blocks(url: str) -> Iterator[bytes]:
    """Yields the content at a URL. `http.client` is imported and set up faster than any other client."""
    parts = urlsplit(url)
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    try:
        with contextlib.closing(kind(parts.netloc, timeout=RESPONSE_TIMEOUT_S)) as connection:
            connection.request("GET", parts.path)
            response = connection.getresponse()
            if response.status != HTTPStatus.OK:
                busy = response.status == HTTPStatus.SERVICE_UNAVAILABLE
                raise _DownloadError(
                    f"the framework refused the script's bundle: HTTP {response.status}", is_transient=busy
                )
            while block := response.read(BLOCK_BYTES):
                yield block
            if response.length:
                raise http.client.IncompleteRead(b"", response.length)
    except (OSError, http.client.HTTPException) as error:
        # An answer that breaks off is an HTTPException: the framework was reached.
        is_unreachable = isinstance(error, ConnectionError) and not isinstance(error, http.client.HTTPException)
        is_transient = is_unreachable or isinstance(error, TimeoutError | http.client.HTTPException)
        text = f"the script's bundle could not be fetched from the framework: {error}"
        raise _DownloadError(text, is_transient=is_transient, is_unreachable=is_unreachable) from error


@contextmanager
def open_archive(archive: BinaryIO) -> Iterator[tarfile.TarFile]:
    """Opens a gzipped tar archive for one pass; a decompression bomb is detected while it is read.

    Raises:
        BundleError: from any use of it, if it is malformed or too large.
    """
    try:
        with gzip.GzipFile(fileobj=archive) as stream, tarfile.open(fileobj=_LimitedReader(stream), mode="r|") as tar:
            yield tar
    except RecursionError:
        # Thousands of extension headers for one member.
        raise BundleError("the script's bundle could not be unpacked: its headers do not end") from None
    except (tarfile.TarError, gzip.BadGzipFile, zlib.error, EOFError, ValueError, OverflowError) as error:
        raise BundleError(f"the script's bundle could not be unpacked: {error}") from error


def plain_members(tar: tarfile.TarFile) -> Iterator[tarfile.TarInfo]:
    """Yields all members in order.

    Raises:
        BundleError: at the first member that is neither a file nor a folder (`framework.project.bundle.pack` writes
            no others) or exceeds the size limit, and if there are more than `MAX_MEMBERS`.
    """
    for number, member in enumerate(tar):
        if number >= MAX_MEMBERS:
            raise BundleError(f"the script's bundle could not be unpacked: it holds more than {MAX_MEMBERS} files")
        if not (member.isreg() or member.isdir()) or member.issparse():
            raise BundleError(f"the script's bundle could not be unpacked: {member.name!r} is no plain file")
        # Check before it is skipped: that takes as long as the header claims, even if there is no data.
        if tar.offset > MAX_UNPACKED_BYTES:
            raise BundleError(f"the script's bundle could not be unpacked: {_size_error()}")
        yield member


class _LimitedReader(io.RawIOBase):
    """Raises ReadError once more than `MAX_UNPACKED_BYTES` have been read from a stream."""

    def __init__(self, stream: gzip.GzipFile) -> None:
        self._stream = stream
        self._left = MAX_UNPACKED_BYTES

    def read(self, size: int = -1) -> bytes:
        data = self._stream.read(size)
        self._left -= len(data)
        if self._left < 0:
            raise tarfile.ReadError(_size_error())
        return data


def _size_error() -> str:
    return f"it holds more than {MAX_UNPACKED_BYTES // 2**20} MiB"
