"""What trainings look like to a client. The request is ``recast_engine.config.TrainingConfig`` itself."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from pydantic import BaseModel, Field

from api.jobs.schemas import JobView
from recast_engine.config import AllocationMethod, Refresh

EXAMPLE = {
    "model": "miniature",
    "prompt_set": "pset_miniature_train",
    "stages": [
        {
            "budgets": {"clipscore": 0.3, "appearance": 0.3, "ocr": 0.4},
            "epochs": 20,
            "allocation": {"method": "recast", "temperature": 1.0},
        }
    ],
    "lora": {"rank": 32, "alpha": 64},
    "sampling": {"steps": 10, "prompts_per_epoch": 12, "images_per_prompt": 8},
    "optimizer": {"learning_rate": 0.0003},
    "seed": 0,
    "checkpoint_every": 5,
}


class StageView(BaseModel):
    """A stage: what was asked for, and which profile and allocations it trained with."""

    budgets: dict[str, float] = Field(description="normalised, over rewards")
    epochs: int
    method: AllocationMethod | None = Field(description="null where a stored allocation was named")
    refresh: Refresh | None = Field(description="null where a stored allocation was named: it stays")
    profile: str | None = Field(description="the profile behind the allocation in use")
    allocation: str | None = Field(description="the allocation in use; null until the stage starts")
    allocations: list[str] = Field(description="every allocation the stage trained with, in order")


class TrainingView(JobView):
    """A training: its job, its resolved config, its stages."""

    config: dict[str, Any]
    stages: list[StageView]


class Series(BaseModel):
    """One scalar over epochs."""

    steps: list[int]
    values: list[float]


class Metrics(BaseModel):
    """Time series of a training; go on with ``after=next_after``."""

    series: dict[str, Series] = Field(description="by name, such as `reward/ocr/mean` or `loss/kl`")
    next_after: int | None = Field(description="the last epoch in this answer; null when it is empty")
    more: bool = Field(description="whether the limit cut later epochs off")


class Sample(BaseModel):
    """A grid of sample images; the PNG is at ``url``."""

    id: str
    url: str
    epoch: int | None
    steps: int | None
    solver: str | None
    cell: list[int] | None = Field(description="width and height of one image, pixels")
    columns: int | None
    images: list[dict[str, Any]] = Field(description="prompt and seed of each image, row by row")
    bytes: int
    sha256: str
    created_at: datetime


class SampleList(BaseModel):
    """Sample grids by rising epoch."""

    data: list[Sample]
    next_cursor: None = None


class Checkpoint(BaseModel):
    """A checkpoint that the training can go on from."""

    id: str
    name: str
    epoch: int | None
    step: int | None
    stage: int | None
    bytes: int
    sha256: str
    created_at: datetime


class CheckpointList(BaseModel):
    """Checkpoints by rising epoch."""

    data: list[Checkpoint]
    next_cursor: None = None
