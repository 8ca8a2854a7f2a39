"""Packs the script's folder into a bundle and serves it to executors over HTTP.

Bundles are packed before anything is launched. The server only serves archives, so no request can reach a file outside
of them. Each URL contains a random token.
"""

from __future__ import annotations

import contextlib
import http.server
import io
import itertools
import logging
import os
import posixpath
import re
import secrets
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from http import HTTPStatus
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, Protocol

import pathspec
from backports import tarfile  # Python's own has filters since 3.11.4; Debian 12 has 3.11.2

from dike.exceptions import BadInputError
from dike.trial.pickled import FUNCTION_SUFFIX
from solver.units import format_bytes

logger = logging.getLogger(__name__)

SIZE_LIMIT_BYTES = 50 * 2**20
IGNORE_FILE = ".dikeignore"
URL_PATH = "/bundle/"
TOKEN = re.compile(r"[\w-]{32}", re.ASCII)
MAX_CONCURRENT_TRANSFERS = 16
"""Maximum number of executors served at the same time; each may keep an archive in memory."""
QUEUE_TIMEOUT_S = 20.0
"""Maximum time in the queue, after which executors are asked to retry, before they consider the server dead."""
MAX_CONNECTIONS = 512
REQUEST_TIMEOUT_S = 30.0
TRANSFER_TIMEOUT_S = 600.0
"""Maximum times for a connection to send its request, and to receive an archive."""
MAX_CACHED_ARCHIVES = 2
COMPRESSION_LEVEL = 3
"""gzip's highest level takes four times as long and saves a few percent."""
ALWAYS_EXCLUDED = (
    *(".git/", ".hg/", ".svn/", ".venv/", "__pycache__/", "*.pyc", "dike-runs/", "node_modules/"),
    *(".ipynb_checkpoints/", ".mypy_cache/", ".pytest_cache/", ".ruff_cache/", ".hypothesis/", ".tox/", ".nox/"),
)
VIRTUAL_ENVIRONMENT_FILE = "pyvenv.cfg"
"""File that only a virtual environment has."""
MAX_PARTS_NAMED = 3
"""Number of parts named of a folder that is too large."""
MAX_FILES_MEASURED = 100_000
"""Maximum number of files in such a folder that are measured."""


def pack(
    script: Path,
    folder: Path | None = None,
    *,
    size_limit_bytes: int = SIZE_LIMIT_BYTES,
    exclude: Collection[Path] = (),
    extra_files: Mapping[str, bytes] = MappingProxyType({}),
) -> bytes:
    """Packs the script's folder as a gzipped tar archive.

    Excluded are files named in `.dikeignore` there or in a subfolder (in the form of a `.gitignore`), version control,
    virtual environments, caches and `dike-runs/`. Links are followed only to files inside the folder.

    Args:
        script: the script, below `folder`.
        folder: the folder to pack; None for the script's own.
        size_limit_bytes: limit of all files together, uncompressed.
        exclude: real paths of files never opened, such as a database in use.
        extra_files: name -> content of additional files.

    Raises:
        BadInputError: the files exceed this limit or that of executors, or one cannot be read.
    """
    # Imported late, here and below: many callers only list files.
    from executor import bundle as executor_bundle

    script = script.resolve()
    folder = script.parent if folder is None else folder.resolve()
    files = _Files(folder, exclude)
    total, found = 0, False
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz", compresslevel=COMPRESSION_LEVEL, dereference=True) as archive:
        for count, path in enumerate(files.walk(), 1):
            name = path.relative_to(folder).as_posix()
            found = found or path == script
            if count > executor_bundle.MAX_MEMBERS:
                raise BadInputError(
                    f"The script's folder {folder} holds more than {executor_bundle.MAX_MEMBERS} files; exclude some "
                    f"in {folder / IGNORE_FILE}."
                )
            try:
                total += 0 if path.is_dir() else path.stat().st_size
                if total > size_limit_bytes:
                    raise BadInputError(_too_large(folder, size_limit_bytes))
                archive.add(path, name, recursive=False)
            except OSError as error:
                why = error.strerror or str(error)
                raise BadInputError(
                    f"{path} cannot be packed for the cluster: {why}; exclude it in {folder / IGNORE_FILE}."
                ) from error
        if not found and script.suffix == FUNCTION_SUFFIX:
            # The only file of dike-runs that is bundled.
            archive.add(script, script.relative_to(folder).as_posix(), recursive=False)
            found = True
        for name, content in extra_files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    if not found:
        raise BadInputError(
            f"The script {script} itself is not bundled: {files.reason(script)}; remove that entry or move the script."
        )
    return buffer.getvalue()


