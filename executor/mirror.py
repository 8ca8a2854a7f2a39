"""Copies of run folders on machines that do not see the folder itself: `RunFolder`, `Mirror`, `StoreClient`.

On a cluster of several machines, checkpoints and outputs of a run are in a folder at the head, its *store*. An agent
that sees that folder uses it. Any other works in a mirror on its own disk: pulled before the run starts, pushed after
each checkpoint and at the end. Only files that have changed travel. A push takes effect completely or not at all, and
the framework learns of a checkpoint only after it.
"""

from __future__ import annotations

import base64
import contextlib
import errno
import hashlib
import http.client
import json
import logging
import os
import re
import secrets
import shutil
import stat
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any, BinaryIO, TypeVar
from urllib.parse import quote

from dike.checkpoints import SHOWN_FOLDER_VARIABLE

logger = logging.getLogger(__name__)

STORE_VARIABLE = "DIKE_STORE"
"""Variable of executors on a cluster: `host:port` of its store."""
CREDENTIALS_VARIABLE = "DIKE_STORE_CREDENTIALS"
"""Variable of executors on a cluster: file with the credentials of its daemons, in Mesos' form."""
MARKER_FILE = ".dike-store"
"""File in a folder of a store with its id: an agent that finds it there sees the folder itself."""
STAGING_FOLDER = ".dike-staging"
WRITER_FILE = ".dike-writer.json"
"""File in a run folder of a store: its last writer."""
CHECKSUM_BYTES = 4
BLOCK_BYTES = 1 << 20
TIMEOUT_S = 60.0
RETRY_INTERVAL_S = 1.0
PATIENCE_S = 300.0
"""Maximum time of retries while the store cannot be reached: the head may be restarted."""
KILLED_PATIENCE_S = 10.0
_UNFINISHED = re.compile(r"\.dike-|.*\.tempstate\d+|\..*\.(dike|\d+)$")
"""Names of files that are being written."""
Stamp = tuple[int, int]
"""Modification time (ns) and size (bytes) of a file."""
T = TypeVar("T")


class StoreError(OSError):
    """The store refused a request, or cannot be reached."""


@dataclass(frozen=True)
class RunFolder:
    """A folder in the store of a cluster.

    Attributes:
        id: of the entry in the store.
        path: the framework's path of the entry; run folders are at or below it.
    """

    id: str
    path: str

    @classmethod
    def read(cls, values: Any) -> RunFolder | None:
        """Reads what `dataclasses.asdict` has made; None stays None."""
        return None if values is None else cls(str(values["id"]), str(values["path"]))

    def is_visible(self) -> bool:
        """Whether this machine sees the folder itself."""
        try:
            return Path(self.path, MARKER_FILE).read_text(encoding="ascii").strip() == self.id
        except (OSError, UnicodeDecodeError):
            return False

    def containing(self, path: str) -> RunFolder | None:
        """This folder if a run folder is in it, else None: agents have to reach that run folder by themselves."""
        return self if _moved(path, self.path.rstrip("/"), "") != path else None

    def below(self, path: str) -> str:
        """Relative path of a run folder in the entry; empty for the entry itself."""
        relative = os.path.relpath(path, self.path)
        return "" if relative == "." else relative


@dataclass(frozen=True)
class Writer:
    """The writer of a run folder: a job and its attempt, or a search and the run of a trial.

    The store refuses the writes of an earlier attempt or run of the same owner.
    """

    owner: str
    number: int


def basic_authorization(credentials: tuple[str, str]) -> str:
    """Value of the header `Authorization` for HTTP basic authentication."""
    return f"Basic {base64.b64encode(':'.join(credentials).encode()).decode()}"


