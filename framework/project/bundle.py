"""The script travels: its folder is packed and served over HTTP to the executors.

The archive is made once, before anything is launched. Archives are all that the server can hand out, so no request can
reach a file outside them. The URL holds a random token.
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
from typing import Any

import pathspec
from backports import tarfile  # Python's own has filters since 3.11.4; Debian 12 has 3.11.2

from dike.exceptions import BadInputError
from dike.trial.pickled import FUNCTION_SUFFIX
from solver.units import format_bytes

logger = logging.getLogger(__name__)

SIZE_LIMIT_BYTES = 50 * 2**20
IGNORE_FILE = ".dikeignore"
PATH = "/bundle/"
TOKEN = re.compile(r"[\w-]{32}", re.ASCII)
SENT_AT_A_TIME = 16
"""How many executors are served at a time; each may hold an archive in memory."""
WAIT_S = 20.0
"""How long the others wait for their turn; then they are told to come again, before they take us for dead."""
CONNECTION_LIMIT = 512
HEAD_TIMEOUT_S = 30.0
SENDING_TIMEOUT_S = 600.0
"""How long a connection may take to say what it wants, and to be sent an archive."""
KEPT_ARCHIVES = 2
COMPRESSION = 3
"""Of gzip: the highest level takes four times as long, for a few percent."""
ALWAYS_IGNORED = (
    *(".git/", ".hg/", ".svn/", ".venv/", "__pycache__/", "*.pyc", "dike-runs/", "node_modules/"),
    *(".ipynb_checkpoints/", ".mypy_cache/", ".pytest_cache/", ".ruff_cache/", ".hypothesis/", ".tox/", ".nox/"),
)
VIRTUAL_ENVIRONMENT = "pyvenv.cfg"
"""A file that only a virtual environment has."""
LARGEST_PARTS = 3
"""How many parts of a folder that is too large are named."""
LOOKED_AT = 100_000
"""How many files of such a folder are looked at for that."""


def pack(
    script: Path,
    folder: Path | None = None,
    *,
    size_limit_bytes: int = SIZE_LIMIT_BYTES,
    without: Collection[Path] = (),
    besides: Mapping[str, bytes] = MappingProxyType({}),
) -> bytes:
    """Packs the folder that travels with a script as a gzipped tar archive.

    What `.dikeignore` there, or in a folder below, names (in the form of a `.gitignore`) stays out, as do version
    control, virtual environments, caches and `dike-runs/`. Links are followed only to files inside the folder.

    Args:
        script: the script.
        folder: what travels; None for the script's own folder. The script is in it.
        size_limit_bytes: of all files together, before they are compressed.
        without: real paths of files that are not even opened, as those of a database in use.
        besides: name -> content of files that are not in the folder, and come to lie in it.

    Raises:
        BadInputError: if the files are larger than that, or more than executors unpack, or one cannot be read.
    """
    # Late, here and below: who asks what travels sends nothing.
    from executor import bundle as executor_bundle

    script = script.resolve()
    folder = script.parent if folder is None else folder.resolve()
    files = _Files(folder, without)
    total, found = 0, False
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz", compresslevel=COMPRESSION, dereference=True) as archive:
        for count, path in enumerate(files.walk(), 1):
            name = path.relative_to(folder).as_posix()
            found = found or path == script
            if count > executor_bundle.MAX_MEMBERS:
                raise BadInputError(
                    f"{folder}, which travels with the script, holds more than {executor_bundle.MAX_MEMBERS} files; "
                    f"name what need not travel in {folder / IGNORE_FILE}."
                )
            try:
                total += 0 if path.is_dir() else path.stat().st_size
                if total > size_limit_bytes:
                    raise BadInputError(_too_large(folder, size_limit_bytes))
                archive.add(path, name, recursive=False)
            except OSError as error:
                why = error.strerror or str(error)
                raise BadInputError(
                    f"{path} cannot be packed for the cluster: {why}; name it in {folder / IGNORE_FILE}."
                ) from error
        if not found and script.suffix == FUNCTION_SUFFIX:
            # It lies in dike-runs, of which nothing else travels.
            archive.add(script, script.relative_to(folder).as_posix(), recursive=False)
            found = True
        for name, content in besides.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    if not found:
        raise BadInputError(
            f"The script {script} itself does not travel: {files.reason(script)}; take that out, or move the script."
        )
    return buffer.getvalue()


def _too_large(folder: Path, size_limit_bytes: int) -> str:
    sizes: Counter[str] = Counter()
    for path in itertools.islice(_Files(folder).walk(), LOOKED_AT):
        with contextlib.suppress(OSError):  # gone meanwhile
            sizes[path.relative_to(folder).parts[0]] += 0 if path.is_dir() else path.stat().st_size
    largest = ", ".join(f"{name} ({format_bytes(size)})" for name, size in sizes.most_common(LARGEST_PARTS))
    return (
        f"The folder {folder}, which travels with the script, holds more than {format_bytes(size_limit_bytes)}; its "
        f"largest parts are {largest}. Name what the script does not need (data sets, results) in "
        f"{folder / IGNORE_FILE}, or start the command in a smaller folder."
    )


def travelling(folder: Path) -> Iterator[Path]:
    """The files of a folder that travel, and the folders in it that hold nothing.

    Args:
        folder: an absolute path without links.

    Raises:
        BadInputError: if a folder cannot be read, or what is to be ignored.
    """
    return _Files(folder).walk()


def travels(path: Path, folder: Path) -> bool:
    """Whether a folder, or what is in it, travels with the folder around it.

    Args:
        path: an absolute path without links.
        folder: what travels.

    Raises:
        BadInputError: if what is to be ignored cannot be read.
    """
    folder = folder.resolve()
    return path.is_relative_to(folder) and _Files(folder).keeps_back(path, is_folder=True) is None


def check(archive: bytes, script: str) -> None:
    """Looks through an archive that somebody has sent, as the executors will.

    Args:
        archive: what `pack` made, or somebody says so.
        script: path that has to be in it.

    Raises:
        BadInputError: if it is too large, compressed or not, is no archive, reaches out of its folder, or lacks the
            script.
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
        raise BadInputError(f"The job cannot be taken: {error}.") from error
    if not found:
        raise BadInputError(f"The bundle does not hold the script '{script}'.")


