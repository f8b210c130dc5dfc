"""Column types that behave the same on SQLite and PostgreSQL."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from sqlalchemy import JSON, BigInteger, DateTime, Dialect, Integer
from sqlalchemy.types import TypeDecorator


def utcnow() -> datetime:
    """The current time, UTC-aware, in microseconds."""
    return datetime.now(UTC)


class UTCDateTime(TypeDecorator[datetime]):
    """An aware datetime, always UTC; SQLite stores it without the offset, so text order is time order."""

    impl = DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        """Raises ValueError for a naive datetime: whose clock it was cannot be told later."""
        if value is None:
            return None
        if value.tzinfo is None:
            raise ValueError("a stored time must be aware of its time zone")
        value = value.astimezone(UTC)
        return value.replace(tzinfo=None) if dialect.name == "sqlite" else value

    def process_result_value(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        if value is None:
            return None
        return value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)


PlainJSON: JSON = JSON(none_as_null=True)  # Python None is SQL NULL, never the JSON text "null"
BigId = BigInteger().with_variant(Integer, "sqlite")  # SQLite auto-increments INTEGER keys only

JSONDict = dict[str, Any]
