"""Every error as `{"detail": "one sentence"}`; no traceback ever leaves the process."""

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
    """Makes an application answer so."""
    app.exception_handler(HTTPException)(_http_error)
    app.exception_handler(RequestValidationError)(_invalid)
    app.exception_handler(DikeError)(_refused)
    app.exception_handler(Exception)(_unexpected)


async def _http_error(request: Request, error: HTTPException) -> JSONResponse:
    # Where nothing of ours has answered, the detail is the status' name only.
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
    # The message names the database: the operator is to read it, and not everybody.
    logger.error("%s %s: %s", request.method, request.url.path, error)
    if is_of_database and not isinstance(error, StorageUnavailableError):
        return JSONResponse({"detail": "The service's database cannot hold what was sent."}, 400)
    return JSONResponse({"detail": "The service's database cannot be used now; its log says more."}, 503)


async def _unexpected(request: Request, error: Exception) -> JSONResponse:
    # The server logs the traceback, and closes the connection: a client must not send its next request on it.
    detail = "The service met an error of its own; its log says more."
    return JSONResponse({"detail": detail}, 500, {"Connection": "close"})