def _too_large(folder: Path, size_limit_bytes: int) -> str:
    sizes: Counter[str] = Counter()
    for path in itertools.islice(_Files(folder).walk(), MAX_FILES_MEASURED):
        with contextlib.suppress(OSError):  # deleted meanwhile
            sizes[path.relative_to(folder).parts[0]] += 0 if path.is_dir() else path.stat().st_size
    largest = ", ".join(f"{name} ({format_bytes(size)})" for name, size in sizes.most_common(MAX_PARTS_NAMED))
    return (
        f"The script's folder {folder} holds more than {format_bytes(size_limit_bytes)}; its largest parts are "
        f"{largest}. Exclude files that the script does not need (data sets, results) in {folder / IGNORE_FILE}, or "
        "start the command in a smaller folder."
    )


def bundled_files(folder: Path) -> Iterator[Path]:
    """Yields the bundled files of a folder (absolute, without links), and its empty subfolders.

    Raises:
        BadInputError: a folder or a list of exclusions cannot be read.
    """
    return _Files(folder).walk()


def is_bundled(path: Path, folder: Path) -> bool:
    """Whether a folder `path` (absolute, without links), or something in it, is part of the bundle of `folder`.

    Raises:
        BadInputError: a list of exclusions cannot be read.
    """
    folder = folder.resolve()
    return path.is_relative_to(folder) and _Files(folder).excluded_by(path, is_folder=True) is None


def check(archive: bytes, script: str) -> None:
    """Validates an untrusted archive as the executors will.

    Raises:
        BadInputError: it is too large, compressed or not, is no archive, contains paths outside of its folder, or lacks
            the script.
    """
    from executor import bundle as executor_bundle

    if len(archive) > SIZE_LIMIT_BYTES:
        raise BadInputError(f"The bundle is larger than {SIZE_LIMIT_BYTES // 2**20} MiB.")
    found = False
    try:
        with executor_bundle.open_archive(io.BytesIO(archive)) as tar:
            for member in executor_bundle.plain_members(tar):
                tarfile.data_filter(member, ".")
                found |= member.isreg() and posixpath.normpath(member.name) == posixpath.normpath(script)
    except executor_bundle.BundleError as error:
        raise BadInputError(f"The job is refused: {error}.") from error
    if not found:
        raise BadInputError(f"The bundle does not hold the script '{script}'.")


