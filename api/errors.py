"""Errors to RFC 9457 problem documents: the only place that knows status codes."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel, Field
from sqlalchemy.exc import DBAPIError, InterfaceError, OperationalError, TimeoutError
from starlette.exceptions import HTTPException
from starlette.routing import compile_path

from api import refusals
from recast_engine.errors import EngineError
from recast_engine.prompts import PromptSetError
from store import database
from store import errors as store_errors

MEDIA_TYPE = "application/problem+json"
LOG = logging.getLogger("api.errors")


class FieldProblem(BaseModel):
    """One offending field of a request."""

    loc: list[str | int] = Field(examples=[["body", "stages", 0, "budgets", "ocr"]])
    msg: str = Field(examples=["Input should be greater than or equal to 0"])


class Problem(BaseModel):
    """RFC 9457 problem details."""

    type: str = Field(examples=["urn:recast:problem:invalid-request"])
    title: str = Field(examples=["The request is not valid"])
    status: int = Field(examples=[422])
    detail: str
    instance: str = Field(examples=["/v1/trainings"])
    errors: list[FieldProblem] | None = Field(default=None, description="every offending field, if any is")
    incident: str | None = Field(default=None, description="what to quote when reporting a failure of ours")


_KNOWN: dict[type[Exception], tuple[HTTPStatus, str, str]] = {
    refusals.Unauthenticated: (HTTPStatus.UNAUTHORIZED, "unauthenticated", "A valid key is needed"),
    refusals.Forbidden: (HTTPStatus.FORBIDDEN, "forbidden", "The key's role does not allow this"),
    refusals.TooLarge: (HTTPStatus.REQUEST_ENTITY_TOO_LARGE, "too-large", "The request is too large"),
    refusals.UnsupportedMediaType: (
        HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
        "unsupported-media-type",
        "The content type is not supported",
    ),
    refusals.NotReady: (HTTPStatus.CONFLICT, "not-ready", "The result is not there yet"),
    refusals.RangeUnsatisfiable: (
        HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE,
        "range-not-satisfiable",
        "The range cannot be served",
    ),
    refusals.Invalid: (HTTPStatus.UNPROCESSABLE_ENTITY, "invalid-request", "The request is not valid"),
    store_errors.NotFound: (HTTPStatus.NOT_FOUND, "not-found", "There is no such thing"),
    store_errors.ArtifactMissing: (HTTPStatus.NOT_FOUND, "file-missing", "The file is no longer stored"),
    store_errors.InvalidCursor: (
        HTTPStatus.UNPROCESSABLE_ENTITY,
        "invalid-cursor",
        "The cursor is not valid",
    ),
    store_errors.InvalidTransition: (HTTPStatus.CONFLICT, "invalid-state", "Not possible in this state"),
    store_errors.Conflict: (HTTPStatus.CONFLICT, "conflict", "The request conflicts with what is stored"),
    PromptSetError: (HTTPStatus.UNPROCESSABLE_ENTITY, "invalid-prompt-set", "The prompt set is malformed"),
    EngineError: (HTTPStatus.UNPROCESSABLE_ENTITY, "invalid-request", "The request is not valid"),
    OperationalError: (HTTPStatus.SERVICE_UNAVAILABLE, "unavailable", "The database does not answer"),
    InterfaceError: (HTTPStatus.SERVICE_UNAVAILABLE, "unavailable", "The database does not answer"),
    TimeoutError: (HTTPStatus.SERVICE_UNAVAILABLE, "unavailable", "The database does not answer"),
}


def problem(
    request_path: str,
    status: HTTPStatus | int,
    slug: str,
    title: str,
    detail: str,
    *,
    errors: Sequence[Mapping[str, Any]] | None = None,
    incident: str | None = None,
    headers: Mapping[str, str] | None = None,
) -> JSONResponse:
    """A problem+json response."""
    body: dict[str, Any] = {
        "type": f"urn:recast:problem:{slug}",
        "title": title,
        "status": int(status),
        "detail": detail,
        "instance": request_path,
    }
    if errors is not None:
        body["errors"] = list(errors)
    if incident is not None:
        body["incident"] = incident
    return JSONResponse(body, status_code=int(status), media_type=MEDIA_TYPE, headers=headers)


def unexpected(path: str, error: BaseException) -> JSONResponse:
    """The answer to a failure of ours: an incident id for the caller, the traceback only in the log."""
    incident = f"inc_{uuid.uuid4().hex}"
    LOG.error("incident %s on %s", incident, path, exc_info=error)
    return problem(
        path,
        HTTPStatus.INTERNAL_SERVER_ERROR,
        "internal",
        "Something failed on our side",
        "The request could not be completed; the failure is logged under the incident id.",
        incident=incident,
    )


def install(app: FastAPI) -> None:
    """Register a handler for every error that a request can end in."""
    for kind in _KNOWN:
        app.add_exception_handler(kind, _known)
    app.add_exception_handler(HTTPException, _http)
    app.add_exception_handler(RequestValidationError, _validation)


def _known(request: Request, error: Exception) -> JSONResponse:
    return refused(request.url.path, error)


def refused(path: str, error: Exception) -> JSONResponse:
    """The answer to an error of a known kind."""
    status, slug, title = next(_KNOWN[kind] for kind in type(error).__mro__ if kind in _KNOWN)
    errors: list[dict[str, Any]] | None = None
    detail = str(error)
    headers: dict[str, str] = {}
    if isinstance(error, refusals.Invalid):
        errors = [{"loc": list(item.loc), "msg": item.msg} for item in error.errors]
    elif isinstance(error, PromptSetError):
        errors = [{"loc": ["body", "line", line], "msg": msg} for line, msg in error.problems[:100]]
    elif isinstance(error, store_errors.InvalidCursor):
        errors = [{"loc": ["query", "cursor"], "msg": f"{detail}; send `next_cursor` of the page before"}]
    elif isinstance(error, refusals.Unauthenticated):
        headers["WWW-Authenticate"] = 'Bearer realm="recast"'
    elif isinstance(error, refusals.RangeUnsatisfiable):
        headers["Content-Range"] = f"bytes */{error.size}"
    elif status is HTTPStatus.SERVICE_UNAVAILABLE:
        LOG.error("database unavailable on %s", path, exc_info=error)
        headers["Retry-After"] = "2"
        if isinstance(error, DBAPIError) and database.is_full(error):
            title = "The database has no room"
            detail = "Nothing was stored: make room on the disk of the database, then send the request again."
        else:
            detail = "Try again in a moment."
    return problem(path, status, slug, title, detail, errors=errors, headers=headers)


def _http(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    status = HTTPStatus(error.status_code)
    slug = status.phrase.lower().replace(" ", "-")
    headers = dict(error.headers or {})
    detail = str(error.detail)
    if status is HTTPStatus.NOT_FOUND:
        detail = "nothing is served at this path; /openapi.json lists every call"
    elif status is HTTPStatus.METHOD_NOT_ALLOWED:
        headers["Allow"] = ", ".join(_methods(request)) or headers["Allow"]
        detail = f"{request.method} is not served at this path; use {headers['Allow']}"
    return problem(request.url.path, status, slug, status.phrase, detail, headers=headers)


def _methods(request: Request) -> list[str]:
    """What the request's path can be asked for by the document; the router knows those of one route only."""
    paths = request.app.openapi()["paths"]
    found = [paths[path] for path in paths if compile_path(path)[0].match(request.url.path)]
    return sorted({method.upper() for operations in found for method in operations})


def _validation(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    fields = [refusals.FieldError(tuple(item["loc"]), item["msg"]) for item in error.errors()]
    return _known(request, refusals.Invalid(fields))
