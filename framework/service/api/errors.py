"""Turns every error into `{"detail": "one sentence"}`; no traceback leaves the process."""

from __future__ import annotations

import logging

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from sqlalchemy.exc import SQLAlchemyError
from starlette.exceptions import HTTPException

from dike.exceptions import BadInputError, DikeError
from framework.scheduler.journal import StorageUnavailableError
from framework.service.users import OverLimitError

logger = logging.getLogger(__name__)


def handle_errors(app: FastAPI) -> None:
    app.exception_handler(HTTPException)(_http_error)
    app.exception_handler(RequestValidationError)(_invalid)
    app.exception_handler(DikeError)(_refused)
    app.exception_handler(Exception)(_unexpected)


async def _http_error(request: Request, error: HTTPException) -> JSONResponse:
    # Starlette's own errors have only the status' name as their detail.
    detail = {
        "Not Found": "There is nothing at this address; /openapi.json lists what there is.",
        "Method Not Allowed": "This address does not take that method; /openapi.json says which it takes.",
    }.get(error.detail, error.detail)
    return JSONResponse({"detail": detail}, error.status_code, error.headers)


async def _invalid(request: Request, error: RequestValidationError) -> JSONResponse:
    first = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"])
    return JSONResponse({"detail": f"The request cannot be understood: {where}: {first['msg']}."}, 422)


async def _refused(request: Request, error: DikeError) -> JSONResponse:
    is_of_database = isinstance(error.__cause__, SQLAlchemyError)
    if isinstance(error, BadInputError) and not is_of_database:
        return JSONResponse({"detail": str(error)}, 403 if isinstance(error, OverLimitError) else 400)
    # Logged, not sent: the message names the database, which is only for the operator.
    logger.error("%s %s: %s", request.method, request.url.path, error)
    if is_of_database and not isinstance(error, StorageUnavailableError):
        return JSONResponse({"detail": "The service's database cannot hold what was sent."}, 400)
    return JSONResponse({"detail": "The service's database cannot be used now; its log says more."}, 503)


async def _unexpected(request: Request, error: Exception) -> JSONResponse:
    # uvicorn logs the traceback and closes the connection, so a client must not reuse it.
    detail = "The service failed with an internal error; see its log."
    return JSONResponse({"detail": detail}, 500, {"Connection": "close"})
