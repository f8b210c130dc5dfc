"""The query parameters of every list."""

from __future__ import annotations

from typing import Annotated

from fastapi import Path, Query

ID_PATTERN = r"^[A-Za-z0-9_-]{1,80}$"

Limit = Annotated[int, Query(ge=1, le=100, description="how many to return")]
Cursor = Annotated[
    str | None,
    Query(max_length=200, pattern=r"^[A-Za-z0-9_=-]+$", description="`next_cursor` of the page before"),
]
Id = Annotated[str, Path(pattern=ID_PATTERN, description="the resource's id")]
