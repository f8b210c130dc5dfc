"""What the catalogues look like to a client."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, Field


class ModelView(BaseModel):
    """A base model."""

    id: str = Field(examples=["miniature"])
    family: str = Field(examples=["sd3"])
    repository: str | None = Field(description="hub repository of its weights; null for a local folder")
    revision: str | None = Field(description="of the repository, as a commit hash where known")
    resolution: int = Field(description="side of its images, pixels")
    default_steps: int = Field(description="of sample grids; trainings and evaluations say their own")
    shift: float = Field(
        description="s of the sampler's noise levels at this resolution: an evenly spaced u becomes"
        " s u / (1 + (s - 1) u)"
    )
    licence: str
    gated: bool
    memory_gib: float = Field(description="device memory that training it takes, estimated")
    available: bool
    reason: str | None = Field(description="why it is not available, and how to make it so")


class ModelList(BaseModel):
    """All base models."""

    data: list[ModelView]
    next_cursor: None = None


class RewardView(BaseModel):
    """A reward."""

    id: str = Field(examples=["ocr"])
    objective: str = Field(examples=["text_accuracy"])
    summary: str = Field(description="what the score is")
    range: tuple[float, float] = Field(description="lowest and highest score it is meant to give")
    higher_is_better: bool
    needs_metadata: list[str] = Field(description="prompt fields without which it cannot score")
    role: Literal["training", "held_out", "both"]
    licence: str
    memory_gib: float = Field(description="device memory of its full-size weights; 0: none to speak of")
    weights: str | None = Field(description="where its full-size weights come from")
    available: bool = Field(description="whether it can score images of an available model")
    available_for: list[str] = Field(description="the models whose images it can score here")
    reason: str | None = Field(description="why it is not available, and how to make it so")


class RewardList(BaseModel):
    """All rewards."""

    data: list[RewardView]
    next_cursor: None = None


class ProposalSourceView(BaseModel):
    """A source of images for the external-proposal estimator."""

    id: Literal["openai", "google", "folder", "diffusers"]
    summary: str
    default_model: str | None
    available: bool | None = Field(
        description="whether every live worker for profiles can use it; null when none is there to say"
    )
    reason: str | None = Field(description="what makes it available")


class ProposalSourceList(BaseModel):
    """All sources of proposals."""

    data: list[ProposalSourceView]
    next_cursor: None = None
