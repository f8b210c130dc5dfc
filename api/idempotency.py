"""One answer per Idempotency-Key: the key, the work and the answer are committed together or not at all."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import Header
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from sqlalchemy.orm import Session

from api.context import Caller, Context
from store.errors import Conflict
from store.models import IdempotencyKey
from store.repositories import idempotency

Key = Annotated[
    str | None,
    Header(
        alias="Idempotency-Key",
        min_length=1,
        max_length=255,
        pattern=r"^[\x21-\x7e]+$",
        description="for a week, a repeat with the same body gets the first answer, with another body 409",
    ),
]


@dataclass(frozen=True)
class Answer:
    """What a creating request answers; ``repeated`` when an earlier request with its key did the work."""

    status: int
    body: dict[str, Any]
    repeated: bool


Create = Callable[[Session], BaseModel]
"""Does the work in a session; its result is the answer."""


def once(
    context: Context,
    caller: Caller,
    key: str | None,
    request: tuple[str, Any],
    status: int | Callable[[dict[str, Any]], int],
    prepare: Callable[[], Create],
    *,
    remember: Callable[[dict[str, Any]], dict[str, Any]] = dict,
) -> Answer:
    """Do the work of ``request`` in one committed transaction, or repeat the answer that ``key`` got before.

    Args:
        context: the app's context.
        caller: whose keys these are.
        key: the Idempotency-Key; without one the work is simply done.
        request: what must be the same in a repeat: the operation and its plain-JSON body.
        status: the status of a fresh answer, or what tells it from the answer's body.
        prepare: checks the request, outside the transaction, and returns what to do inside it.
        remember: what of the answer may be stored for repeats (all of it by default).

    Raises:
        Conflict: the key came with another request before. Whatever else is raised leaves no trace.
    """
    if key is None:
        create = prepare()
        with context.write.begin() as session:
            body = create(session).model_dump(mode="json")
        return Answer(_status(status, body), body, repeated=False)
    fingerprint = _fingerprint(request)
    with context.read() as session:
        before = idempotency.find(session, caller.workspace_id, key, fingerprint)
    if before is not None:
        return _repeat(before)
    create = prepare()
    with context.write.begin() as session:
        row, repeated = idempotency.begin(session, caller.workspace_id, key, fingerprint)
        if repeated:
            return _repeat(row)
        body = create(session).model_dump(mode="json")
        idempotency.complete(session, row, _status(status, body), remember(body))
    return Answer(_status(status, body), body, repeated=False)


def _status(status: int | Callable[[dict[str, Any]], int], body: dict[str, Any]) -> int:
    return status if isinstance(status, int) else status(body)


def _repeat(row: IdempotencyKey) -> Answer:
    if row.status_code is None or row.response is None:
        raise Conflict("a request with this Idempotency-Key is under way")
    return Answer(row.status_code, row.response, repeated=True)


def respond(answer: Answer, location: str) -> JSONResponse:
    """The HTTP form of ``answer``; ``location`` is the collection that the new id belongs to."""
    headers = {"Location": f"{location}/{answer.body['id']}"}
    if answer.repeated:
        headers["Idempotency-Replayed"] = "true"
    return JSONResponse(answer.body, status_code=answer.status, headers=headers)


def _fingerprint(request: tuple[str, Any]) -> str:
    return hashlib.sha256(json.dumps(request, sort_keys=True).encode()).hexdigest()
