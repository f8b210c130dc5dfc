"""The query parameters of every list, and the refusal of unknown ones."""

from __future__ import annotations

from typing import Annotated

from fastapi import Depends, Path, Query, Request

from api.auth import authenticate
from api.context import Caller
from api.refusals import FieldError, Invalid

ID_PATTERN = r"^[A-Za-z0-9_-]{1,80}$"

Limit = Annotated[int, Query(ge=1, le=100, description="how many to return")]
Cursor = Annotated[
    str | None,
    Query(max_length=200, pattern=r"^[A-Za-z0-9_=-]+$", description="`next_cursor` of the page before"),
]
Id = Annotated[str, Path(pattern=ID_PATTERN, description="the resource's id")]


def known_parameters(request: Request, _: Annotated[Caller, Depends(authenticate)]) -> None:
    """Refuse query parameters that the call does not take: a misspelt filter must not select everything.

    Raises Invalid naming each.
    """
    operation = request.app.openapi()["paths"][request.scope["route"].path][request.method.lower()]
    known = [item["name"] for item in operation.get("parameters", ()) if item["in"] == "query"]
    takes = f"this call takes {', '.join(known)}" if known else "this call takes none"
    unknown = [name for name in dict.fromkeys(request.query_params) if name not in known]
    if unknown:
        raise Invalid([FieldError(("query", name), f"unknown parameter; {takes}") for name in unknown])