class _Files:
    """The files of a folder that travel.

    Args:
        folder: an absolute path without links.
        without: see `pack`.
    """

    def __init__(self, folder: Path, without: Collection[Path] = ()) -> None:
        self._folder = folder
        self._without = without
        self._specs: dict[Path, pathspec.GitIgnoreSpec] = {}

    def walk(self) -> Iterator[Path]:
        """All of them, in the order of their names, and the folders that hold nothing.

        Raises:
            BadInputError: if a folder cannot be read, or what is to be ignored.
        """
        for parent, folders, names in os.walk(self._folder, onerror=_unreadable):
            here = Path(parent)
            folders[:] = sorted(name for name in folders if self._travels(here / name))
            files = [path for name in sorted(names) if self._is_sent(path := here / name)]
            yield from files
            if not files and not folders and here != self._folder:
                yield here

    def ignores(self, path: Path, *, is_folder: bool = False) -> Path | None:
        """The file that keeps a path from travelling, however its folders are named; None if it travels."""
        folder = path.parent
        while True:
            name = path.relative_to(folder).as_posix()
            if self._spec(folder).match_file(f"{name}/" if is_folder else name):
                return folder / IGNORE_FILE
            if folder == self._folder:
                return None
            folder = folder.parent

    def reason(self, path: Path) -> str:
        """Why a file does not travel, as the end of a sentence."""
        one = self.keeps_back(path)
        if one is None:
            return "a link leads to it"
        if ignore_file := self.ignores(one, is_folder=one != path):
            named = ignore_file if ignore_file.is_file() else "Dike's own list of what stays behind"
            return f"{named} names {one.relative_to(self._folder)}"
        return f"{one} is a virtual environment"

    def keeps_back(self, path: Path, *, is_folder: bool = False) -> Path | None:
        """The path, or the folder around it, by which it does not travel; None if there is none."""
        for one in (path, *path.parents):
            if one == self._folder:
                break
            if self.ignores(one, is_folder=is_folder or one != path) or (one / VIRTUAL_ENVIRONMENT).is_file():
                return one
        return None

    def _is_sent(self, path: Path) -> bool:
        return not self.ignores(path) and _belongs(path, self._folder, self._without)

    def _travels(self, folder: Path) -> bool:
        return not self.ignores(folder, is_folder=True) and not (folder / VIRTUAL_ENVIRONMENT).is_file()

    def _spec(self, folder: Path) -> pathspec.GitIgnoreSpec:
        if folder not in self._specs:
            path = folder / IGNORE_FILE
            try:
                lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
                always = ALWAYS_IGNORED if folder == self._folder else ()
                self._specs[folder] = pathspec.GitIgnoreSpec.from_lines([*always, *lines])
            except ValueError as error:
                raise BadInputError(f"{path} is not a list of patterns: {error}.") from error
            except OSError as error:
                raise BadInputError(f"{path} cannot be read: {error.strerror}.") from error
        return self._specs[folder]


def _belongs(path: Path, folder: Path, without: Collection[Path]) -> bool:
    try:
        real = path.resolve(strict=True)
        return path.is_file() and real.is_relative_to(folder) and real not in without
    except (OSError, RuntimeError):
        # A link that leads nowhere, or round in a circle.
        return False


def _unreadable(error: OSError) -> None:
    raise BadInputError(
        f"The folder {error.filename} cannot be read: {error.strerror}; name it in {IGNORE_FILE}."
    ) from error


