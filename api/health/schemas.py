"""What health looks like to a monitor."""

from __future__ import annotations

from pydantic import BaseModel, Field


class Health(BaseModel):
    """The process answers."""

    status: str = Field(examples=["ok"])


class Readiness(BaseModel):
    """Whether the service can run jobs now, and what is missing if not."""

    ready: bool
    database: bool
    broker: bool
    queues: dict[str, bool] = Field(description="whether a live worker serves each queue")
