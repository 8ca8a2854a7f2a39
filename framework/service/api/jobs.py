"""Routes of jobs: submit, list, inspect, resume, kill."""

from __future__ import annotations

import dataclasses
import itertools
import math
import time
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from fastapi import APIRouter, HTTPException, Query, Request, Response
from fastapi.concurrency import run_in_threadpool
from fastapi.exceptions import RequestValidationError
from pydantic import TypeAdapter, ValidationError
from pydantic_core import from_json
from starlette.datastructures import UploadFile

from framework.mesos.offers import NO_OFFER
from framework.scheduler.records import JobKind, JobRecord, JobState
from framework.scheduler.snapshot import JobFacts, Snapshot
from framework.scheduler.task_options import MAX_NAME
from framework.service import queries
from framework.service.api.backend import Backend, Job, OwnJob, Service, SignedIn, find_job, may_manage
from framework.service.api.outputs import checkpoint_folder
from framework.service.api.schemas import (
    EventList,
    EventView,
    JobDetails,
    JobList,
    JobView,
    PlanView,
    ProgressList,
    ProgressView,
    Submitted,
    TaskList,
)
from framework.service.explain import explain, reason_never_fits
from framework.service.explanation import Explanation
from framework.service.requests import (
    Resumption,
    SearchJobRequest,
    TrainingRequest,
    read_request,
    stored_request,
)
from framework.service.users import User

REQUEST_LIMIT_BYTES = 4 * 2**20
MAX_NUMBER = 2**63 - 1

_ORDER = (
    "newest: newest first. queue: running jobs, newest first, then queued ones in service order, then those that have "
    "ended, newest first."
)

_HIDDEN_FOLDER = "(its checkpoint folder)"

router = APIRouter(tags=["jobs"])

Number = Annotated[int, Query(ge=0, le=MAX_NUMBER)]
Limit = Annotated[int, Query(ge=1, le=1000, description="Answer with at most this many.")]

_ARCHIVE: dict[int | str, dict[str, Any]] = {
    200: {"content": {"application/gzip": {"schema": {"type": "string", "format": "binary"}}}}
}
_MULTIPART = {
    "requestBody": {
        "required": True,
        "content": {
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "required": ["request", "bundle"],
                    "properties": {
                        "request": {
                            "type": "string",
                            "description": "JSON: a JobRequest.",
                            "contentMediaType": "application/json",
                            "contentSchema": {"$ref": "#/components/schemas/JobRequest"},
                        },
                        "bundle": {"type": "string", "format": "binary", "description": "The script's folder, tar.gz."},
                    },
                }
            }
        },
    }
}
_RESUMPTION = {"requestBody": {"content": {"application/json": {"schema": Resumption.model_json_schema()}}}}


@router.post("/jobs", status_code=201, openapi_extra=_MULTIPART)
async def submit_job(request: Request, service: Service, user: SignedIn) -> Submitted:
    """Accepts a job; it is durable when the answer arrives."""
    # Read here and not by a parameter, which FastAPI would read before it checks the token.
    async with (
        request.form(max_files=2, max_fields=2, max_part_size=REQUEST_LIMIT_BYTES) as form,
        service.submission_lock(user),
    ):
        text, bundle = [await _part(form.get(name), name) for name in ("request", "bundle")]
        if len(text) > REQUEST_LIMIT_BYTES:
            raise HTTPException(413, f"The request is larger than {REQUEST_LIMIT_BYTES // 2**20} MiB.")
        if not bundle.startswith(b"\x1f\x8b"):
            raise HTTPException(422, "The bundle is not a gzipped tar archive.")
        try:
            values = from_json(text, allow_inf_nan=False)
        except ValueError as error:
            raise HTTPException(422, f"The request is not JSON: {error}.") from None
        return await run_in_threadpool(_submit, service, user, values, bundle)


@router.get("/jobs")
def list_jobs(
    service: Service,
    signed_in: SignedIn,
    user: Annotated[str | None, Query(max_length=200, pattern=r"^[^\x00]*$")] = None,
    state: Annotated[list[JobState] | None, Query(max_length=len(JobState))] = None,
    limit: Limit = 100,
    before: Annotated[str | None, Query(max_length=300, pattern=r"^[^\x00]*$")] = None,
    order: Annotated[Literal["newest", "queue"], Query(description=_ORDER)] = "newest",
) -> JobList:
    """Jobs, newest first, or running jobs, then the queue, then those that have ended."""
    last = None if before is None else find_job(service, before)
    if order == "newest":
        records = service.store.jobs(user=user, states=state, limit=limit + 1, before=before, brief=True)
    else:
        records = _by_queue(service, user, state or list(JobState), limit + 1, last)
    more = len(records) > limit
    views = [JobView(**values) for values in view_values(service, signed_in, records[:limit])]
    with service.store.database.reading() as connection:
        counts = queries.state_counts(connection, user)
    return JobList(jobs=views, before=views[-1].id if more else None, counts=counts)


