"""The REST API of a service, under `/api/v1`; its OpenAPI document is at `/openapi.json`, and `/docs` shows it.

| method and path | answers with | who |
|---|---|---|
| GET /me | Me | all |
| POST /jobs (multipart: `request` JSON, `bundle` tar.gz) | 201 Submitted | all |
| GET /jobs?user=&state=&limit=&before=&order= | JobList; `state` may be given several times | all |
| GET /jobs/{id} | JobDetails | all |
| POST /jobs/{id}/kill | 202 JobView | owner, admin |
| POST /jobs/{id}/again | 201 Submitted: request and bundle once more | owner, admin |
| GET /jobs/{id}/bundle | application/gzip | owner, admin |
| GET /jobs/{id}/events?after=&limit= | EventList | all |
| GET /jobs/{id}/progress?after_step=&limit= | ProgressList, thinned to `limit` points | all |
| GET /jobs/{id}/tasks | TaskList | all |
| GET /jobs/{id}/logs?task=&after=&follow= | text/plain, or application/x-ndjson if accepted | owner, admin |
| GET /jobs/{id}/outputs | OutputList: what its script has written | owner, admin |
| GET /jobs/{id}/outputs/content?path= | application/octet-stream: one of those files | owner, admin |
| GET /jobs/{id}/model?trial=&epoch= | application/x-tar: the folder that holds its model | owner, admin |
| GET /jobs/{id}/explain | framework.service.explanation.Explanation | all |
| GET /jobs/{id}/plan | PlanView; 404 for a search | all |
| GET /jobs/{id}/trials | TrialList; 404 for a training job | all |
| GET /jobs/{id}/slices | SliceList; 404 for a training job | all |
| GET /jobs/{id}/losses?trial=&limit= | LossList; 404 for a training job | all |
| GET /jobs/{id}/importance | ImportanceView; 404 for a training job | all |
| GET /cluster | ClusterView | all |

Besides, without a token: `GET /healthz` (Health, 200 or 503), `GET /metrics` (Prometheus text; by user with a token),
`GET /sign-in` (SignIn), `GET /` (the page).

Everything else needs `Authorization: Bearer TOKEN`, or a proxy that says who asks
(`framework.service.api.backend.Proxy`). Every answer of 400 and above is a Problem: `{"detail": "..."}`.

Logs as application/x-ndjson: one JSON object a line, `{"number", "task", "stream", "text"}` for each chunk; a blank
line now and then while nothing comes; with `follow` a last line `{"ended": STATE}` once the job has ended. A connection
that ends without it was broken; go on with `after=NUMBER` of the last chunk.
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
"""What a form takes besides its parts."""

SWAGGER_UI = Path(fastapi_offline.__file__).parent / "static"
"""Swagger UI's own files: FastAPI's page would have browsers fetch them from another host."""

TAGS = {
    "jobs": "Training jobs and searches: submitted, looked at, ended; their output and their files.",
    "searches": "What only a search has: trials, time slices, losses.",
    "service": "The service itself and its cluster.",
}

THREADS = 10
"""Each holds a connection to the database now and then, of which there are 15: the loop must never wait for one."""

_PROBLEMS: dict[int | str, dict[str, Any]] = {
    400: {"model": Problem, "description": "It cannot be done."},
    401: {"model": Problem, "description": "There is no valid token."},
    403: {"model": Problem, "description": "It is somebody else's, or more than you may have."},
    404: {"model": Problem, "description": "There is no such thing."},
    408: {"model": Problem, "description": "The body came too slowly."},
    413: {"model": Problem, "description": "It is too large."},
    422: {"model": Problem, "description": "It cannot be understood."},
    503: {"model": Problem, "description": "The service cannot do it now."},
}


def make_app(backend: Backend, page: Path, hosts: frozenset[str] | None) -> Guard:
    """The application that answers clients.

    Args:
        backend: the service.
        page: folder of the web page.
        hosts: what a request may call us; None for anything.
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
    # Around all of it, answers to errors of our own included.
    return Guard(
        app,
        metrics=backend.metrics,
        hosts=hosts,
        body_limit_bytes={f"{PREFIX}/jobs": SIZE_LIMIT_BYTES + jobs.REQUEST_LIMIT_BYTES + FORM_BYTES},
        other_limit_bytes=SMALL_BODY_BYTES,
    )


class _Application(FastAPI):
    """Documents what the form that submits a job holds, too, which no route takes as a parameter."""

    def openapi(self) -> dict[str, Any]:
        """The OpenAPI document."""
        document = super().openapi()
        schema = TypeAdapter(JobRequest).json_schema(ref_template="#/components/schemas/{model}")
        document["components"]["schemas"] |= {**schema.pop("$defs"), "JobRequest": schema}
        return document


def _operation_id(route: APIRoute) -> str:
    """What generated clients call a route: as its function, such as `list_jobs`."""
    return route.name


@contextlib.asynccontextmanager
async def _few_threads(app: FastAPI) -> AsyncIterator[None]:
    current_default_thread_limiter().total_tokens = THREADS
    yield
