"""Route of jobs' output, with following."""

from __future__ import annotations

import asyncio
import functools
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Annotated

from fastapi import APIRouter, Header, HTTPException, Query, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from framework.scheduler.records import JobRecord, JobState, OutputChunk
from framework.search.records import TrialState
from framework.service import queries
from framework.service.api.backend import Backend, OwnJob, Service, SignedIn, is_still_allowed
from framework.service.api.jobs import Number
from framework.service.api.searches import opened_search
from framework.service.requests import SearchJobRequest, stored_request

PAGE_SIZE = 200
POLL_INTERVAL_S = 0.5
KEEP_ALIVE_S = 10.0
NDJSON = "application/x-ndjson"

router = APIRouter(tags=["jobs"])


@router.get(
    "/jobs/{job_id}/logs",
    response_class=StreamingResponse,
    responses={
        200: {"content": {"text/plain": {"schema": {"type": "string"}}, NDJSON: {"schema": {"type": "string"}}}}
    },
)
async def get_logs(
    request: Request,
    service: Service,
    user: SignedIn,
    record: OwnJob,
    task: Annotated[str | None, Query(max_length=64, pattern=r"^[^\x00]*$", description="Only of this task.")] = None,
    trial: Annotated[
        int | None, Query(ge=0, le=2**31 - 1, description="Output of this trial of a search, all its runs.")
    ] = None,
    after: Number = 0,
    follow: Annotated[bool, Query(description="Continue until the job or the trial has ended.")] = False,
    accept: Annotated[str, Header()] = "",
) -> StreamingResponse:
    """Output of a job's tasks or of a trial: text, or one JSON object a line if application/x-ndjson is accepted."""
    if trial is None:
        source = _of_tasks(service, record, task)
    else:
        source = await run_in_threadpool(_of_trial, service, record, trial)
    if follow and (problem := service.followers.acquire(user.name)):
        raise HTTPException(503, problem, {"Retry-After": "10"})
    is_json = NDJSON in accept
    is_allowed = functools.partial(is_still_allowed, request, record) if follow else None
    stream = _Stream(service, source, after, is_allowed, is_json=is_json)
    media_type = NDJSON if is_json else "text/plain; charset=utf-8"
    if follow:
        on_end = functools.partial(service.followers.release, user.name)
        response: StreamingResponse = _FollowingResponse(stream.lines(), on_end, media_type)
    else:
        response = StreamingResponse(stream.lines(), media_type=media_type)
    # Keeps nginx from buffering lines.
    response.headers["X-Accel-Buffering"] = "no"
    return response


class _FollowingResponse(StreamingResponse):
    """Releases its follower at the end, even if the client disconnects before the first line."""

    def __init__(self, lines: AsyncIterator[str], on_end: Callable[[], None], media_type: str) -> None:
        super().__init__(lines, media_type=media_type)
        self._at_end = on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._at_end()


State = JobState | TrialState | None
Source = Callable[[int], tuple[State, list[OutputChunk]]]
"""Reads the state of the job or trial, then the chunks with numbers above the argument; the state of a deleted job is
None."""


def _of_tasks(service: Backend, record: JobRecord, task: str | None) -> Source:
    def read(after: int) -> tuple[State, list[OutputChunk]]:
        with service.store.database.reading() as connection:
            state = queries.state_of(connection, record.id)
            return state, queries.output(connection, record.id, after=after, task=task, limit=PAGE_SIZE)

    return read


def _of_trial(service: Backend, record: JobRecord, trial: int) -> Source:
    store = opened_search(service, record)
    request = stored_request(record)
    assert isinstance(request, SearchJobRequest)
    if trial >= (count := request.to_spec().trial_count):
        raise HTTPException(404, f"The search '{record.id}' has no trial {trial}; its trials are 0 to {count - 1}.")

    def read(after: int) -> tuple[State, list[OutputChunk]]:
        nonlocal store
        with service.store.database.reading() as connection:
            job_state = queries.state_of(connection, record.id)
        store = store or (None if job_state is None else opened_search(service, record))
        if store is None:
            return job_state, []
        state = store.trial_state(trial)
        chunks = store.load_output(trial, after=after, limit=PAGE_SIZE)
        return state if state is not None and state.has_ended() else job_state, chunks

    return read


class _Stream:
    """Streams output; without `is_allowed`, which checks that the client may still read, it stops at the current
    end.
    """

    def __init__(
        self,
        service: Backend,
        source: Source,
        after: int,
        is_allowed: Callable[[], Awaitable[bool]] | None,
        *,
        is_json: bool,
    ) -> None:
        self._service = service
        self._source = source
        self._after = after
        self._may_go_on = is_allowed
        self._is_json = is_json

    async def lines(self) -> AsyncIterator[str]:
        last_sent_s = time.monotonic()
        while True:
            state, chunks = await run_in_threadpool(self._source, self._after)
            # Checked after the read: output written after a token is revoked is not sent.
            if self._may_go_on is not None and not await self._may_go_on():
                return
            for chunk in chunks:
                yield self._line(chunk)
                self._after = chunk.number
            if chunks:
                # There may be more: everything written before the end is read before the end is sent.
                last_sent_s = time.monotonic()
                continue
            if self._may_go_on is None or self._service.closing.is_set():
                return
            if state is None or state.has_ended():
                if self._is_json:
                    yield json.dumps({"ended": state}) + "\n"
                return
            if self._is_json and time.monotonic() - last_sent_s >= KEEP_ALIVE_S:
                last_sent_s = time.monotonic()
                yield "\n"
            await asyncio.sleep(POLL_INTERVAL_S)

    def _line(self, chunk: OutputChunk) -> str:
        if not self._is_json:
            return chunk.text
        values = {"number": chunk.number, "task": chunk.task, "stream": chunk.stream, "text": chunk.text}
        return json.dumps(values) + "\n"