class _Files:
    """The files of a folder that are bundled.

    Args:
        folder: an absolute path without links.
    """

    def __init__(self, folder: Path, exclude: Collection[Path] = ()) -> None:
        self._folder = folder
        self._exclude = exclude
        self._specs: dict[Path, pathspec.GitIgnoreSpec] = {}

    def walk(self) -> Iterator[Path]:
        """Yields them in the order of their names, and empty folders.

        Raises:
            BadInputError: a folder or a list of exclusions cannot be read.
        """
        for parent, folders, names in os.walk(self._folder, onerror=_unreadable):
            here = Path(parent)
            folders[:] = sorted(name for name in folders if self._includes(here / name))
            files = [path for name in sorted(names) if self._includes_file(path := here / name)]
            yield from files
            if not files and not folders and here != self._folder:
                yield here

    def ignores(self, path: Path, *, is_folder: bool = False) -> Path | None:
        """The list that excludes a path itself, regardless of its folders; None if none does."""
        folder = path.parent
        while True:
            name = path.relative_to(folder).as_posix()
            if self._spec(folder).match_file(f"{name}/" if is_folder else name):
                return folder / IGNORE_FILE
            if folder == self._folder:
                return None
            folder = folder.parent

    def reason(self, path: Path) -> str:
        """Why a file is not bundled, as the end of a sentence."""
        one = self.excluded_by(path)
        if one is None:
            return "it is reached by a link"
        if ignore_file := self.ignores(one, is_folder=one != path):
            named = ignore_file if ignore_file.is_file() else "Dike's own list of exclusions"
            return f"{named} names {one.relative_to(self._folder)}"
        return f"{one} is a virtual environment"

    def excluded_by(self, path: Path, *, is_folder: bool = False) -> Path | None:
        """The path, or the folder around it, that is excluded; None if neither is."""
        for one in (path, *path.parents):
            if one == self._folder:
                break
            if self.ignores(one, is_folder=is_folder or one != path) or (one / VIRTUAL_ENVIRONMENT_FILE).is_file():
                return one
        return None

    def _includes_file(self, path: Path) -> bool:
        return not self.ignores(path) and _is_inside(path, self._folder, self._exclude)

    def _includes(self, folder: Path) -> bool:
        return not self.ignores(folder, is_folder=True) and not (folder / VIRTUAL_ENVIRONMENT_FILE).is_file()

    def _spec(self, folder: Path) -> pathspec.GitIgnoreSpec:
        if folder not in self._specs:
            path = folder / IGNORE_FILE
            try:
                lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
                always = ALWAYS_EXCLUDED if folder == self._folder else ()
                self._specs[folder] = pathspec.GitIgnoreSpec.from_lines([*always, *lines])
            except ValueError as error:
                raise BadInputError(f"{path} is not a list of patterns: {error}.") from error
            except OSError as error:
                raise BadInputError(f"{path} cannot be read: {error.strerror}.") from error
        return self._specs[folder]


def _is_inside(path: Path, folder: Path, exclude: Collection[Path]) -> bool:
    try:
        real = path.resolve(strict=True)
        return path.is_file() and real.is_relative_to(folder) and real not in exclude
    except (OSError, RuntimeError):
        # A broken or circular link.
        return False


def _unreadable(error: OSError) -> None:
    raise BadInputError(
        f"The folder {error.filename} cannot be read: {error.strerror}; exclude it in {IGNORE_FILE}."
    ) from error


