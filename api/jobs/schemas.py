"""What a job looks like to a client."""

from __future__ import annotations

from datetime import datetime
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

Kind = Literal["profile", "training", "evaluation"]
Status = Literal["queued", "running", "cancelling", "succeeded", "failed", "cancelled"]

EXAMPLE_JOB: dict[str, Any] = {
    "id": "train_01kbcd3f5v8m2q9r7x4y6z0abc",
    "kind": "training",
    "status": "running",
    "progress": {"phase": "training", "done": 4, "total": 20, "eta_seconds": 96.0},
    "error": None,
    "attempt": 1,
    "created_at": "2026-12-01T05:00:00Z",
    "started_at": "2026-12-01T05:00:01Z",
    "finished_at": None,
    "cost": {
        "model_evaluations": 51200,
        "reward_calls": 3072,
        "proposal_images": 0,
        "device_seconds": 24.5,
    },
    "parent": None,
    "warnings": [],
    "result": None,
}


class Progress(BaseModel):
    """Where a job stands within its current phase."""

    phase: str | None = Field(description="what the engine is doing", examples=["training"])
    done: int
    total: int
    eta_seconds: float | None = Field(
        description="time left in this phase at its pace so far; null if unknown"
    )


class JobError(BaseModel):
    """Why a job failed."""

    type: str = Field(examples=["weights-unavailable"])
    detail: str


class Cost(BaseModel):
    """What a job has spent so far, all attempts together."""

    model_evaluations: int = 0
    reward_calls: int = 0
    proposal_images: int = 0
    device_seconds: float = 0.0


class JobView(BaseModel):
    """The shape that all jobs share."""

    model_config = ConfigDict(json_schema_extra={"examples": [EXAMPLE_JOB]})

    id: str
    kind: Kind
    status: Status
    progress: Progress
    error: JobError | None
    attempt: int = Field(description="how often the job was claimed by a worker")
    created_at: datetime
    started_at: datetime | None
    finished_at: datetime | None
    cost: Cost
    parent: str | None = Field(description="the training that started this job, if one did")
    warnings: list[str]
    result: dict[str, Any] | None = Field(description="the job's short result once it has succeeded")


class JobPage(BaseModel):
    """Jobs, newest first."""

    data: list[JobView]
    next_cursor: str | None


class EventView(BaseModel):
    """One event of a job; ``seq`` increases."""

    seq: int
    type: str = Field(examples=["progress"])
    data: dict[str, Any]
    created_at: datetime


class EventPage(BaseModel):
    """Events of a job, oldest first; go on with ``after=next_after``."""

    data: list[EventView]
    next_after: int | None = Field(description="null once the job is over and every event was read")


class Seconds(BaseModel):
    """A span of device seconds."""

    low: float
    high: float


class Estimate(BaseModel):
    """What a request would cost if it were started."""

    model_evaluations: int
    reward_calls: int
    proposal_images: int
    device_seconds: Seconds | None
    basis: str = Field(description="where the numbers come from")
