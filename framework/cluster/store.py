"""The store of a cluster, at the head: run folders and bundles, over HTTP: `python -m framework.cluster.store`.

An entry `folders/ID` of the store is a folder, or a link to a run folder that a framework on the head has. A notice is
a small JSON object in memory that expires unless its writer renews it. Each request about folders and notices needs the
cluster's secret (HTTP basic). A commit replaces files one by one, in the order in which they
were written; a `commit.json` in the staging folder lets a restarted store complete it.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import http.server
import json
import logging
import os
import re
import shutil
import stat
import sys
import threading
import time
import zlib
from collections.abc import Callable
from http import HTTPStatus
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import unquote

from dike.plain_files import NotPlainError, open_below
from executor.mirror import (
    BLOCK_BYTES,
    CHECKSUM_BYTES,
    MARKER_FILE,
    STAGING_FOLDER,
    WRITER_FILE,
    basic_authorization,
    list_stamps,
    remove_file,
)
from framework.cluster.records import start_service
from framework.embedded.libmesos.peers import is_trusted_peer
from framework.project.bundle import SIZE_LIMIT_BYTES, TOKEN

logger = logging.getLogger(__name__)

FOLDERS, BUNDLES = "folders", "bundles"
COMMIT_FILE = "commit.json"
ID = re.compile(r"[0-9a-f]{32}")
STALE_STAGING_S = 3600.0
MAX_REQUEST_BYTES = 64 << 20
MAX_NOTICE_BYTES = 1 << 20
MAX_NOTICES = 10_000
NOTICE_TIMEOUT_S = 30.0
"""Without renewal, a notice expires after this time: its writer has crashed."""
NOTICE_NAME = re.compile(r"[A-Za-z0-9._-]{1,200}")
REQUEST_TIMEOUT_S = 120.0


class RefusedError(Exception):
    """A request that cannot be carried out."""

    def __init__(self, status: HTTPStatus, reason: str) -> None:
        super().__init__(reason)
        self.status = status


class StoredFolder:
    """A folder of the store."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def list_files(self, below: str) -> dict[str, tuple[int, int]]:
        return list_stamps(self._path / _checked(below) if below else self._path)

    def open_file(self, path: str) -> BinaryIO:
        try:
            return open_below(str(self._path), _checked(path))
        except (NotPlainError, NotADirectoryError) as error:
            raise FileNotFoundError(path) from error

    def stage(self, transaction: str, number: int, content: BinaryIO, size: int) -> None:
        """Receives the content of a file, followed by its checksum."""
        folder = self._staging(transaction)
        folder.mkdir(0o700, parents=True, exist_ok=True)
        crc = 0
        with (folder / str(number)).open("wb") as file:
            while size > 0 and (block := content.read(min(size, BLOCK_BYTES))):
                crc, size = zlib.crc32(block, crc), size - len(block)
                file.write(block)
            if size or content.read(CHECKSUM_BYTES) != crc.to_bytes(CHECKSUM_BYTES, "big"):
                raise RefusedError(HTTPStatus.BAD_REQUEST, "a file was damaged on the way to the store")
            file.flush()
            os.fsync(file.fileno())

    def commit(self, transaction: str, changes: dict[str, Any]) -> None:
        """Puts staged files into place and removes others, unless a later writer has taken over."""
        staging = self._staging(transaction)
        below = _checked(changes["below"]) if changes["below"] else ""
        target = self._path / below
        if "owner" in changes:
            self._check_writer(target, str(changes["owner"]), int(changes["number"]))
        for path, *_ in changes["files"]:
            _checked(path)
        for path in changes["removed"]:
            _checked(path)
        staging.mkdir(0o700, parents=True, exist_ok=True)
        draft = staging / f"{COMMIT_FILE}.new"
        draft.write_text(json.dumps(changes), encoding="utf-8")
        draft.replace(staging / COMMIT_FILE)
        self._complete(staging)
        self._remove_stale()

    def complete_commits(self) -> None:
        """Completes the commits that the end of the store has interrupted."""
        with contextlib.suppress(FileNotFoundError):
            for staging in (self._path / STAGING_FOLDER).iterdir():
                if (staging / COMMIT_FILE).exists():
                    self._complete(staging)

    def _complete(self, staging: Path) -> None:
        changes = json.loads((staging / COMMIT_FILE).read_text(encoding="utf-8"))
        target = self._path / changes["below"]
        for number, (path, time_ns, _) in enumerate(changes["files"]):
            source, place = staging / str(number), target / path
            with contextlib.suppress(FileNotFoundError):  # moved before the interruption
                os.utime(source, ns=(time_ns, time_ns))
                place.parent.mkdir(0o700, parents=True, exist_ok=True)
                source.replace(place)
        for path in changes["removed"]:
            remove_file(target, path)
        shutil.rmtree(staging, ignore_errors=True)
        with contextlib.suppress(OSError):  # other commits
            staging.parent.rmdir()

    def _check_writer(self, target: Path, owner: str, number: int) -> None:
        """Records the writer of a run folder, unless a later attempt or run of the same owner is recorded."""
        file = target / WRITER_FILE
        try:
            known = json.loads(file.read_text(encoding="utf-8"))
            if known["owner"] == owner and int(known["number"]) > number:
                raise RefusedError(HTTPStatus.CONFLICT, f"{owner} has a later attempt or run, {known['number']}")
            is_new = (known["owner"], known["number"]) != (owner, number)
        except (FileNotFoundError, KeyError, TypeError, ValueError):
            is_new = True
        if is_new:
            target.mkdir(0o700, parents=True, exist_ok=True)
            draft = file.with_suffix(".new")
            draft.write_text(json.dumps({"owner": owner, "number": number}), encoding="utf-8")
            draft.replace(file)

    def _remove_stale(self) -> None:
        """Removes the files of pushes that have not reached their commit."""
        with contextlib.suppress(FileNotFoundError):
            for staging in (self._path / STAGING_FOLDER).iterdir():
                if time.time() - staging.stat().st_mtime > STALE_STAGING_S:
                    shutil.rmtree(staging, ignore_errors=True)

    def _staging(self, transaction: str) -> Path:
        if not ID.fullmatch(transaction):
            raise RefusedError(HTTPStatus.BAD_REQUEST, "not a transaction")
        return self._path / STAGING_FOLDER / transaction