class _Server(http.server.ThreadingHTTPServer):
    # All executors of a job connect simultaneously; those beyond this would retry after seconds.
    request_queue_size = 256

    def __init__(self, address: tuple[str, int], handler: type[http.server.BaseHTTPRequestHandler]) -> None:
        self._lock = threading.Lock()
        self._deadlines: dict[socket.socket, float] = {}
        super().__init__(address, handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Starts a thread for a connection, up to a limit, and sets its deadline regardless of traffic."""
        with self._lock:
            has_room = len(self._deadlines) < MAX_CONNECTIONS
            if has_room:
                self._deadlines[request] = time.monotonic() + REQUEST_TIMEOUT_S
        if has_room:
            super().process_request(request, client_address)
            return
        with contextlib.suppress(OSError):  # It is closed already.
            request.sendall(b"HTTP/1.0 503 Service Unavailable\r\nContent-Length: 0\r\n\r\n")
        super().shutdown_request(request)

    def set_deadline(self, request: socket.socket, seconds: float) -> None:
        with self._lock:
            self._deadlines[request] = time.monotonic() + seconds

    def service_actions(self) -> None:
        """Closes connections past their deadline; called twice a second."""
        now = time.monotonic()
        with self._lock:
            late = [request for request, deadline in self._deadlines.items() if deadline < now]
            for request in late:
                with contextlib.suppress(OSError):  # Closed by the other side.
                    request.shutdown(socket.SHUT_RDWR)

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._deadlines.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: object, client_address: object) -> None:
        """Only logs: an executor that disconnects reports its own end."""
        logger.info("bundle not delivered to %s", client_address, exc_info=True)


def new_token() -> str:
    return secrets.token_urlsafe(24)


class Bundles(Protocol):
    """Makes archives available to executors at secret URLs, within a context."""

    def __enter__(self) -> Bundles: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...
    def url(self, token: str) -> str: ...
    def forget(self, token: str) -> None:
        """Releases what is stored of an archive, whose job has ended."""


class BundleServer:
    """Serves archives at secret URLs until it is closed.

    Args:
        archive: token -> archive; None for an unknown token. Called on the server's threads.
        host: address to listen on; empty for all.
        port: 0 takes a free one.
        advertised_host: host name or address at which executors reach it; None for `host`.

    Raises:
        BadInputError: the port cannot be opened.
    """

    def __init__(
        self, archive: Callable[[str], bytes | None], host: str, port: int = 0, advertised_host: str | None = None
    ) -> None:
        self._archives = _Archives(archive)
        try:
            self._server = _Server((host, port), self._handler())
        except OSError as error:
            raise BadInputError(f"Scripts cannot be served at {host or '*'}:{port}: {error.strerror}.") from error
        self._host = advertised_host or host
        self._thread = threading.Thread(target=self._server.serve_forever, name="bundle server", daemon=True)

    def __enter__(self) -> BundleServer:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()

    def url(self, token: str) -> str:
        return f"http://{self._host}:{self._server.server_address[1]}{URL_PATH}{token}"

    def forget(self, token: str) -> None:
        self._archives.forget(token)

    def _handler(self) -> type[http.server.BaseHTTPRequestHandler]:
        archives = self._archives

        class Handler(http.server.BaseHTTPRequestHandler):
            server: _Server

            def do_GET(self) -> None:
                self.server.set_deadline(self.connection, QUEUE_TIMEOUT_S + TRANSFER_TIMEOUT_S)
                token = self.path.removeprefix(URL_PATH)
                with archives.borrow(token) as archive:
                    if isinstance(archive, HTTPStatus):
                        self.send_error(archive)
                        return
                    self.send_response(HTTPStatus.OK)
                    self.send_header("Content-Type", "application/gzip")
                    self.send_header("Content-Length", str(len(archive)))
                    self.end_headers()
                    self.wfile.write(archive)

            def log_message(self, format: str, *args: object) -> None:  # noqa: A002 (the base class' name)
                """Logs nothing, as the request line holds the token."""

        return Handler


class _Archives:
    """Loads and caches archives and limits their number: the executors of a job request the same one simultaneously."""

    def __init__(self, find: Callable[[str], bytes | None]) -> None:
        self._find = find
        self._free_places = threading.Semaphore(MAX_CONCURRENT_TRANSFERS)
        self._load_lock = threading.Lock()
        self._recent: dict[str, bytes] = {}

    @contextlib.contextmanager
    def borrow(self, token: str) -> Iterator[bytes | HTTPStatus]:
        """Waits for a free place; yields the archive of a token, or the HTTP status of the failure."""
        if not self._free_places.acquire(timeout=QUEUE_TIMEOUT_S):
            yield HTTPStatus.SERVICE_UNAVAILABLE
            return
        try:
            archive = self._load(token) if TOKEN.fullmatch(token) else None
            yield HTTPStatus.NOT_FOUND if archive is None else archive
        finally:
            self._free_places.release()

    def forget(self, token: str) -> None:
        with self._load_lock:
            self._recent.pop(token, None)

    def _load(self, token: str) -> bytes | None:
        with self._load_lock:
            archive = self._recent.pop(token, None) or self._find(token)
            if archive is not None:
                self._recent[token] = archive
            if len(self._recent) > MAX_CACHED_ARCHIVES:
                del self._recent[next(iter(self._recent))]
            return archive


def address_towards(host: str, port: int) -> str:
    """This machine's address as seen from `host:port`."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        # Connecting a datagram socket sends nothing; it only picks the route.
        probe.connect((host, port))
        return str(probe.getsockname()[0])
