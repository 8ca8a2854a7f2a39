"""What a framework on a cluster shares with its executors by the store: bundles and run folders."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType

from dike.checkpoints import make_private
from dike.exceptions import BadInputError, JobFailedError
from executor.mirror import MARKER_FILE, WRITER_FILE, Mirror, RunFolder, StoreClient, StoreError, Writer
from framework.cluster.machine import ClusterMachine

logger = logging.getLogger(__name__)

PULL_INTERVAL_S = 5.0
FINAL_PULL_PATIENCE_S = 60.0
UPLOAD_PATIENCE_S = 20.0


class StoreBundles:
    """Bundles of a framework, in the store; has the interface of `framework.project.bundle.BundleServer`.

    Args:
        archive: token -> archive; None for an unknown token.
        store: the cluster's store.
        address: `host:port` of the store for executors.
    """

    def __init__(self, archive: Callable[[str], bytes | None], store: StoreClient, address: str) -> None:
        self._archive = archive
        self._store = store
        self._address = address
        self._uploaded: set[str] = set()

    def __enter__(self) -> StoreBundles:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for token in list(self._uploaded):
            self.forget(token)

    def forget(self, token: str) -> None:
        self._uploaded.discard(token)
        try:
            self._store.remove_bundle(token)
        except OSError as error:
            logger.warning("a bundle stays in the store: %s", error)

    def url(self, token: str) -> str:
        """URL of a bundle, which is uploaded first.

        Raises:
            BadInputError: the store does not take it.
        """
        archive = self._archive(token) if token not in self._uploaded else None
        if archive is not None:
            try:
                self._store.put_bundle(token, archive)
            except OSError as error:
                raise BadInputError(f"The script cannot be sent to the cluster: {error}.") from error
            self._uploaded.add(token)
        return f"http://{self._address}/bundles/{token}"


@contextlib.contextmanager
def shared_folder(machine: ClusterMachine, path: str, *, outlives: bool) -> Iterator[RunFolder | None]:
    """Makes a folder of this machine available to executors on all machines, within the context.

    On the head, the store has a link to the folder. On a member, the store has a copy, from which this folder is
    updated every few seconds and at the end.

    Args:
        machine: this machine's part of the cluster.
        path: absolute path of the folder; a URL such as `gs://bucket/x` is reached by all machines anyway.
        outlives: whether tasks may outlive the framework, so that the folder stays available after the context.

    Raises:
        JobFailedError: at the end, if this folder cannot be updated.
    """
    if "://" in path:
        yield None
        return
    make_private(path)
    identifier = hashlib.sha256(f"{machine.cluster.secret} {machine.membership.name} {path}".encode()).hexdigest()[:32]
    folder = RunFolder(identifier, path)
    if machine.is_head:
        entry = machine.folder.store / "folders" / identifier
        _link(entry, path)
        Path(path, MARKER_FILE).write_text(f"{identifier}\n", encoding="ascii")
        try:
            yield folder
        finally:
            if not outlives:
                for file in (entry, Path(path, MARKER_FILE), Path(path, WRITER_FILE)):
                    file.unlink(missing_ok=True)
        return
    store = store_client(machine)
    mirror = Mirror(store, folder, path, Path(path))
    store.create_folder(identifier)
    mirror.pull_new(UPLOAD_PATIENCE_S)
    mirror.push(Writer(f"framework {os.getpid()}", 0), UPLOAD_PATIENCE_S)
    ended = threading.Event()
    puller = threading.Thread(target=_pull_until, args=(mirror, ended), name="run folder", daemon=True)
    puller.start()
    try:
        yield folder
    finally:
        ended.set()
        puller.join()
        try:
            mirror.pull_new(FINAL_PULL_PATIENCE_S)
        except StoreError as error:
            raise JobFailedError(
                f"The results are in the cluster's store, but could not be copied to {path}: {error}."
            ) from error
        if not outlives:
            store.remove_folder(identifier)


def store_client(machine: ClusterMachine) -> StoreClient:
    return StoreClient(machine.cluster.store, machine.access.credentials)


def _pull_until(mirror: Mirror, ended: threading.Event) -> None:
    while not ended.wait(PULL_INTERVAL_S):
        try:
            mirror.pull_new()
        except OSError as error:
            logger.warning("%s is not up to date: %s", mirror.local, error)


def _link(place: Path, target: str) -> None:
    place.parent.mkdir(0o700, parents=True, exist_ok=True)
    draft = place.with_name(f"{place.name}.new")
    draft.unlink(missing_ok=True)
    draft.symlink_to(target)
    draft.replace(place)
