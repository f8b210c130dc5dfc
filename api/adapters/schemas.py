"""What adapters look like to a client."""

from __future__ import annotations

from datetime import datetime
from typing import Any, Literal

from pydantic import BaseModel, Field

Format = Literal["diffusers", "peft", "comfyui"]


class AdapterView(BaseModel):
    """A LoRA adapter that a training exported."""

    id: str = Field(examples=["adapt_01kbcd3f5v8m2q9r7x4y6z0abc"])
    training: str
    step: int = Field(description="optimiser steps taken")
    epoch: int
    final: bool = Field(description="the training's last adapter, not one from along the way")
    base_model: str
    rank: int
    alpha: float
    sha256: str = Field(description="of the file in the diffusers format")
    bytes: int
    provenance: dict[str, Any] = Field(description="budgets, allocation, seed, versions")
    created_at: datetime


class AdapterPage(BaseModel):
    """Adapters, newest first."""

    data: list[AdapterView]
    next_cursor: str | None
