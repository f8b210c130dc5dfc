"""What profiles look like to a client. The request is ``recast_engine.config.ProfileConfig`` itself."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, Field

from api.jobs.schemas import JobView

EXAMPLE = {
    "model": "miniature",
    "rewards": ["clipscore", "hpsv2", "ocr"],
    "prompt_set": "pset_miniature_train",
    "estimator": {
        "kind": "self_tilted",
        "alpha": 2.0,
        "levels": 7,
        "prompts": 24,
        "images_per_prompt": 4,
        "rollouts": 1,
        "sampling_steps": 8,
    },
    "seed": 0,
}


class Curve(BaseModel):
    """One reward's divergence by noise level, in the order of ``levels``."""

    divergence: list[float] = Field(description="cleaned up: never rises with sigma, 0 at sigma 1")
    divergence_raw: list[float] = Field(description="as measured")
    standard_error: list[float] = Field(description="of the raw values, by the jackknife over prompts")
    ci_low: list[float] = Field(description="95% bootstrap interval over prompts")
    ci_high: list[float]
    gain: list[float] = Field(description="fall of the divergence between neighbouring levels")
    gain_low: list[float]
    gain_high: list[float]
    total: float = Field(description="divergence of clean images")
    max_violation_se: float = Field(description="largest violation of monotonicity, standard errors")
    prompts: int = Field(description="prompts the estimate rests on")
    images: int


class ProfileView(JobView):
    """A profile: its job, and once measured its curves."""

    config: dict[str, Any] = Field(description="the resolved request")
    levels: list[float] | None = Field(description="the noise levels sigma; null until measured")
    curves: dict[str, Curve] | None


class CreatedProfile(ProfileView):
    """The answer to a request for a profile."""

    reused: bool = Field(
        description="an earlier request's profile, stored or still being measured; nothing new was started"
    )


class Gains(BaseModel):
    """Discriminability gains resampled to a sampler's steps."""

    steps: int
    shift: float
    sigmas: list[float] = Field(description="the steps + 1 noise levels, descending, the last one 0")
    gains: dict[str, list[float]] = Field(description="for each reward, one gain per step, noisiest first")