def _checked(path: str) -> str:
    """A relative path that stays in its folder, and is not one of the store's own files."""
    parts = str(path).split("/")
    if (
        not path
        or "\0" in path
        or any(part in ("", ".", "..", STAGING_FOLDER, MARKER_FILE, WRITER_FILE) for part in parts)
    ):
        raise RefusedError(HTTPStatus.BAD_REQUEST, "not a path of a file in the folder")
    return path


class Notices:
    """Small JSON objects by kind and name. Thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._notices: dict[tuple[str, str], tuple[float, Any]] = {}

    def put(self, kind: str, name: str, values: Any) -> None:
        if not NOTICE_NAME.fullmatch(kind) or not NOTICE_NAME.fullmatch(name):
            raise RefusedError(HTTPStatus.BAD_REQUEST, "not a name of a notice")
        with self._lock:
            self._drop_expired()
            if len(self._notices) >= MAX_NOTICES and (kind, name) not in self._notices:
                raise RefusedError(HTTPStatus.INSUFFICIENT_STORAGE, "there are too many notices")
            self._notices[kind, name] = (self._clock(), values)

    def remove(self, kind: str, name: str) -> None:
        with self._lock:
            self._notices.pop((kind, name), None)

    def of_kind(self, kind: str) -> dict[str, Any]:
        """Name -> values."""
        with self._lock:
            self._drop_expired()
            return {name: values for (one, name), (_, values) in self._notices.items() if one == kind}

    def _drop_expired(self) -> None:
        oldest_s = self._clock() - NOTICE_TIMEOUT_S
        self._notices = {key: notice for key, notice in self._notices.items() if notice[0] >= oldest_s}


class Store:
    """The entries of a store."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self.notices = Notices()
        for name in (FOLDERS, BUNDLES):
            (root / name).mkdir(0o700, parents=True, exist_ok=True)
        for entry in (root / FOLDERS).iterdir():
            if not entry.exists():
                entry.unlink()  # a link to a folder that was removed
            else:
                StoredFolder(entry.resolve()).complete_commits()

    def folder(self, identifier: str) -> StoredFolder:
        """An entry; raises FileNotFoundError if there is none."""
        return StoredFolder(self._entry(identifier).resolve(strict=True))

    def create_folder(self, identifier: str) -> None:
        self._entry(identifier).mkdir(0o700, exist_ok=True)

    def remove_folder(self, identifier: str) -> None:
        entry = self._entry(identifier)
        if entry.is_symlink():
            entry.unlink()
        else:
            shutil.rmtree(entry)

    def _entry(self, identifier: str) -> Path:
        if not ID.fullmatch(identifier):
            raise RefusedError(HTTPStatus.BAD_REQUEST, "not an id of a folder")
        return self._root / FOLDERS / identifier

    def bundle(self, token: str) -> Path:
        if not TOKEN.fullmatch(token):
            raise RefusedError(HTTPStatus.NOT_FOUND, "no such bundle")
        return self._root / BUNDLES / token


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = REQUEST_TIMEOUT_S
    server: StoreServer

    def do_GET(self) -> None:
        self._handle(self._get)

    def do_PUT(self) -> None:
        self._handle(self._put)

    def do_POST(self) -> None:
        self._handle(self._post)

    def do_DELETE(self) -> None:
        self._handle(self._delete)

    def _handle(self, work: Any) -> None:
        self.close_connection = True
        try:
            self._is_answered = False
            work([unquote(part) for part in self.path.lstrip("/").split("/")])
            if not self._is_answered:
                self._answer(b"")
        except FileNotFoundError:
            self._refuse(HTTPStatus.NOT_FOUND, "no such file")
        except RefusedError as error:
            self._refuse(error.status, str(error))
        except (KeyError, TypeError, ValueError) as error:
            self._refuse(HTTPStatus.BAD_REQUEST, repr(error))
        except (ConnectionError, TimeoutError) as error:
            logger.info("%s: %r", self.path[:200], error)
        except OSError as error:
            is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            self._refuse(HTTPStatus.INSUFFICIENT_STORAGE if is_full else HTTPStatus.INTERNAL_SERVER_ERROR, str(error))

    def _get(self, parts: list[str]) -> None:
        match parts:
            case ["bundles", token]:
                with self.server.store.bundle(token).open("rb") as file:
                    self._send_file(file, os.fstat(file.fileno()).st_size, has_checksum=False)
            case ["folders", identifier, "list", *below]:
                self._check_secret()
                found = self.server.store.folder(identifier).list_files("/".join(below).strip("/"))
                self._answer(json.dumps(found).encode())
            case ["folders", identifier, "files", *path]:
                self._check_secret()
                with self.server.store.folder(identifier).open_file("/".join(path)) as file:
                    status = os.fstat(file.fileno())
                    if not stat.S_ISREG(status.st_mode):
                        raise FileNotFoundError(path)
                    self._send_file(file, status.st_size, has_checksum=True)
            case ["notices", kind]:
                self._check_secret()
                self._answer(json.dumps(self.server.store.notices.of_kind(kind)).encode())
            case _:
                raise RefusedError(HTTPStatus.NOT_FOUND, "no such resource")

    def _put(self, parts: list[str]) -> None:
        self._check_secret()
        size = int(self.headers["Content-Length"])
        match parts:
            case ["bundles", token]:
                if size > SIZE_LIMIT_BYTES:
                    raise RefusedError(HTTPStatus.BAD_REQUEST, "the bundle is too large")
                target = self.server.store.bundle(token)
                draft = target.with_suffix(".new")
                draft.write_bytes(self.rfile.read(size))
                draft.replace(target)
            case ["folders", identifier]:
                self.server.store.create_folder(identifier)
            case ["notices", kind, name] if size <= MAX_NOTICE_BYTES:
                self.server.store.notices.put(kind, name, json.loads(self.rfile.read(size)))
            case ["folders", identifier, "staging", transaction, number]:
                folder = self.server.store.folder(identifier)
                folder.stage(transaction, int(number), self.rfile, size - CHECKSUM_BYTES)  # type: ignore[arg-type]
            case _:
                raise RefusedError(HTTPStatus.NOT_FOUND, "no such resource")

    def _post(self, parts: list[str]) -> None:
        self._check_secret()
        size = int(self.headers["Content-Length"])
        match parts:
            case ["folders", identifier, "commit", transaction] if size <= MAX_REQUEST_BYTES:
                self.server.store.folder(identifier).commit(transaction, json.loads(self.rfile.read(size)))
            case _:
                raise RefusedError(HTTPStatus.NOT_FOUND, "no such resource")

    def _delete(self, parts: list[str]) -> None:
        self._check_secret()
        match parts:
            case ["bundles", token]:
                self.server.store.bundle(token).unlink(missing_ok=True)
            case ["folders", identifier]:
                self.server.store.remove_folder(identifier)
            case ["notices", kind, name]:
                self.server.store.notices.remove(kind, name)
            case _:
                raise RefusedError(HTTPStatus.NOT_FOUND, "no such resource")

    def _check_secret(self) -> None:
        given = self.headers.get("Authorization", "")
        if not hmac.compare_digest(given.encode(), self.server.authorization):
            raise RefusedError(HTTPStatus.UNAUTHORIZED, "the cluster's secret is missing")

    def _send_file(self, file: BinaryIO, size: int, *, has_checksum: bool) -> None:
        self._start_answer(size + (CHECKSUM_BYTES if has_checksum else 0))
        crc = 0
        while size > 0:
            # A file that becomes shorter meanwhile fails the client's check.
            block = file.read(min(size, BLOCK_BYTES)) or bytes(min(size, BLOCK_BYTES))
            crc, size = zlib.crc32(block, crc), size - len(block)
            self.wfile.write(block)
        if has_checksum:
            self.wfile.write(crc.to_bytes(CHECKSUM_BYTES, "big"))

    def _answer(self, content: bytes) -> None:
        self._start_answer(len(content))
        self.wfile.write(content)

    def _start_answer(self, size: int) -> None:
        self._is_answered = True
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Length", str(size))
        self.end_headers()

    def _refuse(self, status: HTTPStatus, reason: str) -> None:
        if self._is_answered:
            return  # The client sees that the rest is missing.
        content = reason.encode()
        with contextlib.suppress(ConnectionError):
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 (the base class' name)
        """Logs nothing, as request lines hold tokens."""


class StoreServer(http.server.ThreadingHTTPServer):
    """Serves a store on a loopback address, to this account only."""

    request_queue_size = 256
    daemon_threads = True

    def __init__(self, address: tuple[str, int], store: Store, credentials: tuple[str, str]) -> None:
        self.store = store
        self.authorization = basic_authorization(credentials).encode()
        super().__init__(address, Handler)

    def verify_request(self, request: Any, client_address: Any) -> bool:
        return is_trusted_peer(request)


def main(path: str) -> None:
    folder, own = start_service(path)
    host, _, port = own.cluster.store.rpartition(":")
    StoreServer((host, int(port)), Store(folder.store), own.cluster.access.credentials).serve_forever()


if __name__ == "__main__":
    main(*sys.argv[1:])
