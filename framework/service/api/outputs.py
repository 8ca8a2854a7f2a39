"""What the scripts of jobs have written below their working folders (`executor.outputs`), handed out, and models."""

from __future__ import annotations

import json
import os
import re
import tarfile
from collections.abc import Iterator
from typing import Annotated, Any, BinaryIO, Literal
from urllib.parse import quote

from fastapi import APIRouter, HTTPException, Query
from fastapi.responses import StreamingResponse

from dike.trial.export import Kept, pick
from dike.trial.folders import META
from executor import outputs
from executor.outputs import shown
from framework.scheduler.records import JobKind, JobRecord
from framework.search.records import TrialRecord
from framework.search.store import Store
from framework.service import queries
from framework.service.api.backend import Backend, OwnJob, Service
from framework.service.api.schemas import OutputFileView, OutputList
from framework.training.state import stored_checkpoint_dir

MAX_FILES = 10_000
"""How many files are listed."""
BLOCK_BYTES = 1 << 18
META_LIMIT_BYTES = 1 << 20
_TRIAL = re.compile(r"trial-\d{1,9}")

router = APIRouter(tags=["jobs"])


@router.get("/jobs/{job_id}/outputs")
def list_outputs(service: Service, record: OwnJob) -> OutputList:
    """What a job's script has written, brought back at its checkpoints and at its end."""
    folder = checkpoint_folder(service, record)
    if folder is None:
        return OutputList(folder="", files=[], unreachable=f"Job '{record.id}' has not begun.")
    if outputs.is_remote(folder):
        told = f"The outputs are in {folder}; the service does not read there."
        return OutputList(folder=folder, files=[], unreachable=told)
    files: list[OutputFileView] = []
    left: dict[str, str] = {}
    reached, other = False, ""
    for prefix, run_folder in _runs(record, folder):
        known = outputs.read_record(run_folder)
        if known is None or known.owner != _owner(record):
            other = other or ("" if known is None else known.owner)
            continue
        reached = True
        left |= {shown(prefix + path): why for path, why in known.left_behind.items()}
        files += [
            OutputFileView(path=prefix + path, size_bytes=size, modified_s=time_ns / 1e9)
            for path, (time_ns, size) in sorted(known.kept.items())[: MAX_FILES + 1 - len(files)]
            if shown(path) == path
        ]
    told = "" if reached else f"Nothing has been brought back yet, or {folder} is not to be seen from the service."
    if other and not reached:
        told = f"Another job writes to {folder} now."
    more = len(files) > MAX_FILES
    return OutputList(folder=folder, files=files[:MAX_FILES], more=more, left_behind=left, unreachable=told)


