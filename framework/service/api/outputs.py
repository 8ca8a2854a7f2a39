"""Routes of the files that jobs' scripts have written (`executor.outputs`), and of models."""

from __future__ import annotations

import logging
import os
import re
import stat
import tarfile
import threading
from collections import Counter
from collections.abc import Iterator
from typing import Annotated, Any, BinaryIO, Literal
from urllib.parse import quote

from fastapi import APIRouter, HTTPException, Query
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.types import Receive, Scope, Send

from dike import plain_files
from dike.exceptions import BadInputError
from dike.trial import folders
from dike.trial.export import StoredModel, check_meta, pick_checkpoint
from executor import outputs
from executor.outputs import printable
from framework.scheduler.records import JobKind, JobRecord
from framework.search.records import TrialRecord
from framework.service.api.backend import Backend, OwnJob, Service
from framework.service.api.schemas import OutputFileView, OutputList
from framework.training.state import stored_checkpoint_dir

MAX_FILES = 10_000
MAX_LEFT_BEHIND = 1000
MAX_REASON_LENGTH = 500
"""Maximum characters of the reason why a file was not brought back."""
RECORD_LIMIT_BYTES = 8 * 2**20
RECORDS_LIMIT_BYTES = 64 * 2**20
"""Maximum size of a run's record, and of all records of one listing: scripts can write them."""
MAX_TRANSFERS = 16
"""Maximum number of concurrent transfers of one user's jobs: each holds descriptors, however slow its reader is."""
BLOCK_BYTES = 1 << 18
META_LIMIT_BYTES = 1 << 20
_MAX_PATH = 4096
_TRIAL = re.compile(r"trial-\d{1,9}")

logger = logging.getLogger(__name__)
router = APIRouter(tags=["jobs"])
_reading = threading.Lock()
"""Reads one record at a time: it takes many times its size in memory."""
_transfers: Counter[str] = Counter()
"""User -> running transfers; for the web server's thread only."""


class TruncatedFileError(Exception):
    """A file has become shorter while it was sent."""


class FileTransfer(StreamingResponse):
    """Sends a file or a model; closes the connection early if that fails."""

    def __init__(self, user: str, content: Iterator[bytes], media_type: str, headers: dict[str, str]) -> None:
        super().__init__(content, media_type=media_type, headers=headers)
        self._user = user

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if _transfers[self._user] >= MAX_TRANSFERS:
            reason = f"{MAX_TRANSFERS} files of {self._user} are being sent already; ask again when one has ended."
            await JSONResponse({"detail": reason}, 429)(scope, receive, send)
            return
        _transfers[self._user] += 1
        try:
            await super().__call__(scope, receive, send)
        finally:
            _transfers[self._user] -= 1
            if not _transfers[self._user]:
                del _transfers[self._user]

    async def stream_response(self, send: Send) -> None:
        try:
            await super().stream_response(send)
        except TruncatedFileError as error:
            # uvicorn closes the connection of an incomplete answer, by which the client detects it.
            logger.warning("a transfer to a client is ended: %s", error)


@router.get("/jobs/{job_id}/outputs")
def list_outputs(service: Service, record: OwnJob) -> OutputList:
    """The files that a job's script has written, brought back at its checkpoints and its end."""
    folder = checkpoint_folder(service, record)
    if folder is None:
        return OutputList(folder="", files=[], unreachable=f"Job '{record.id}' has not begun.")
    if outputs.is_remote(folder):
        reason = f"The outputs are in {folder}; the service does not read there."
        return OutputList(folder=folder, files=[], unreachable=reason)
    files: list[OutputFileView] = []
    left_behind: dict[str, str] = {}
    reached, other_owner, too_large = False, "", False
    bytes_left = RECORDS_LIMIT_BYTES
    for prefix, run_folder in _runs(service, record, folder):
        size_bytes = _record_bytes(run_folder)
        bytes_left -= size_bytes
        if bytes_left < 0 or len(files) > MAX_FILES:
            break
        if size_bytes > RECORD_LIMIT_BYTES:
            too_large = True
            continue
        known = _read_record(run_folder)
        if known is None or known.owner != _owner(record):
            other_owner = other_owner or ("" if known is None else printable(known.owner)[:MAX_REASON_LENGTH])
            continue
        reached = True
        for path, why in known.left_behind.items():
            if len(left_behind) < MAX_LEFT_BEHIND and len(path) <= _MAX_PATH:
                left_behind[printable(prefix + path)] = printable(why[:MAX_REASON_LENGTH])
        files += [
            OutputFileView(path=prefix + path, size_bytes=size, modified_s=time_ns / 1e9)
            for path, (time_ns, size) in sorted(known.kept.items())[: MAX_FILES + 1 - len(files)]
            if len(path) <= _MAX_PATH and printable(path) == path
        ]
    reason = "" if reached else f"Nothing has been brought back yet, or {folder} is not visible to the service."
    if other_owner and not reached:
        reason = f"Another job writes to {folder} now."
    if too_large and not reached:
        reason = f"The record of the outputs in {folder} is larger than {RECORD_LIMIT_BYTES >> 20} MiB; look there."
    more = len(files) > MAX_FILES or bytes_left < 0
    return OutputList(folder=folder, files=files[:MAX_FILES], more=more, left_behind=left_behind, unreachable=reason)