@router.get("/jobs/{job_id}")
def get_job(service: Service, user: SignedIn, record: Job) -> JobDetails:
    """One job."""
    [values] = view_values(service, user, [record])
    hidden = {} if may_manage(record, user) else {"request": None, "result": None}
    return JobDetails(**{**values, "request": record.request, "result": record.result, **hidden})


@router.post("/jobs/{job_id}/kill", status_code=202)
def kill_job(service: Service, user: SignedIn, record: OwnJob) -> JobView:
    """Requests a job's end; no-op for one that has ended."""
    service.submissions.kill(record, user.name)
    [values] = view_values(service, user, [find_job(service, record.id)])
    return JobView(**values)


@router.post("/jobs/{job_id}/release", status_code=202)
def release_job(service: Service, user: SignedIn, record: OwnJob) -> JobView:
    """Lets a held job start."""
    service.submissions.release(record)
    [values] = view_values(service, user, [find_job(service, record.id)])
    return JobView(**values)


@router.post("/jobs/{job_id}/again", status_code=201)
def resubmit_job(service: Service, user: SignedIn, record: OwnJob) -> Submitted:
    """Submits a job's request and bundle again, as a new job; a named job gets a new name."""
    return _submit(service, user, _renamed(service, record.request), _bundle(service, record))


@router.post("/jobs/{job_id}/resume", openapi_extra=_RESUMPTION)
async def resume_search(request: Request, service: Service, user: SignedIn, record: OwnJob) -> Submitted:
    """Resumes a search that has ended: the same job, with its trials and their checkpoints."""
    # Read here, as in submit_job.
    text = await request.body()
    try:
        asked = TypeAdapter(Resumption | None).validate_json(text or b"null")
    except ValidationError as error:
        found = [{**each, "loc": ("body", *each["loc"])} for each in error.errors(include_url=False)]
        raise RequestValidationError(found) from None
    return await run_in_threadpool(_resume, service, user, record.id, asked or Resumption())


def _resume(service: Backend, user: User, job_id: str, resumption: Resumption) -> Submitted:
    # Loaded again: the job may have changed while the body was read.
    service.submissions.resume(find_job(service, job_id), user.name, resumption)
    reopened = find_job(service, job_id)
    return _submitted(service, user, reopened, reason_never_fits(stored_request(reopened), service.snapshot()))


@router.get("/jobs/{job_id}/bundle", response_class=Response, responses=_ARCHIVE)
def get_bundle(service: Service, record: OwnJob) -> Response:
    """The archive that was submitted."""
    return Response(_bundle(service, record), media_type="application/gzip")


@router.get("/jobs/{job_id}/events")
def list_events(service: Service, user: SignedIn, record: Job, after: Number = 0, limit: Limit = 1000) -> EventList:
    """Events, oldest first. The checkpoint folder is shown only to the job's user."""
    found = service.store.history.events(record.id, after=after, limit=limit)
    views = [EventView.model_validate(event) for event in found]
    folder = None if may_manage(record, user) else checkpoint_folder(service, record)
    if folder:
        views = [view.model_copy(update={"text": view.text.replace(folder, _HIDDEN_FOLDER)}) for view in views]
    return EventList(events=views, after=views[-1].number if views else after)


@router.get("/jobs/{job_id}/progress")
def get_progress(
    service: Service,
    record: Job,
    after_step: Annotated[int, Query(ge=-1, le=MAX_NUMBER)] = -1,
    limit: Annotated[int, Query(ge=1, le=10_000, description="Answer with at most this many, evenly chosen.")] = 1000,
) -> ProgressList:
    """What the chief of a training job reported, by step."""
    with service.store.database.reading() as connection:
        points = queries.thinned_progress(connection, record.id, after_step, limit)
    return ProgressList(points=[ProgressView.model_validate(point) for point in points])


@router.get("/jobs/{job_id}/tasks")
def list_tasks(service: Service, record: Job) -> TaskList:
    """All tasks of a job, in order of launch."""
    return TaskList(tasks=service.store.tasks(job_id=record.id))


@router.get("/jobs/{job_id}/explain")
def explain_job(service: Service, user: SignedIn, record: Job) -> Explanation:
    """Why a job does not run."""
    shown = dataclasses.replace(record, failure=_failure(record)) if may_manage(record, user) else record
    return explain(shown, service.snapshot())


@router.get("/jobs/{job_id}/plan")
def get_plan(record: Job) -> PlanView:
    """The current or last plan of a training job."""
    if record.kind is not JobKind.TRAINING:
        raise HTTPException(404, f"Job '{record.id}' is a search; searches have no plan.")
    known = [data["plan"] for data in (record.result, record.state_data) if data and data.get("plan")]
    # A job's state omits the profile if it is the request's.
    return PlanView(plan={"profile": record.request["profile"], **known[0]} if known else None)


