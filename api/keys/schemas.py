"""What API keys look like to an administrator."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

Role = Literal["viewer", "editor", "admin"]


class KeyRequest(BaseModel):
    """A key to be made."""

    model_config = ConfigDict(extra="forbid")

    name: Annotated[str, Field(min_length=1, max_length=120)]
    role: Role


class KeyView(BaseModel):
    """A key, without its secret."""

    id: str
    name: str
    role: Role
    prefix: str = Field(description="the key's first characters, to recognise it by")
    created_at: datetime
    last_used_at: datetime | None = Field(description="to the minute")
    revoked_at: datetime | None


class NewKey(KeyView):
    """A key just made: the only answer that shows its secret."""

    key: str | None = Field(description="the secret; null in the repeated answer to an Idempotency-Key")


class KeyPage(BaseModel):
    """Keys, newest first."""

    data: list[KeyView]
    next_cursor: str | None
