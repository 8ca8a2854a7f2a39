"""Jobs' output, as it comes."""

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
from framework.service.api.backend import Backend, OwnJob, Service, SignedIn, may_still
from framework.service.api.jobs import Number
from framework.service.api.searches import opened_search
from framework.service.requests import SearchJobRequest, stored_request

PAGE = 200
"""Chunks read at a time."""
POLL_S = 0.5
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
    task: Annotated[str | None, Query(max_length=64, pattern=r"^[^\x00]*$", description="Only of this one.")] = None,
    trial: Annotated[
        int | None, Query(ge=0, le=2**31 - 1, description="What this trial of a search printed, all its runs.")
    ] = None,
    after: Number = 0,
    follow: Annotated[bool, Query(description="Goes on until the job has ended, or the trial.")] = False,
    accept: Annotated[str, Header()] = "",
) -> StreamingResponse:
    """What a job's tasks wrote, or a trial: text, or one JSON object a line if application/x-ndjson is accepted."""
    if trial is None:
        source = _of_tasks(service, record, task)
    else:
        source = await run_in_threadpool(_of_trial, service, record, trial)
    if follow and (problem := service.followers.take(user.name)):
        raise HTTPException(503, problem, {"Retry-After": "10"})
    is_json = NDJSON in accept
    may_go_on = functools.partial(may_still, request, record) if follow else None
    stream = _Stream(service, source, after, may_go_on, is_json=is_json)
    media_type = NDJSON if is_json else "text/plain; charset=utf-8"
    if follow:
        at_end = functools.partial(service.followers.give_back, user.name)
        response: StreamingResponse = _Following(stream.lines(), at_end, media_type)
    else:
        response = StreamingResponse(stream.lines(), media_type=media_type)
    # nginx, where there is one, would otherwise gather lines for a while.
    response.headers["X-Accel-Buffering"] = "no"
    return response


class _Following(StreamingResponse):
    """Gives its place up in the end, even if the client is gone before the first line.

    Args:
        lines: what is sent.
        at_end: gives up the place.
        media_type: of the lines.
    """

    def __init__(self, lines: AsyncIterator[str], at_end: Callable[[], None], media_type: str) -> None:
        super().__init__(lines, media_type=media_type)
        self._at_end = at_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._at_end()


State = JobState | TrialState | None
Source = Callable[[int], tuple[State, list[OutputChunk]]]
"""Reads what came after the piece of a number, after it has read how the job or the trial stands; a job that has been
deleted stands nowhere."""


def _of_tasks(service: Backend, record: JobRecord, task: str | None) -> Source:
    def look(after: int) -> tuple[State, list[OutputChunk]]:
        with service.store.database.reading() as connection:
            state = queries.state_of(connection, record.id)
            return state, queries.output(connection, record.id, after=after, task=task, limit=PAGE)

    return look


def _of_trial(service: Backend, record: JobRecord, trial: int) -> Source:
    store = opened_search(service, record)
    request = stored_request(record)
    assert isinstance(request, SearchJobRequest)
    if trial >= (count := request.to_spec().trial_count):
        raise HTTPException(404, f"The search '{record.id}' has no trial {trial}; its trials are 0 to {count - 1}.")

    def look(after: int) -> tuple[State, list[OutputChunk]]:
        nonlocal store
        with service.store.database.reading() as connection:
            job_state = queries.state_of(connection, record.id)
        store = store or (None if job_state is None else opened_search(service, record))
        if store is None:
            return job_state, []
        state = store.trial_state(trial)
        chunks = store.load_output(trial, after=after, limit=PAGE)
        return state if state is not None and state.has_ended() else job_state, chunks

    return look


class _Stream:
    """Output as it comes.

    Args:
        service: it ends with that.
        source: what is read.
        after: the number of the piece before the first.
        may_go_on: whether its reader may still read, if it goes on until the end; None for what there is now.
        is_json: a JSON object a line in the place of text.
    """

    def __init__(
        self,
        service: Backend,
        source: Source,
        after: int,
        may_go_on: Callable[[], Awaitable[bool]] | None,
        *,
        is_json: bool,
    ) -> None:
        self._service = service
        self._source = source
        self._after = after
        self._may_go_on = may_go_on
        self._is_json = is_json

    async def lines(self) -> AsyncIterator[str]:
        said_s = time.monotonic()
        while True:
            state, chunks = await run_in_threadpool(self._source, self._after)
            # After it is read: what is written after a token is taken away is not shown.
            if self._may_go_on is not None and not await self._may_go_on():
                return
            for chunk in chunks:
                yield self._line(chunk)
                self._after = chunk.number
            if chunks:
                # There may be more at once; and what was written before the end is read before it is believed.
                said_s = time.monotonic()
                continue
            if self._may_go_on is None or self._service.closing.is_set():
                return
            if state is None or state.has_ended():
                if self._is_json:
                    yield json.dumps({"ended": state}) + "\n"
                return
            if self._is_json and time.monotonic() - said_s >= KEEP_ALIVE_S:
                said_s = time.monotonic()
                yield "\n"
            await asyncio.sleep(POLL_S)

    def _line(self, chunk: OutputChunk) -> str:
        if not self._is_json:
            return chunk.text
        values = {"number": chunk.number, "task": chunk.task, "stream": chunk.stream, "text": chunk.text}
        return json.dumps(values) + "\n"
