"""Pages of rows, newest first, by an opaque cursor."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, TypeVar

from sqlalchemy import Select, tuple_
from sqlalchemy.orm import Session

from store.errors import InvalidCursor
from store.types import UTCDateTime

Row = TypeVar("Row")


def newest_first(
    session: Session, query: Select[Row], model: Any, *, limit: int, cursor: str | None
) -> tuple[Sequence[Row], str | None]:
    """At most ``limit`` rows of ``query`` after ``cursor`` by falling (created_at, id), and the next cursor.

    Rows created while a reader pages are on pages already read: nothing is skipped, nothing repeated.

    Raises:
        InvalidCursor: ``cursor`` did not come from here.
    """
    if cursor is not None:
        created_at, row_id = _decode(cursor)
        position = tuple_(created_at, row_id, types=[UTCDateTime(), model.id.type])
        query = query.where(tuple_(model.created_at, model.id) < position)
    query = query.order_by(model.created_at.desc(), model.id.desc()).limit(limit + 1)
    rows: list[Any] = list(session.scalars(query))
    if len(rows) <= limit:
        return rows, None
    rows = rows[:limit]
    return rows, _encode(rows[-1].created_at, rows[-1].id)


def _encode(created_at: datetime, row_id: str) -> str:
    return base64.urlsafe_b64encode(f"{created_at.isoformat()}|{row_id}".encode()).decode().rstrip("=")


def _decode(cursor: str) -> tuple[datetime, str]:
    try:
        text = base64.urlsafe_b64decode(cursor + "=" * (-len(cursor) % 4)).decode()
        created_at, row_id = text.split("|")
        moment = datetime.fromisoformat(created_at)
        if moment.tzinfo is None or "\0" in row_id:
            raise ValueError("a time without its zone, or text that PostgreSQL cannot hold")
        return moment.astimezone(UTC), row_id
    except (binascii.Error, ValueError, OverflowError):  # the last: years 1 and 9999, at the edge of a zone
        raise InvalidCursor("cursor does not come from this list") from None
