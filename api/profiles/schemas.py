"""What profiles look like to a client. The request is ``recast_engine.config.ProfileConfig`` itself."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from api.jobs.schemas import JobView
from recast_engine.config import Budgets, Shift, Steps, Temperature

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


EXAMPLE_COMPARISON = {
    "profiles": ["prof_01kbcd3f5v8m2q9r7x4y6z0abc", "prof_01kbcd3f5v8m2q9r7x4y6z0abd"],
    "budgets": {"prompt_fidelity": 0.6, "text_accuracy": 0.4},
    "steps": 10,
}


class ComparisonRequest(BaseModel):
    """Two measured profiles, and the allocation on which to see what their difference would do."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    profiles: Annotated[list[Annotated[str, Field(max_length=80)]], Field(min_length=2, max_length=2)] = (
        Field(description="ids of measured profiles: a, then b")
    )
    budgets: Budgets | None = Field(
        default=None, description="weights of rewards or objectives; null: all common rewards alike"
    )
    steps: Steps | None = Field(default=None, description="null: the model's own")
    shift: Shift | None = Field(
        default=None, description="timestep shift of the sampler; null: the model's own"
    )
    temperature: Temperature = 1.0


class Interval(BaseModel):
    """A value with its 95% interval."""

    value: float
    low: float
    high: float


class RewardComparison(BaseModel):
    """One reward in both profiles."""

    correlation: float | None = Field(description="Pearson's, of the gains; null where they do not vary")
    total_a: Interval = Field(description="divergence of clean images")
    total_b: Interval
    change: Interval = Field(description="total_b - total_a, as if the profiles were independent")
    apart_at: float | None = Field(
        description="sigma at which the curves' intervals are furthest apart, if so"
    )
    largest_weight_change: float | None = Field(description="of the reward's row; null without a budget")
    at_step: int | None = Field(description="where, from 1")
    verdict: str


class MeasuredDifference(BaseModel):
    """Something that differs in how the two profiles were measured."""

    setting: str
    a: Any
    b: Any


class ComparisonView(BaseModel):
    """What two profiles agree and disagree on."""

    profiles: list[str]
    steps: int
    shift: float
    temperature: float
    rewards: dict[str, RewardComparison]
    left_out: list[str] = Field(description="rewards that only one of them measured")
    budgets: dict[str, float] = Field(description="normalised, of the two allocations that are compared")
    largest_weight_change: float = Field(description="largest absolute change of a weight from a to b")
    reward: str = Field(description="in this reward's row")
    at_step: int = Field(description="and at this step, from 1")
    mean_weight_change: float = Field(description="mean absolute change over rewards with a budget and steps")
    differences: list[MeasuredDifference] = Field(
        description="how the profiles were measured, where not alike"
    )