class StoreClient:
    """Requests to the store of a cluster. Each raises `StoreError`."""

    def __init__(self, address: str, credentials: tuple[str, str]) -> None:
        self._address = address
        self._authorization = basic_authorization(credentials)

    @classmethod
    def of_executor(cls, environment: Mapping[str, str] = os.environ) -> StoreClient | None:
        """The store of this executor's cluster; None if it has none."""
        address = environment.get(STORE_VARIABLE)
        if not address:
            return None
        known = json.loads(Path(environment[CREDENTIALS_VARIABLE]).read_text(encoding="ascii"))["credentials"][0]
        return cls(address, (known["principal"], known["secret"]))

    def list_files(self, folder: str, below: str) -> dict[str, Stamp]:
        """Path -> stamp of the files below a run folder."""
        with self._request("GET", f"/folders/{folder}/list/{quote(below)}") as response:
            values = json.loads(response.read())
        return {str(path): (int(time_ns), int(size)) for path, (time_ns, size) in values.items()}

    def fetch(self, folder: str, path: str, target: BinaryIO) -> None:
        """Copies a file of the store to a file; raises FileNotFoundError if there is none."""
        with self._request("GET", f"/folders/{folder}/files/{quote(path)}") as response:
            crc, size = 0, int(response.getheader("Content-Length", "0")) - CHECKSUM_BYTES
            buffer = memoryview(bytearray(BLOCK_BYTES))
            while size > 0 and (count := response.readinto(buffer[: min(size, BLOCK_BYTES)])):
                block = buffer[:count]
                crc, size = zlib.crc32(block, crc), size - count
                target.write(block)
            if response.read(CHECKSUM_BYTES) != crc.to_bytes(CHECKSUM_BYTES, "big"):
                raise StoreError(f"{path} was damaged on the way from the store")

    def stage(self, folder: str, transaction: str, number: int, source: BinaryIO, size: int) -> None:
        """Sends the content of a file, which a commit then puts into place."""
        crc = 0

        def blocks() -> Iterator[bytes]:
            nonlocal crc
            left = size
            while left > 0 and (block := source.read(min(left, BLOCK_BYTES))):
                crc, left = zlib.crc32(block, crc), left - len(block)
                yield block
            # A file that has become shorter is not committed.
            yield bytes(left)
            yield crc.to_bytes(CHECKSUM_BYTES, "big")

        path = f"/folders/{folder}/staging/{transaction}/{number}"
        with self._request("PUT", path, blocks(), {"Content-Length": str(size + CHECKSUM_BYTES)}):
            pass

    def commit(self, folder: str, transaction: str, changes: Mapping[str, Any]) -> None:
        """Puts staged files into place, then removes files; `changes` as `Mirror.push` makes them."""
        with self._request("POST", f"/folders/{folder}/commit/{transaction}", json.dumps(changes).encode()):
            pass

    def create_folder(self, folder: str) -> None:
        with self._request("PUT", f"/folders/{folder}", b""):
            pass

    def remove_folder(self, folder: str) -> None:
        with self._request("DELETE", f"/folders/{folder}"):
            pass

    def put_bundle(self, token: str, archive: bytes) -> None:
        with self._request("PUT", f"/bundles/{token}", archive):
            pass

    def remove_bundle(self, token: str) -> None:
        with self._request("DELETE", f"/bundles/{token}"):
            pass

    def put_notice(self, kind: str, name: str, values: Any) -> None:
        """Stores a small JSON object, which expires unless it is renewed (`framework.cluster.store.Notices`)."""
        with self._request("PUT", f"/notices/{kind}/{name}", json.dumps(values).encode()):
            pass

    def remove_notice(self, kind: str, name: str) -> None:
        with self._request("DELETE", f"/notices/{kind}/{name}"):
            pass

    def notices(self, kind: str) -> dict[str, Any]:
        """Name -> values of the notices of a kind."""
        with self._request("GET", f"/notices/{kind}") as response:
            values = json.loads(response.read())
        return dict(values)

    @contextlib.contextmanager
    def _request(
        self,
        method: str,
        path: str,
        body: bytes | Iterator[bytes] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Iterator[http.client.HTTPResponse]:
        connection = http.client.HTTPConnection(self._address, timeout=TIMEOUT_S)
        try:
            with contextlib.closing(connection):
                connection.request(method, path, body, {"Authorization": self._authorization, **(headers or {})})
                response = connection.getresponse()
                if response.status == HTTPStatus.NOT_FOUND:
                    raise FileNotFoundError(path)
                if response.status != HTTPStatus.OK:
                    reason = response.read(1000).decode(errors="replace").strip()
                    error = StoreError(f"the store refused {method} {path}: {response.status} {reason}")
                    error.errno = _ERRORS.get(HTTPStatus(response.status))
                    raise error
                yield response
        except http.client.HTTPException as error:
            raise _UnreachableError(f"the store does not answer: {error!r}") from error
        except (ConnectionError, TimeoutError) as error:
            raise _UnreachableError(f"the store does not answer: {error}") from error


class _UnreachableError(StoreError):
    """A retry may help."""


_ERRORS = {HTTPStatus.INSUFFICIENT_STORAGE: errno.ENOSPC}
"""HTTP status -> errno."""


class Mirror:
    """A copy of a run folder, on this machine's disk. Thread-safe.

    Args:
        store: where the folder is.
        folder: its entry in the store.
        remote: the framework's path of the run folder.
        local: the copy.

    Attributes:
        local: the copy.
    """

    def __init__(self, store: StoreClient, folder: RunFolder, remote: str, local: Path) -> None:
        self.local = local
        self._store = store
        self._folder = folder
        self._remote = remote.rstrip("/")
        self._below = folder.below(remote)
        self._known: dict[str, Stamp] = {}
        self._lock = threading.Lock()

    @classmethod
    def of(cls, folder: RunFolder | None, remote: str, sandbox: Path, reader: str = "") -> Mirror | None:
        """The mirror of a run folder in the sandbox of its task; None if the task uses the folder itself.

        `reader` names a task that only reads the folder, for a mirror of its own.
        """
        store = None if folder is None else StoreClient.of_executor()
        if folder is None or store is None or folder.is_visible():
            return None
        name = hashlib.sha256(f"{folder.id} {remote} {reader}".encode()).hexdigest()[:32]
        return cls(store, folder, remote, sandbox / "mirrors" / name)

    def to_local(self, path: str) -> str:
        """Converts a path in the run folder to one in the copy; other paths are unchanged."""
        return _moved(path, self._remote, str(self.local))

    @property
    def environment(self) -> dict[str, str]:
        """Variables of processes that work in the copy."""
        return {SHOWN_FOLDER_VARIABLE: f"{self.local}{os.pathsep}{self._remote}"}

    def to_remote(self, path: str) -> str:
        """The reverse of `to_local`."""
        return _moved(path, str(self.local), self._remote)

    def pull(self, patience_s: float = PATIENCE_S) -> None:
        """Makes the copy equal to the folder.

        Raises:
            StoreError: the store cannot be reached.
        """
        with self._lock:
            self.local.mkdir(0o700, parents=True, exist_ok=True)
            found = _retrying(lambda: self._store.list_files(self._folder.id, self._below), patience_s)
            for path in set(list_stamps(self.local)) - set(found):
                with contextlib.suppress(OSError):
                    remove_file(self.local, path)
            self._fetch(found, patience_s)

    def pull_new(self, patience_s: float = 0.0) -> None:
        """Copies what has changed in the folder since the last pull; other local files stay.

        Raises:
            StoreError: the store cannot be reached.
        """
        with self._lock:
            found = _retrying(lambda: self._store.list_files(self._folder.id, self._below), patience_s)
            for path in set(self._known) - set(found):
                with contextlib.suppress(OSError):
                    remove_file(self.local, path)
            self._fetch(found, patience_s)

    def _fetch(self, found: Mapping[str, Stamp], patience_s: float) -> None:
        local = list_stamps(self.local)
        for path in sorted(found, key=lambda one: found[one]):
            if local.get(path) == found[path]:
                continue
            with contextlib.suppress(FileNotFoundError):  # removed meanwhile
                _retrying(lambda path=path: self._fetch_file(path, found[path]), patience_s)  # type: ignore[misc]
        self._known = {path: stamp for path, stamp in list_stamps(self.local).items() if found.get(path) == stamp}

    def _fetch_file(self, path: str, stamp: Stamp) -> None:
        target = self.local / path
        target.parent.mkdir(0o700, parents=True, exist_ok=True)
        draft = target.with_name(f".dike-{secrets.token_hex(8)}")
        try:
            with draft.open("wb") as file:
                self._store.fetch(self._folder.id, _join(self._below, path), file)
            os.utime(draft, ns=(stamp[0], stamp[0]))
            draft.replace(target)
        finally:
            draft.unlink(missing_ok=True)

    def push(self, writer: Writer, patience_s: float = PATIENCE_S) -> None:
        """Copies what has changed here since the last pull or push to the folder, completely or not at all.

        Raises:
            StoreError: the store cannot be reached, is full, or a later attempt has taken over the folder.
        """
        with self._lock:
            _retrying(lambda: self._push(writer), patience_s)

    def push_files(self, paths: Sequence[str]) -> None:
        """Copies files that no other process writes; the folder may have another writer. Raises as `push`."""
        found = {path: stamp for path in paths if (stamp := _stamp_of(self.local / path)) is not None}
        with self._lock:
            _retrying(lambda: self._commit(found, list(found), [], {}), KILLED_PATIENCE_S)

    def remove(self) -> None:
        """Removes the copy."""
        shutil.rmtree(self.local, ignore_errors=True)

    def _push(self, writer: Writer) -> None:
        found = {path: stamp for path, stamp in list_stamps(self.local).items() if not _UNFINISHED.match(_name(path))}
        # In the order in which they were written: what makes a checkpoint complete is last.
        changed = sorted((path for path in found if self._known.get(path) != found[path]), key=lambda path: found[path])
        removed = sorted(set(self._known) - set(found))
        if changed or removed:
            self._commit(found, changed, removed, {"owner": writer.owner, "number": writer.number})

    def _commit(
        self, found: Mapping[str, Stamp], changed: Sequence[str], removed: Sequence[str], writer: Mapping[str, Any]
    ) -> None:
        transaction = secrets.token_hex(16)
        staged: list[str] = []
        for path in changed:
            try:
                with open(self.local / path, "rb") as file:
                    self._store.stage(self._folder.id, transaction, len(staged), file, found[path][1])
                if _stamp_of(self.local / path) == found[path]:
                    staged.append(path)
            except FileNotFoundError:
                continue  # removed meanwhile
        changes = {
            **writer,
            "below": self._below,
            "files": [[path, *found[path]] for path in staged],
            "removed": list(removed),
        }
        self._store.commit(self._folder.id, transaction, changes)
        self._known = {path: stamp for path, stamp in self._known.items() if path not in removed}
        self._known.update((path, found[path]) for path in staged)


def list_stamps(folder: Path) -> dict[str, Stamp]:
    """Relative path -> stamp of the regular files below a folder, without those of the store itself."""
    found: dict[str, Stamp] = {}
    for parent, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name != STAGING_FOLDER]
        for name in names:
            path = Path(parent, name)
            if name not in (MARKER_FILE, WRITER_FILE) and (stamp := _stamp_of(path)) is not None:
                found[path.relative_to(folder).as_posix()] = stamp
    return found


def _stamp_of(path: Path) -> Stamp | None:
    """None if it is no regular file."""
    try:
        status = path.lstat()
    except OSError:
        return None
    return (status.st_mtime_ns, status.st_size) if stat.S_ISREG(status.st_mode) else None


def _retrying(work: Callable[[], T], patience_s: float) -> T:
    deadline_s = time.monotonic() + patience_s
    while True:
        try:
            return work()
        except _UnreachableError as error:
            if time.monotonic() >= deadline_s:
                raise
            logger.warning("%s; retrying", error)
            time.sleep(RETRY_INTERVAL_S)


def remove_file(folder: Path, path: str) -> None:
    """Removes a file, and the folders above it that are then empty."""
    (folder / path).unlink(missing_ok=True)
    for parent in Path(path).parents:
        with contextlib.suppress(OSError):  # not empty
            if parent != Path():
                (folder / parent).rmdir()


def _moved(path: str, source: str, target: str) -> str:
    return f"{target}{path[len(source) :]}" if path == source or path.startswith(f"{source}/") else path


def _join(below: str, path: str) -> str:
    return f"{below}/{path}" if below else path


def _name(path: str) -> str:
    return path.rpartition("/")[2]
