"""The first answer to every creating request that carries an Idempotency-Key."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from sqlalchemy import delete
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from store.errors import Conflict
from store.models import IdempotencyKey


def begin(session: Session, workspace_id: str, key: str, request_hash: str) -> tuple[IdempotencyKey, bool]:
    """Reserve ``key``, or find what a request before it answered: (row, whether it is a repeat).

    Call it in the transaction that does the work: a request with the same key that is under way at the same
    time makes this call wait, and a failed one leaves no trace.

    Raises:
        Conflict: the key was used with another request.
    """
    found = session.get(IdempotencyKey, (workspace_id, key))
    if found is None:
        row = IdempotencyKey(workspace_id=workspace_id, key=key, request_hash=request_hash)
        try:
            with session.begin_nested():
                session.add(row)
            return row, False
        except IntegrityError:  # a request at the same time was faster, and has been answered by now
            found = session.get_one(IdempotencyKey, (workspace_id, key))
    _check(found, request_hash)
    return found, True


def find(session: Session, workspace_id: str, key: str, request_hash: str) -> IdempotencyKey | None:
    """What the request with ``key`` answered; None when there was none or it is under way.

    Raises:
        Conflict: the key was used with another request.
    """
    row = session.get(IdempotencyKey, (workspace_id, key))
    if row is None or row.status_code is None:
        return None
    _check(row, request_hash)
    return row


def _check(row: IdempotencyKey, request_hash: str) -> None:
    if row.request_hash != request_hash:
        raise Conflict("this Idempotency-Key was used with another request")


def complete(session: Session, row: IdempotencyKey, status_code: int, response: Mapping[str, Any]) -> None:
    """Record the answer that repeats will get."""
    row.status_code, row.response = status_code, dict(response)
    session.flush()


def forget(session: Session, before: datetime) -> None:
    """Drop answers given before ``before``: their keys may then be used for something else."""
    session.execute(delete(IdempotencyKey).where(IdempotencyKey.created_at < before))