@router.get(
    "/jobs/{job_id}/outputs/content",
    response_class=StreamingResponse,
    responses={200: {"content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}}},
)
def get_output(
    service: Service,
    record: OwnJob,
    path: Annotated[str, Query(max_length=4096, pattern=r"^[^\x00]+$", description="As in the list.")],
) -> StreamingResponse:
    """One of those files."""
    folder = checkpoint_folder(service, record)
    run_folder, inside = folder, path
    if folder is not None and record.kind is JobKind.SEARCH:
        trial, _, inside = path.partition("/")
        run_folder = f"{folder}/{trial}" if _TRIAL.fullmatch(trial) else None
    if run_folder is None:
        raise _no_output(record, path)
    try:
        with _reading:
            file = outputs.open_output(run_folder, inside, _owner(record), RECORD_LIMIT_BYTES)
    except FileNotFoundError:
        raise _no_output(record, path) from None
    # The size is fixed here: the file may grow or shrink meanwhile.
    size = os.fstat(file.fileno()).st_size
    headers = {
        "Content-Length": str(size),
        "Content-Disposition": f"attachment; filename*=UTF-8''{quote(inside.rpartition('/')[2])}",
    }
    return FileTransfer(record.user, _blocks(file, size, path), "application/octet-stream", headers)


@router.get(
    "/jobs/{job_id}/model",
    response_class=StreamingResponse,
    responses={200: {"content": {"application/x-tar": {"schema": {"type": "string", "format": "binary"}}}}},
)
def get_model(
    service: Service,
    record: OwnJob,
    trial: Annotated[int | None, Query(ge=0, le=2**31 - 1, description="The trial's number, for a search.")] = None,
    epoch: Annotated[
        Literal["best", "last"] | None, Query(description="By default the best one that was kept.")
    ] = None,
) -> StreamingResponse:
    """The checkpoint folder of the model of a trial or training job, for `dike export`."""
    folder, best_step = checkpoint_folder(service, record), None
    if folder is not None and record.kind is JobKind.SEARCH:
        if trial is None:
            raise HTTPException(422, f"Job '{record.id}' is a search; say of which trial.")
        best_step = next((one.best_step for one in _trials(service, record) if one.number == trial), None)
        folder = f"{folder}/trial-{trial}"
    if folder is not None and outputs.is_remote(folder):
        raise HTTPException(404, f"The checkpoints are in {folder}; the service does not read there.")
    known = None if folder is None else _read_record(folder)
    names = [] if folder is None or known is None or known.owner != _owner(record) else _complete_checkpoints(folder)
    name = pick_checkpoint(names, epoch, best_step)
    if name is None:
        subject = f"Job '{record.id}'" if trial is None else f"Trial {trial} of '{record.id}'"
        kept = f"{epoch} epoch" if epoch else "model"
        raise HTTPException(404, f"{subject} has kept no {kept} that the service sees in {folder}.")
    assert folder is not None
    try:
        files = _files_in(folder, name)
    except OSError as error:
        why = str(error) if isinstance(error, plain_files.NotPlainError) else error.strerror
        raise HTTPException(409, f"The model in {folder} cannot be sent: {why}.") from error
    return FileTransfer(record.user, _tar(folder, files), "application/x-tar", {})


def kept_model(service: Backend, record: JobRecord, trial: TrialRecord) -> StoredModel | None:
    """The model of a trial that `dike export` would get; None if the service sees none."""
    parent = checkpoint_folder(service, record)
    folder = f"{parent}/trial-{trial.number}"
    if parent is None or outputs.is_remote(folder):
        return None
    try:
        known = _read_record(folder)
        name = (
            None
            if known is None or known.owner != _owner(record)
            else pick_checkpoint(_complete_checkpoints(folder), None, trial.best_step)
        )
        if name is None:
            return None
        with _reading:
            content = plain_files.read_below(f"{folder}/{name}", folders.META, META_LIMIT_BYTES)
            return StoredModel(f"{folder}/{name}", check_meta(plain_files.parse_json(content), folder))
    except (OSError, ValueError, BadInputError):
        return None  # It is being replaced, or the script has written another file there.


def _read_record(folder: str) -> outputs.OutputsRecord | None:
    with _reading:
        return outputs.read_record(folder, RECORD_LIMIT_BYTES)


def _record_bytes(folder: str) -> int:
    try:
        return os.lstat(f"{folder}/{outputs.RECORD}").st_size
    except OSError:
        return 0  # Missing; reading it reports that.


def _complete_checkpoints(folder: str) -> list[str]:
    """The complete checkpoints in a local folder, without links."""
    found = []
    for name in folders.checkpoint_names(folder):
        try:
            if stat.S_ISDIR(os.lstat(f"{folder}/{name}").st_mode):
                plain_files.open_below(f"{folder}/{name}", folders.META).close()
                found.append(name)
        except OSError:
            continue  # Incomplete, or no checkpoint.
    return found


def _files_in(folder: str, name: str) -> list[str]:
    """Relative paths of the regular files in a subfolder; raises `OSError` if they are too many, too deep or
    unreadable.
    """
    found: list[str] = []
    here = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        for count, (above, each, what) in enumerate(plain_files.walk(here, name)):
            plain_files.check_bounds(name, len(above), count)
            if stat.S_ISREG(what.st_mode):
                found.append("/".join((*above, each)))
    finally:
        os.close(here)
    return found


def _tar(folder: str, files: list[str]) -> Iterator[bytes]:
    """A tar archive of files below a folder. Follows no link out of it: the script may have made it."""
    here = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        for path in files:
            try:
                file = plain_files.open_below(here, path)
            except OSError:
                continue  # Removed meanwhile; the reader detects the incomplete checkpoint.
            info = tarfile.TarInfo(path)
            info.size = os.fstat(file.fileno()).st_size
            yield info.tobuf()
            yield from _blocks(file, info.size, path)
            yield bytes(-info.size % tarfile.BLOCKSIZE)
        yield bytes(2 * tarfile.BLOCKSIZE)
    finally:
        os.close(here)


def _blocks(file: BinaryIO, size: int, path: str) -> Iterator[bytes]:
    """Yields exactly `size` bytes of a file; raises `TruncatedFileError`."""
    with file:
        left = size
        while left:
            block = file.read(min(BLOCK_BYTES, left))
            if not block:
                raise TruncatedFileError(f"{path} has become shorter than the {size} bytes that it had")
            left -= len(block)
            yield block


def _no_output(record: JobRecord, path: str) -> HTTPException:
    return HTTPException(404, f"Job '{record.id}' has no output '{path}'.")


def checkpoint_folder(service: Backend, record: JobRecord) -> str | None:
    """A job's checkpoint folder; None before it is chosen."""
    if record.kind is JobKind.SEARCH:
        store = service.searches.opened(record.id)
        return None if store is None else store.spec.checkpoint_dir.rstrip("/")
    result: dict[str, Any] = record.result or {}
    found = record.request.get("checkpoint_dir") or stored_checkpoint_dir(record.state_data)
    return found or result.get("checkpoint_dir") or None


def _runs(service: Backend, record: JobRecord, folder: str) -> Iterator[tuple[str, str]]:
    """The path prefix of each run's outputs, and the run's folder: a search has one for each trial."""
    if record.kind is not JobKind.SEARCH:
        yield "", folder
        return
    # By the trials, not by the folder's content: scripts can create any number of folders.
    for trial in _trials(service, record):
        yield f"trial-{trial.number}/", f"{folder}/trial-{trial.number}"


def _trials(service: Backend, record: JobRecord) -> list[TrialRecord]:
    store = service.searches.opened(record.id)
    return [] if store is None else store.load_trials(readings=False)


def _owner(record: JobRecord) -> str:
    """The owner in the record of a job's outputs: users can name any folder, but get only their own jobs' files."""
    return record.id if record.kind is JobKind.SEARCH else record.folder_name