@router.get(
    "/jobs/{job_id}/outputs/content",
    response_class=StreamingResponse,
    responses={200: {"content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}}},
)
def get_output(
    service: Service,
    record: OwnJob,
    path: Annotated[str, Query(max_length=4096, pattern=r"^[^\x00]+$", description="As the list has it.")],
) -> StreamingResponse:
    """One of those files."""
    folder = checkpoint_folder(service, record)
    run_folder, inside = folder, path
    if folder is not None and record.kind is JobKind.SEARCH:
        trial, _, inside = path.partition("/")
        run_folder = f"{folder}/{trial}" if _TRIAL.fullmatch(trial) else None
    if run_folder is None:
        raise _nothing(record, path)
    try:
        file = outputs.open_output(run_folder, inside, _owner(record))
    except FileNotFoundError:
        raise _nothing(record, path) from None
    # It may grow or shrink meanwhile: what was promised is what is sent.
    size = os.fstat(file.fileno()).st_size
    headers = {
        "Content-Length": str(size),
        "Content-Disposition": f"attachment; filename*=UTF-8''{quote(inside.rpartition('/')[2])}",
    }
    return StreamingResponse(_blocks(file, size), media_type="application/octet-stream", headers=headers)


@router.get(
    "/jobs/{job_id}/model",
    response_class=StreamingResponse,
    responses={200: {"content": {"application/x-tar": {"schema": {"type": "string", "format": "binary"}}}}},
)
def get_model(
    service: Service,
    record: OwnJob,
    trial: Annotated[int | None, Query(ge=0, le=2**31 - 1, description="Of a search: the trial's number.")] = None,
    epoch: Annotated[Literal["best", "last"] | None, Query(description="Else the best one that was kept.")] = None,
) -> StreamingResponse:
    """The checkpoint folder that holds the model of a trial or of a training job, for `dike export`."""
    folder, best_step = checkpoint_folder(service, record), None
    if folder is not None and record.kind is JobKind.SEARCH:
        if trial is None:
            raise HTTPException(422, f"Job '{record.id}' is a search; say of which trial.")
        found = Store(service.store.database.url, engine=service.store.database.engine)
        found.open_search(record.id)
        best_step = next((one.best_step for one in found.load_trials(readings=False) if one.number == trial), None)
        folder = f"{folder}/trial-{trial}"
    if folder is not None and outputs.is_remote(folder):
        raise HTTPException(404, f"The checkpoints are in {folder}; the service does not read there.")
    known = None if folder is None else outputs.read_record(folder)
    names = [] if folder is None or known is None or known.owner != _owner(record) else _whole(folder)
    name = pick(names, epoch, best_step)
    if name is None:
        whose = f"Job '{record.id}'" if trial is None else f"Trial {trial} of '{record.id}'"
        kept = f"{epoch} epoch" if epoch else "model"
        raise HTTPException(404, f"{whose} has kept no {kept} that the service sees in {folder}.")
    assert folder is not None
    return StreamingResponse(_tar(folder, name), media_type="application/x-tar")


def kept_model(service: Backend, record: JobRecord, trial: TrialRecord) -> Kept | None:
    """The model of a trial that `dike export` would be handed; None where the service sees none."""
    parent = checkpoint_folder(service, record)
    folder = f"{parent}/trial-{trial.number}"
    if parent is None or outputs.is_remote(folder):
        return None
    try:
        known = outputs.read_record(folder)
        name = None if known is None or known.owner != _owner(record) else pick(_whole(folder), None, trial.best_step)
        if name is None:
            return None
        here = os.open(f"{folder}/{name}", os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            with outputs.open_plain(META, here) as file:
                return Kept(f"{folder}/{name}", dict(json.loads(file.read(META_LIMIT_BYTES))))
        finally:
            os.close(here)
    except (OSError, ValueError):
        return None  # It is being replaced, or the script has written something else there.


def _whole(folder: str) -> list[str]:
    """The complete checkpoints in a local folder; links are none."""
    with os.scandir(folder) as entries:
        found = [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
    return [name for name in found if os.path.isfile(f"{folder}/{name}/{META}")]


def _tar(folder: str, name: str) -> Iterator[bytes]:
    """A folder's plain files as a tar archive. No link is followed: the script may have made it."""
    here = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        for parent, _, names, inside in os.fwalk(name, dir_fd=here):
            for each in names:
                try:
                    file = outputs.open_plain(each, inside)
                except OSError:
                    continue  # A link, or gone meanwhile: the checkpoint is then not whole, as its reader will see.
                info = tarfile.TarInfo(f"{parent}/{each}")
                info.size = os.fstat(file.fileno()).st_size
                yield info.tobuf()
                sent = 0
                for block in _blocks(file, info.size):
                    sent += len(block)
                    yield block
                # What was promised, also of a file that has become shorter, up to a whole number of blocks.
                yield bytes(info.size - sent + -info.size % tarfile.BLOCKSIZE)
        yield bytes(2 * tarfile.BLOCKSIZE)
    finally:
        os.close(here)


def _blocks(file: BinaryIO, size: int) -> Iterator[bytes]:
    with file:
        left = size
        while left and (block := file.read(min(BLOCK_BYTES, left))):
            left -= len(block)
            yield block


def _nothing(record: JobRecord, path: str) -> HTTPException:
    return HTTPException(404, f"Job '{record.id}' has no output '{path}'.")


def checkpoint_folder(service: Backend, record: JobRecord) -> str | None:
    """A job's checkpoint folder; None while nobody has chosen one."""
    if record.kind is JobKind.SEARCH:
        with service.store.database.reading() as connection:
            if not queries.has_begun(connection, record.id):
                return None
        store = Store(service.store.database.url, engine=service.store.database.engine)
        return store.open_search(record.id).checkpoint_dir.rstrip("/")
    result: dict[str, Any] = record.result or {}
    found = record.request.get("checkpoint_dir") or stored_checkpoint_dir(record.state_data)
    return found or result.get("checkpoint_dir") or None


def _runs(record: JobRecord, folder: str) -> Iterator[tuple[str, str]]:
    """What stands before the paths of a run's outputs, and the run's folder: a search has one a trial."""
    if record.kind is not JobKind.SEARCH:
        yield "", folder
        return
    try:
        names = sorted((name for name in os.listdir(folder) if _TRIAL.fullmatch(name)), key=lambda name: int(name[6:]))
    except OSError:
        return
    for name in names:
        yield f"{name}/", f"{folder}/{name}"


def _owner(record: JobRecord) -> str:
    """Who writes a job's outputs: users can name any folder, and are handed none but their own files."""
    return record.id if record.kind is JobKind.SEARCH else record.folder_name