class _QuietServer(http.server.ThreadingHTTPServer):
    # A job's executors all come at once; those beyond this would try again after seconds.
    request_queue_size = 256

    def __init__(self, address: tuple[str, int], handler: type[http.server.BaseHTTPRequestHandler]) -> None:
        self._lock = threading.Lock()
        self._deadlines: dict[socket.socket, float] = {}
        super().__init__(address, handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Begins a thread, if there are not too many; each connection has its time, whatever it sends meanwhile."""
        with self._lock:
            has_room = len(self._deadlines) < CONNECTION_LIMIT
            if has_room:
                self._deadlines[request] = time.monotonic() + HEAD_TIMEOUT_S
        if has_room:
            super().process_request(request, client_address)
            return
        with contextlib.suppress(OSError):  # It has gone already.
            request.sendall(b"HTTP/1.0 503 Service Unavailable\r\nContent-Length: 0\r\n\r\n")
        super().shutdown_request(request)

    def may_take(self, request: socket.socket, seconds: float) -> None:
        """Gives a connection so much time from now on."""
        with self._lock:
            self._deadlines[request] = time.monotonic() + seconds

    def service_actions(self) -> None:
        """Ends connections whose time is over; called twice a second."""
        now = time.monotonic()
        with self._lock:
            late = [request for request, deadline in self._deadlines.items() if deadline < now]
            for request in late:
                with contextlib.suppress(OSError):  # The other side has.
                    request.shutdown(socket.SHUT_RDWR)

    def shutdown_request(self, request: Any) -> None:
        """Forgets a connection and closes it."""
        with self._lock:
            self._deadlines.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: object, client_address: object) -> None:
        """An executor that went away while it was fetching reports its own end."""
        logger.info("bundle not delivered to %s", client_address, exc_info=True)


def new_token() -> str:
    """A secret that names an archive."""
    return secrets.token_urlsafe(24)


class BundleServer:
    """Serves archives at secret URLs until it is closed.

    Args:
        archive: token -> what `pack` made; None for a token that names nothing. Called on the server's threads.
        host: address to listen on; empty for all.
        port: 0 takes a free one.
        known_as: by which host name or address executors reach it; None for `host`.

    Raises:
        BadInputError: if that port cannot be listened on.
    """

    def __init__(
        self, archive: Callable[[str], bytes | None], host: str, port: int = 0, known_as: str | None = None
    ) -> None:
        self._archives = _Archives(archive)
        try:
            self._server = _QuietServer((host, port), self._handler())
        except OSError as error:
            raise BadInputError(f"Scripts cannot be served at {host or '*'}:{port}: {error.strerror}.") from error
        self._host = known_as or host
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
        """Where the archive of a token is."""
        return f"http://{self._host}:{self._server.server_address[1]}{PATH}{token}"

    def _handler(self) -> type[http.server.BaseHTTPRequestHandler]:
        archives = self._archives

        class Handler(http.server.BaseHTTPRequestHandler):
            server: _QuietServer

            def do_GET(self) -> None:
                self.server.may_take(self.connection, WAIT_S + SENDING_TIMEOUT_S)
                token = self.path.removeprefix(PATH)
                with archives.lent(token) as archive:
                    if isinstance(archive, HTTPStatus):
                        self.send_error(archive)
                        return
                    self.send_response(HTTPStatus.OK)
                    self.send_header("Content-Type", "application/gzip")
                    self.send_header("Content-Length", str(len(archive)))
                    self.end_headers()
                    self.wfile.write(archive)

            def log_message(self, format: str, *args: object) -> None:  # noqa: A002 (the base class' name)
                """The request line holds the token: nothing is logged."""

        return Handler


class _Archives:
    """Finds archives, some of them at a time; the executors of a job ask for the same one at the same moment."""

    def __init__(self, find: Callable[[str], bytes | None]) -> None:
        self._find = find
        self._places = threading.Semaphore(SENT_AT_A_TIME)
        self._finding = threading.Lock()
        self._recent: dict[str, bytes] = {}

    @contextlib.contextmanager
    def lent(self, token: str) -> Iterator[bytes | HTTPStatus]:
        """The archive of a token, when its turn has come, or why it cannot be had."""
        if not self._places.acquire(timeout=WAIT_S):
            yield HTTPStatus.SERVICE_UNAVAILABLE
            return
        try:
            archive = self._one(token) if TOKEN.fullmatch(token) else None
            yield HTTPStatus.NOT_FOUND if archive is None else archive
        finally:
            self._places.release()

    def _one(self, token: str) -> bytes | None:
        with self._finding:
            archive = self._recent.pop(token, None) or self._find(token)
            if archive is not None:
                self._recent[token] = archive
            if len(self._recent) > KEPT_ARCHIVES:
                del self._recent[next(iter(self._recent))]
            return archive


def address_towards(host: str, port: int) -> str:
    """Our address as a machine at `host:port` sees it."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        # Connecting a datagram socket sends nothing; it only picks the route.
        probe.connect((host, port))
        return str(probe.getsockname()[0])
