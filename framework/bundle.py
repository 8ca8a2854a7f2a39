"""The script travels: its folder is packed and served over HTTP to the executors.

The archive is made once, before anything is launched. Archives are all that the server can hand out, so no request can
reach a file outside them. The URL holds a random token.
"""

from __future__ import annotations

import contextlib
import http.server
import io
import logging
import os
import posixpath
import re
import secrets
import socket
import tarfile
import threading
from collections.abc import Callable, Iterator
from http import HTTPStatus
from pathlib import Path
from types import TracebackType

import pathspec

from dike.exceptions import BadInputError
from executor import bundle as executor_bundle

logger = logging.getLogger(__name__)

SIZE_LIMIT_BYTES = 50 * 2**20
IGNORE_FILE = ".dikeignore"
PATH = "/bundle/"
TOKEN = re.compile(r"[\w-]{32}", re.ASCII)
SENT_AT_A_TIME = 16
"""How many executors are served at a time; each may hold an archive in memory."""
WAIT_S = 20.0
"""How long the others wait for their turn; then they are told to come again, before they take us for dead."""
KEPT_ARCHIVES = 2
ALWAYS_IGNORED = (".git/", ".hg/", ".svn/", ".venv/", "__pycache__/", "*.pyc", "dike-runs/", ".mypy_cache/")


def pack(script: Path, size_limit_bytes: int = SIZE_LIMIT_BYTES) -> bytes:
    """Packs the folder of a script as a gzipped tar archive.

    What `.dikeignore` in that folder names (in the form of a `.gitignore`) stays out, as do version control,
    virtual environments, caches and `dike-runs/`. Links are followed only to files inside the folder.

    Raises:
        BadInputError: if the files are larger than `size_limit_bytes` together, or one cannot be read.
    """
    folder = script.resolve().parent
    try:
        ignored = pathspec.GitIgnoreSpec.from_lines([*ALWAYS_IGNORED, *_ignore_lines(folder)])
    except ValueError as error:
        raise BadInputError(f"{folder / IGNORE_FILE} is not a list of patterns: {error}.") from error
    if ignored.match_file(script.resolve().name):
        raise BadInputError(f"{folder / IGNORE_FILE} names the script {script.name} itself; take that line out.")
    total = 0
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz", dereference=True) as archive:
        for path in _files(folder, ignored):
            name = path.relative_to(folder).as_posix()
            try:
                total += path.stat().st_size
                if total > size_limit_bytes:
                    raise BadInputError(
                        f"The script's folder {folder} holds more than {size_limit_bytes // 2**20} MiB; name what "
                        f"the script does not need (data sets, results) in {folder / IGNORE_FILE}."
                    )
                archive.add(path, name, recursive=False)
            except OSError as error:
                raise BadInputError(
                    f"{path} cannot be packed for the cluster: {error.strerror}; name it in {folder / IGNORE_FILE}."
                ) from error
    return buffer.getvalue()


def check(archive: bytes, script: str) -> None:
    """Looks through an archive that somebody has sent, as the executors will.

    Args:
        archive: what `pack` made, or somebody says so.
        script: path that has to be in it.

    Raises:
        BadInputError: if it is too large, compressed or not, is no archive, reaches out of its folder, or lacks the
            script.
    """
    if len(archive) > SIZE_LIMIT_BYTES:
        raise BadInputError(f"The bundle is larger than {SIZE_LIMIT_BYTES // 2**20} MiB.")
    found = False
    try:
        with executor_bundle.opened(io.BytesIO(archive)) as tar:
            for member in executor_bundle.plain_members(tar):
                tarfile.data_filter(member, ".")
                found |= member.isreg() and posixpath.normpath(member.name) == posixpath.normpath(script)
    except executor_bundle.BundleError as error:
        raise BadInputError(f"The job cannot be taken: {error}.") from error
    if not found:
        raise BadInputError(f"The bundle does not hold the script '{script}'.")


def _ignore_lines(folder: Path) -> list[str]:
    path = folder / IGNORE_FILE
    return path.read_text(encoding="utf-8").splitlines() if path.is_file() else []


def _files(folder: Path, ignored: pathspec.GitIgnoreSpec) -> Iterator[Path]:
    for parent, folders, names in os.walk(folder, onerror=_unreadable):
        here = Path(parent)
        folders[:] = sorted(
            name for name in folders if not ignored.match_file(f"{(here / name).relative_to(folder).as_posix()}/")
        )
        for name in sorted(names):
            path = here / name
            if not ignored.match_file(path.relative_to(folder).as_posix()) and _is_inside(path, folder):
                yield path


def _is_inside(path: Path, folder: Path) -> bool:
    try:
        return path.is_file() and path.resolve(strict=True).is_relative_to(folder)
    except (OSError, RuntimeError):
        # A link that leads nowhere, or round in a circle.
        return False


def _unreadable(error: OSError) -> None:
    raise BadInputError(
        f"The folder {error.filename} beside the script cannot be read: {error.strerror}; name it in {IGNORE_FILE}."
    ) from error


class _QuietServer(http.server.ThreadingHTTPServer):
    # A job's executors all come at once; those beyond this would try again after seconds.
    request_queue_size = 256

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
            timeout = 30

            def do_GET(self) -> None:
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
