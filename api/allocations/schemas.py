"""What allocations look like to a client, asking and answering."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator

from recast_engine.config import AllocationMethod, Budgets, Shift, Steps, Temperature

Gain = Annotated[float, Field(ge=0.0, le=1e12)]
RewardName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9 ._:/-]{0,79}$")]
EXAMPLE_GAINS = {
    "gains": {"ocr": [0.05, 0.4, 0.05], "hpsv2": [0.3, 0.1, 0.1]},
    "budgets": {"ocr": 1, "hpsv2": 3},
    "steps": 3,
}
EXAMPLE_PROFILE = {
    "profile": "prof_01kbcd3f5v8m2q9r7x4y6z0abc",
    "budgets": {"prompt_fidelity": 0.6, "text_accuracy": 0.4},
    "steps": 10,
    "method": "recast",
    "temperature": 1.0,
}


class AllocationRequest(BaseModel):
    """Gains, measured or given, and budgets: what an allocation matrix is computed from."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    profile: str | None = Field(default=None, max_length=80, description="id of a measured profile")
    gains: (
        Annotated[
            dict[RewardName, Annotated[list[Gain], Field(min_length=1, max_length=1000)]],
            Field(min_length=1, max_length=64),
        ]
        | None
    ) = Field(default=None, description="for each reward, one gain per step, noisiest first")
    budgets: Budgets = Field(description="weights of rewards, or of objectives that stand for their rewards")
    steps: Steps | None = Field(default=None, description="needed with a profile; else the gains' length")
    shift: Shift | None = Field(
        default=None, description="timestep shift of the sampler; null: the model's own"
    )
    method: AllocationMethod = "recast"
    temperature: Temperature = 1.0

    @field_validator("gains")
    @classmethod
    def _rows_agree(cls, gains: dict[str, list[float]] | None) -> dict[str, list[float]] | None:
        lengths = {reward: len(row) for reward, row in (gains or {}).items()}
        if len(set(lengths.values())) > 1:
            listed = ", ".join(f"{reward} {length}" for reward, length in lengths.items())
            raise ValueError(f"every reward needs a gain for each step; there are {listed}")
        return gains

    @field_validator("steps")
    @classmethod
    def _steps_are_the_rows(cls, steps: int | None, info: ValidationInfo) -> int | None:
        for reward, row in (info.data.get("gains") or {}).items():
            if steps is not None and steps != len(row):
                raise ValueError(
                    f"{reward} has gains for {len(row)} steps; leave steps out, or say {len(row)}"
                )
        return steps

    @model_validator(mode="after")
    def _one_source(self) -> AllocationRequest:
        if (self.profile is None) == (self.gains is None):
            raise ValueError("give exactly one of profile and gains")
        if self.profile is not None and self.steps is None:
            raise ValueError("a profile needs the number of steps")
        if self.gains is not None and self.shift is not None:
            raise ValueError("shift only applies to a profile: gains already belong to steps")
        return self


class Diagnostics(BaseModel):
    """How good the solution is, and what it asks of each step."""

    row_residual: float = Field(description="largest violation of a budget")
    column_residual: float = Field(description="largest violation of a step's total")
    iterations: int
    kl_from_static: float = Field(description="KL divergence from static weighting")
    demand: list[float] = Field(description="budget-weighted relative gain of each step")
    demand_ratio: float | None = Field(description="largest over smallest demand from the second step on")


class AllocationResult(BaseModel):
    """An allocation matrix: how much of each reward acts at each step, noisiest first."""

    rewards: list[str] = Field(description="the matrix's rows")
    steps: int
    budgets: dict[str, float] = Field(description="normalised to sum 1; row sums are steps times these")
    method: AllocationMethod
    temperature: float
    matrix: list[list[float]]
    gains: list[list[float]] = Field(description="the gains it was computed from")
    sigmas: list[float] | None = Field(description="noise levels of the steps, where known")
    diagnostics: Diagnostics


class AllocationView(AllocationResult):
    """A stored allocation; it never changes."""

    id: str
    profile: str | None
    training: str | None = Field(description="the training that computed it, if one did")
    stage: int | None
    epoch: int | None = Field(description="epochs that the training had finished")
    reason: str | None = Field(description="why the training computed it: its stage began, or a refresh")
    created_at: datetime


class AllocationSummary(BaseModel):
    """An allocation in a list."""

    id: str
    rewards: list[str]
    steps: int
    budgets: dict[str, float]
    method: AllocationMethod
    temperature: float
    profile: str | None
    training: str | None
    stage: int | None
    epoch: int | None
    reason: str | None
    created_at: datetime


class AllocationPage(BaseModel):
    """Allocations, newest first."""

    data: list[AllocationSummary]
    next_cursor: str | None
