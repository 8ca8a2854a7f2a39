"""The REST API of a service, under `/api/v1`; its OpenAPI document is at `/openapi.json`, and `/docs` shows it.

| method and path | answers with | allowed for |
|---|---|---|
| GET /me | Me | all |
| POST /jobs (multipart: `request` JSON, `bundle` tar.gz) | 201 Submitted | all |
| GET /jobs?user=&state=&limit=&before=&order= | JobList; `state` may be given several times | all |
| GET /jobs/{id} | JobDetails | all |
| POST /jobs/{id}/kill | 202 JobView | owner, admin |
| POST /jobs/{id}/release | 202 JobView: a held job that may start now | owner, admin |
| POST /jobs/{id}/again | 201 Submitted: request and bundle again | owner, admin |
| POST /jobs/{id}/resume (optional JSON: Resumption) | Submitted: the search, resumed | owner, admin |
| GET /jobs/{id}/bundle | application/gzip | owner, admin |
| GET /jobs/{id}/events?after=&limit= | EventList | all |
| GET /jobs/{id}/progress?after_step=&limit= | ProgressList, thinned to `limit` points | all |
| GET /jobs/{id}/tasks | TaskList | all |
| GET /jobs/{id}/logs?task=&after=&follow= | text/plain, or application/x-ndjson if accepted | owner, admin |
| GET /jobs/{id}/outputs | OutputList: files that its script has written | owner, admin |
| GET /jobs/{id}/outputs/content?path= | application/octet-stream: one of those files | owner, admin |
| GET /jobs/{id}/model?trial=&epoch= | application/x-tar: the checkpoint folder of its model | owner, admin |
| GET /jobs/{id}/explain | framework.service.explanation.Explanation | all |
| GET /jobs/{id}/plan | PlanView; 404 for a search | all |
| GET /jobs/{id}/trials | TrialList; 404 for a training job | all |
| GET /jobs/{id}/slices | SliceList; 404 for a training job | all |
| GET /jobs/{id}/losses?trial=&limit= | LossList; 404 for a training job | all |
| GET /jobs/{id}/importance | ImportanceView; 404 for a training job | all |
| GET /cluster | ClusterView | all |
| GET /usage?weeks= | UsageList: hours of GPUs and CPUs by user and week | all; of others admin |

Without a token: `GET /healthz` (Health, 200 or 503), `GET /metrics` (Prometheus text; by user with a token),
`GET /sign-in` (SignIn), `GET /` (the page).

Everything else needs `Authorization: Bearer TOKEN`, or a proxy that signs users in
(`framework.service.api.backend.Proxy`). Every answer of 400 and above is a Problem: `{"detail": "..."}`.

Logs as application/x-ndjson: one JSON object a line, `{"number", "task", "stream", "text"}` for each chunk; a blank
keep-alive line from time to time; with `follow` a last line `{"ended": STATE}` once the job has ended. A connection
that ends without it was broken; resume with `after=NUMBER` of the last chunk.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import fastapi_offline
from anyio.to_thread import current_default_thread_limiter
from fastapi import APIRouter, FastAPI
from fastapi.responses import FileResponse
from fastapi.routing import APIRoute
from fastapi.staticfiles import StaticFiles
from pydantic import TypeAdapter

from dike._version import __version__
from framework.project.bundle import SIZE_LIMIT_BYTES
from framework.service.api import cluster, jobs, logs, outputs, searches
from framework.service.api.backend import Backend
from framework.service.api.errors import handle_errors
from framework.service.api.guard import PREFIX, Guard
from framework.service.api.schemas import Problem
from framework.service.requests import JobRequest

SMALL_BODY_BYTES = 64 * 2**10
FORM_BYTES = 64 * 2**10
"""Overhead of a multipart form besides its parts."""

SWAGGER_UI = Path(fastapi_offline.__file__).parent / "static"
"""Local files of Swagger UI: FastAPI's own page makes browsers fetch them from another host."""

TAGS = {
    "jobs": "Training jobs and searches: submit, list, inspect, kill; their output and files.",
    "searches": "Searches only: trials, time slices, losses.",
    "service": "The service itself and its cluster.",
}

THREADS = 10
"""Each uses a database connection at times, of which there are 15: the service's loop must never wait for one."""

_PROBLEMS: dict[int | str, dict[str, Any]] = {
    400: {"model": Problem, "description": "The request cannot be carried out."},
    401: {"model": Problem, "description": "The token is missing or invalid."},
    403: {"model": Problem, "description": "The job is another user's, or a limit of yours is exceeded."},
    404: {"model": Problem, "description": "Not found."},
    408: {"model": Problem, "description": "The body arrived too slowly."},
    413: {"model": Problem, "description": "The request is too large."},
    422: {"model": Problem, "description": "The request is malformed."},
    503: {"model": Problem, "description": "The service is temporarily unavailable."},
}


def make_app(backend: Backend, page: Path, hosts: frozenset[str] | None) -> Guard:
    """Creates the ASGI application of the API and the web page; `hosts` are names allowed in the Host header, None for
    any.
    """
    app = _Application(
        title="Dike",
        version=__version__,
        description="Plans and runs deep-learning work on a shared Apache Mesos cluster.",
        openapi_tags=[{"name": name, "description": text} for name, text in TAGS.items()],
        generate_unique_id_function=_operation_id,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        lifespan=_few_threads,
    )
    app.state.backend = backend
    handle_errors(app)
    api = APIRouter(prefix=PREFIX, responses=_PROBLEMS)
    for router in (cluster.router, jobs.router, logs.router, outputs.router, searches.router):
        api.include_router(router)
    app.include_router(api)
    app.include_router(cluster.open_router, responses={503: {"model": Problem}})
    app.add_api_route("/docs", lambda: FileResponse(page / "docs.html"), include_in_schema=False)
    app.mount("/swagger-ui", StaticFiles(directory=SWAGGER_UI), name="swagger-ui")
    app.mount("/", StaticFiles(directory=page, html=True), name="page")
    # Outermost, so that it also covers answers to internal errors.
    return Guard(
        app,
        metrics=backend.metrics,
        hosts=hosts,
        body_limit_bytes={f"{PREFIX}/jobs": SIZE_LIMIT_BYTES + jobs.REQUEST_LIMIT_BYTES + FORM_BYTES},
        other_limit_bytes=SMALL_BODY_BYTES,
    )


class _Application(FastAPI):
    """Adds the schema of the submission form, which no route takes as a parameter, to the OpenAPI document."""

    def openapi(self) -> dict[str, Any]:
        document = super().openapi()
        schema = TypeAdapter(JobRequest).json_schema(ref_template="#/components/schemas/{model}")
        document["components"]["schemas"] |= {**schema.pop("$defs"), "JobRequest": schema}
        return document


def _operation_id(route: APIRoute) -> str:
    """The operation id, by which generated clients name a route: its function's name, such as `list_jobs`."""
    return route.name


@contextlib.asynccontextmanager
async def _few_threads(app: FastAPI) -> AsyncIterator[None]:
    current_default_thread_limiter().total_tokens = THREADS
    yield