def _by_queue(
    service: Backend, user: str | None, states: Sequence[JobState], limit: int, after: JobRecord | None
) -> list[JobRecord]:
    """Running jobs, then the queue, then those that have ended, `limit` of them after the job `after`."""
    positions = service.snapshot().queue_positions()

    def place(record: JobRecord) -> tuple[bool, float, float, str]:
        if record.state is not JobState.QUEUED:
            return False, 0.0, -record.submitted_s, record.id
        return True, positions.get(record.id, math.inf), record.submitted_s, record.id

    found: list[JobRecord] = []
    if after is None or not after.state.has_ended():
        wanted = [state for state in states if not state.has_ended()]
        found = sorted(service.store.jobs(user=user, states=wanted, brief=True), key=place)
        found = [record for record in found if after is None or place(record) > place(after)][:limit]
        after = None
    ended = [state for state in states if state.has_ended()]
    before = None if after is None else after.id
    return found + service.store.jobs(user=user, states=ended, limit=limit - len(found), before=before, brief=True)


def view_values(service: Backend, user: User, records: Sequence[JobRecord]) -> list[dict[str, Any]]:
    ids = [record.id for record in records]
    snapshot = service.snapshot()
    positions = snapshot.queue_positions()
    with service.store.database.reading() as connection:
        live = queries.live_tasks(connection, ids)
        points = queries.last_progress(connection, ids)
    searches = [one.id for one in records if one.kind is JobKind.SEARCH]
    with service.searches.reading() as connection:
        trials = queries.trial_states(connection, searches)
        best = queries.best_values(connection, queries.search_modes(connection, searches))
    return [
        {
            **{name: getattr(record, name) for name in JobView.model_fields if hasattr(record, name)},
            "live_tasks": live.get(record.id, 0),
            "progress": points.get(record.id),
            "trials": trials.get(record.id),
            "best": best.get(record.id),
            "queue_position": positions.get(record.id) if record.state is JobState.QUEUED else None,
            "waiting_s": _waiting_s(record, snapshot.jobs.get(record.id)),
            "waiting": _waiting(record, snapshot),
            "failure": _failure(record) if may_manage(record, user) else _without_folder(record),
            "result": record.result if may_manage(record, user) else _hidden(record.result),
            "yours": may_manage(record, user),
        }
        for record in records
    ]


def _hidden(result: dict[str, Any] | None) -> dict[str, Any] | None:
    return result if result is None or "checkpoint_dir" not in result else {**result, "checkpoint_dir": _HIDDEN_FOLDER}


def _without_folder(record: JobRecord) -> str:
    folder = (record.result or {}).get("checkpoint_dir")
    return record.failure.replace(folder, _HIDDEN_FOLDER) if folder else record.failure


def _waiting(record: JobRecord, snapshot: Snapshot) -> str:
    """Why a job does not run; what `dike explain` says, if the record only has that no offer comes."""
    is_vague = record.waiting.startswith(NO_OFFER) and not record.state.has_ended()
    return explain(record, snapshot).sentence if is_vague else record.waiting


def _waiting_s(record: JobRecord, facts: JobFacts | None) -> float | None:
    if record.state is not JobState.QUEUED:
        return None
    since_s = record.submitted_s if record.started_s is None else None if facts is None else facts.waits_since_s
    return None if since_s is None else max(0.0, time.time() - since_s)


def _failure(record: JobRecord) -> str:
    """Why a job failed, with its script's last message, which is output and so only for its owner."""
    words = (record.result or {}).get("last_words")
    return f"{words}; {record.failure}" if words else record.failure


def _submit(service: Backend, user: User, values: Any, bundle: bytes) -> Submitted:
    request: TrainingRequest | SearchJobRequest = read_request(values)
    problem = reason_never_fits(request, service.snapshot())
    return _submitted(service, user, service.submissions.submit(request, bundle, user.name), problem)


def _submitted(service: Backend, user: User, record: JobRecord, problem: str) -> Submitted:
    [view] = view_values(service, user, [record])
    return Submitted(**view, warnings=[problem] if problem else [])


async def _part(part: UploadFile | str | None, name: str) -> bytes:
    """The content of a form's part; browsers send text as a field, other clients as a file."""
    if part is None:
        raise HTTPException(422, f"The form has no part '{name}'; send request and bundle as multipart/form-data.")
    return await part.read() if isinstance(part, UploadFile) else part.encode()


def _bundle(service: Backend, record: JobRecord) -> bytes:
    archive = service.store.bundle(record.bundle_token)
    if archive is None:
        raise HTTPException(404, f"Job '{record.id}' has no bundle any more.")
    return archive


def _renamed(service: Backend, values: dict[str, Any]) -> dict[str, Any]:
    """A job's request under a free name; a search also gets a folder of its own."""
    spec = values.get("spec", values)
    before = spec.get("name")
    if before is None:
        return values
    for number in itertools.count(2):
        ending = f"-{number}"
        name = before[: MAX_NAME - len(ending)] + ending
        if service.store.job(name) is None:
            break
    if spec is values:
        return {**values, "name": name}
    folder = f"{spec['checkpoint_dir']}{ending}" if spec.get("checkpoint_dir") else ""
    return {**values, "spec": {**spec, "name": name, "checkpoint_dir": folder}}
